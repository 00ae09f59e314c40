"""Options and markers of all tests.

It adds --all, --gpu, --phase and --ledger-part, makes hypothesis draws reproducible, sorts test files into phases by
folder, and runs the cheapest tests first.
"""

from __future__ import annotations

import functools
import signal
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests import ledger

if TYPE_CHECKING:
    from tests.harness import RankPool

try:
    import hypothesis
except ImportError:  # a machine with only pytest runs tests/cuda
    hypothesis = None  # type: ignore[assignment]

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # a shell starts a job in the background so, and processes that tests interrupt would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

TESTS = Path(__file__).resolve().parent
TORCH_FREE = tomllib.loads((TESTS.parent / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["megapipe"][
    "torch_free"
]
TORCH_FREE_PATHS = (
    *(package.replace(".", "/") + "/" for package in TORCH_FREE),
    *(f"test_{package}.py" for package in (*TORCH_FREE, "import_rules")),
)
# tests that measure time; they do not run in parallel with other tests
ALONE = (
    *("extras/calibrate/", "extras/doctor/", "lab/", "launch/test_hang.py", "test_harness.py"),
    *("comm/test_store_exchange.py", "cuda/test_bench.py", "cuda/test_clocks.py"),
    *(f"train/test_{what}.py" for what in ("hangs", "pipeline_profile", "stragglers")),
)
ALONE_ON_A_GPU = ("cuda/",)
# tests that wait for processes to start, to be killed and to end: two cores are idle most of the time
WAITING = (
    *("faults/", "train/test_kills.py", "train/test_signals.py"),
    *(f"launch/test_{what}.py" for what in ("early_kills", "elastic", "launch", "orphans", "restarts", "slurm")),
)

# The everyday suite draws the same examples every time; with --hypothesis-seed (launch/test.sh --all) others are drawn.
if hypothesis is not None:
    derandomize = not any(a.startswith("--hypothesis-seed") for a in sys.argv)
    hypothesis.settings.register_profile(
        "megapipe", derandomize=derandomize, deadline=None, database=None, print_blob=True
    )
    hypothesis.settings.load_profile("megapipe")
LIVE_RANKS = 14  # of the pools of a session; idle ranks, too, take memory and time
LONG_TESTS = TESTS / "long_tests.txt"  # its head describes its lines
PHASES = ("torchfree", "together", "waiting", "alone")
NOT_IN_PART = "a case of another part: --all runs a 20th at each commit, --all --ledger-part all every one"
LEFT_OUT = {"--all": "a long test: run with --all", "--gpu": "needs a CUDA device: run with --gpu"}


def pytest_runtest_setup() -> None:
    """Let torch compute with one thread, as ranks do: threads that wait for each other take most of the time."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


@pytest.fixture(autouse=True)
def without_extensions() -> Iterator[None]:
    """Remove what a test's extensions have registered."""
    yield
    from megapipe.registry import EXTENSIONS

    for name in list(EXTENSIONS.loaded):
        EXTENSIONS.unload(name)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("megapipe")
    group.addoption("--all", "--slow", action="store_true", dest="run_all", help="also run the long tests")
    group.addoption(
        "--ledger-part",
        choices=[*map(str, range(ledger.PARTS)), "all"],
        help="part of the cases of the ledger (tests/ledger.py) and, with --all, of the tests that run by parts"
        " (tests/long_tests.txt); --all alone runs that of the commit",
    )
    group.addoption("--ledger-record", action="store_true", help="write what passes of the ledger to tests/ledger.tsv")
    group.addoption("--gpu", action="store_true", help="also run the tests that need a CUDA device")
    group.addoption(
        "--phase",
        choices=PHASES,
        help="collect only the files of packages that import no torch, of tests that may run two at a time, of tests"
        " that wait for seconds, or of tests that run alone because they measure time",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Set `config.ledger_parts`, the parts that run, and with --gpu what jobs set before they start CUDA.

    A test without a job, or the collection of tests, may be what starts it in this process.
    """
    if config.getoption("--gpu"):
        from megapipe.environment import set_for_libraries
        from megapipe.train.gpu_setup import GPU_LIBRARIES

        set_for_libraries(**GPU_LIBRARIES)
    config.addinivalue_line("markers", "timeout: seconds of a test, for pytest-timeout where it is installed")
    asked = config.getoption("--ledger-part")
    part = ledger.part_of_commit()[0] if asked is None and config.getoption("run_all") else asked
    parts = range(ledger.PARTS) if part == "all" else [] if part is None else [int(part)]
    config.ledger_parts = parts  # type: ignore[attr-defined]


def phase_of(path: Path, has_gpu: bool) -> str:
    """Return the phase of launch/test.sh in which a test file runs."""
    place = path.relative_to(TESTS).as_posix()
    if place.startswith(TORCH_FREE_PATHS):
        return "torchfree"
    if place.startswith(ALONE + ALONE_ON_A_GPU * has_gpu):
        return "alone"
    return "waiting" if place.startswith(WAITING) else "together"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    phase = config.getoption("--phase")
    if phase and collection_path.name.startswith("test_") and TESTS in collection_path.parents:
        return None if phase_of(collection_path, config.getoption("--gpu")) == phase else True
    return None


@pytest.fixture(scope="session")
def rank_pools() -> Iterator[Callable[[int], RankPool]]:
    """Yield a function that returns live ranks by world size: rank_pools(4).run(function, *args).

    The session shares the ranks, so use them only for jobs without side effects on the process.
    """
    from tests.harness import RankPool

    pools: dict[int, RankPool] = {}  # the last one used last

    def pool_of(world_size: int) -> RankPool:
        pools[world_size] = pools.pop(world_size, None) or RankPool(world_size)
        live = 0
        for size, pool in reversed(pools.items()):
            live += size
            if live > LIVE_RANKS:
                pool.close()  # its next job starts it again
        return pools[world_size]

    yield pool_of
    for pool in pools.values():
        pool.close()


@pytest.fixture
def two_ranks(rank_pools: Callable[[int], RankPool]) -> RankPool:
    return rank_pools(2)


@pytest.fixture(scope="session")
def fake_device() -> None:
    """Skips where the fake CUDA device cannot be built."""
    from megapipe.extras.streams import device

    why = device.missing()
    if why is not None:
        pytest.skip(f"no fake CUDA device: {why}")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a real disk of DISK_BYTES, for users who may."""
    from tests.faults import disks

    if not disks.can_mount():
        pytest.skip("needs root to mount a small file system")
    with disks.small_disk(tmp_path / "disk"):
        yield tmp_path / "disk"


@functools.cache
def cuda_is_there() -> bool:
    """Return True if a GPU is available.

    A child process checks it, since a parent that has initialized CUDA cannot fork ranks.
    """
    probe = "import sys, torch; sys.exit(0 if torch.cuda.is_available() else 1)"
    return subprocess.run([sys.executable, "-c", probe], capture_output=True).returncode == 0


def cost_class(item: pytest.Item) -> int:
    """Return the rank of a test in the order of cost.

    0 import rules, 1 pure, 2 one process, 3 gloo ranks, 4 gpu, 5 slow.
    """
    if item.path.name == "test_import_rules.py":
        return 0
    if item.get_closest_marker("slow"):
        return 5
    if item.get_closest_marker("gpu"):
        return 4
    if TESTS in item.path.parents and phase_of(item.path, has_gpu=False) == "torchfree":
        return 1
    names = {*vars(getattr(item, "module", object)), *getattr(item, "fixturenames", ())}
    return 3 if names & {"run_ranks", "RankPool", "rank_pools"} else 2


def mark_long_tests(items: list[pytest.Item], config: pytest.Config) -> None:
    """Mark as slow what long_tests.txt leaves to --all, and skip cases of other parts.

    Raises UsageError if a line names no test.
    """
    for line in LONG_TESTS.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            continue
        kept, run, name = line.split(maxsplit=2)
        path, function = name.partition("[")[0].split("::")
        if f"def {function}(" not in (TESTS.parent / path).read_text(encoding="utf-8"):
            raise pytest.UsageError(f"{LONG_TESTS}: no test is called {name}; rename or delete its line")
        cases = [item for item in items if item.nodeid == name or item.nodeid.startswith(f"{name}[")]
        if "[" in name and not cases and sum(item.nodeid.startswith(f"{path}::{function}[") for item in items) > 1:
            raise pytest.UsageError(
                f"{LONG_TESTS}: {path}::{function} has no such case: {name}; rename or delete its line"
            )
        others = cases if kept == "none" else [case for i, case in enumerate(cases) if i % int(kept[2:])]
        for case in others:
            runs = run == "all" or ledger.part_of(case.nodeid) in config.ledger_parts  # type: ignore[attr-defined]
            case.add_marker(pytest.mark.slow if runs else pytest.mark.skip(reason=NOT_IN_PART))


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    mark_long_tests(items, config)
    for item in items:
        if item.get_closest_marker("slow") and not config.getoption("run_all"):
            item.add_marker(pytest.mark.skip(reason=LEFT_OUT["--all"]))
        if item.get_closest_marker("gpu"):
            if not config.getoption("--gpu"):
                item.add_marker(pytest.mark.skip(reason=LEFT_OUT["--gpu"]))
            elif not cuda_is_there():
                item.add_marker(pytest.mark.skip(reason="--gpu was given but torch sees no CUDA device"))
    items.sort(key=cost_class)  # stable: files stay together within a class


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print how many tests were left out and why, and the state of the ledger if a part of it ran."""
    reasons = Counter(
        report.longrepr[2].removeprefix("Skipped: ") if isinstance(report.longrepr, tuple) else str(report.longrepr)
        for report in terminalreporter.stats.get("skipped", [])
    )
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"left out: {count} tests ({reason})")
    parts = terminalreporter.config.ledger_parts
    reports = [report for kind in ("passed", "failed") for report in terminalreporter.stats.get(kind, [])]
    if parts and any(report.nodeid.startswith("tests/test_ledger.py") for report in reports):
        never, changed = map(len, ledger.not_recorded())
        why = ledger.part_of_commit()[1] if terminalreporter.config.getoption("--ledger-part") is None else "as asked"
        words = f"part {parts[0]} of {ledger.PARTS}" if len(parts) == 1 else "all parts"
        terminalreporter.write_line(
            f"ledger: {words} ({why}); of {len(ledger.cases())} cases {never} were never recorded and {changed} changed"
            " since (python -m tests.ledger lists them)"
        )
