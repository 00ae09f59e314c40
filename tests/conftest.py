"""What every test gets: a reproducible hypothesis, --slow and --gpu, the markers torchfree and alone by folder, cheapest tests first."""

from __future__ import annotations

import functools
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest

if TYPE_CHECKING:
    from tests.harness import RankPool

TESTS = Path(__file__).resolve().parent
TORCH_FREE = tomllib.loads((TESTS.parent / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["megapipe"][
    "torch_free"
]
TORCH_FREE_PATHS = (
    *(package.replace(".", "/") + "/" for package in TORCH_FREE),
    *(f"test_{package}.py" for package in (*TORCH_FREE, "import_rules")),
)
# where something is timed, or has to come within seconds: other tests beside them would be in the way
ALONE_FOLDERS = ("extras/calibrate/", "extras/doctor/", "faults/", "cuda/", "lab/", "launch/")
ALONE_FILES = (
    "comm/test_store_exchange.py",
    "test_harness.py",
    *(f"train/test_{what}.py" for what in ("hangs", "kills", "pipeline_profile", "signals", "stragglers")),
)
NOT_ALONE_FILES = ("launch/test_saved_model.py", "launch/test_scripts.py")

hypothesis.settings.register_profile("megapipe", derandomize=True, deadline=None, database=None, print_blob=True)
hypothesis.settings.load_profile("megapipe")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("megapipe")
    group.addoption("--slow", action="store_true", help="also run the long variants (before a release)")
    group.addoption("--gpu", action="store_true", help="also run the tests that need a CUDA device")
    group.addoption(
        "--torchfree",
        action="store_true",
        help="only the pure tests of the plan half; the others are not even imported",
    )


def is_torchfree(path: Path) -> bool:
    """True for a test file of a package that imports no torch."""
    return path.relative_to(TESTS).as_posix().startswith(TORCH_FREE_PATHS)


def is_alone(path: Path) -> bool:
    """True for a test file that other tests would disturb."""
    place = path.relative_to(TESTS).as_posix()
    return place in ALONE_FILES or (place.startswith(ALONE_FOLDERS) and place not in NOT_ALONE_FILES)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if config.getoption("--torchfree") and collection_path.is_file() and TESTS in collection_path.parents:
        return None if is_torchfree(collection_path) else True
    return None


@pytest.fixture(scope="session")
def rank_pools() -> Iterator[Callable[[int], RankPool]]:
    """world_size -> live ranks shared by the session: rank_pools(4).run(function, *args). For jobs that leave no traces in a process."""
    from tests.harness import RankPool

    pools: dict[int, RankPool] = {}
    yield lambda world_size: pools.setdefault(world_size, RankPool(world_size))
    for pool in pools.values():
        pool.close()


@functools.cache
def cuda_is_there() -> bool:
    """Asked of a child process: a parent that has touched CUDA cannot fork ranks."""
    probe = "import sys, torch; sys.exit(0 if torch.cuda.is_available() else 1)"
    return subprocess.run([sys.executable, "-c", probe], capture_output=True).returncode == 0


def cost_class(item: pytest.Item) -> int:
    """0 walls, 1 pure, 2 one process, 3 gloo ranks, 4 gpu, 5 slow."""
    if item.path.name == "test_import_rules.py":
        return 0
    if item.get_closest_marker("slow"):
        return 5
    if item.get_closest_marker("gpu"):
        return 4
    if item.get_closest_marker("torchfree"):
        return 1
    names = {*vars(getattr(item, "module", object)), *getattr(item, "fixturenames", ())}
    return 3 if names & {"run_ranks", "RankPool", "rank_pools"} else 2


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if TESTS in item.path.parents and is_torchfree(item.path):
            item.add_marker(pytest.mark.torchfree)
        if TESTS in item.path.parents and is_alone(item.path):
            item.add_marker(pytest.mark.alone)
        if item.get_closest_marker("slow") and not config.getoption("--slow"):
            item.add_marker(pytest.mark.skip(reason="a long variant: run with --slow"))
        if item.get_closest_marker("gpu"):
            if not config.getoption("--gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device: run with --gpu"))
            elif not cuda_is_there():
                item.add_marker(pytest.mark.skip(reason="--gpu was given but torch sees no CUDA device"))
    items.sort(key=cost_class)  # stable: files stay together within a class
