"""tools/bench/first_day.py: parts that fail, hang or are killed, the time, the record, the pages and the archive."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import shlex
import shutil
import socket
import sys
import tarfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from megapipe.config.load import load_config
from megapipe.plan.hardware import hardware_of
from megapipe.plan.memory import rank_memory
from megapipe.plan.resolve import resolve

ROOT = Path(__file__).resolve().parents[2]
H100, TORCH = "NVIDIA H100 80GB HBM3", "2.11.0"
REAL = ("facts", "primitives", "nccl-order", "grid-8", "rank", "pipeline-8")
STUBS = {
    "fails": "print('seen'); raise SystemExit(3)",
    "hangs": "import time; print('waiting', flush=True); time.sleep(60)",
    "exhausts": "import os; os.kill(os.getpid(), 9)",  # as the kernel does when memory ends
    "figures": "import sys, json; open(sys.argv[1], 'w').write(json.dumps({'figures': {'TB/s': 3.0}, 'bars': "
    "[{'name': 'copy', 'value': 3.0, 'bar': 2.0, 'met': True}]}))",
    "good": "print('x | y')",
}


@pytest.fixture
def first_day(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "tools" / "bench"))
    module = importlib.import_module("first_day")
    monkeypatch.setattr(module, "BEGAN", time.monotonic())
    monkeypatch.setattr(module, "version", lambda _: TORCH)
    return module


def part_of(name: str, **changes: Any) -> Any:
    line = f"python -c {shlex.quote(STUBS.get(name, 'pass'))} {{out}}.json"
    fields = {"cuda": "no", "cpu": line, "seconds": 1.0, "limit": 0.3 if name == "hangs" else 10.0} | changes
    return sys.modules["gpu_day.parts"].Part(name, "Whether it runs.", **fields)


@pytest.fixture
def stubs(first_day: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def use(*parts: Any) -> None:
        monkeypatch.setattr(
            first_day, "PARTS", tuple(part_of(each) if isinstance(each, str) else each for each in parts)
        )

    use(*STUBS)
    return use


@pytest.fixture
def ran(first_day: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names of the parts that run, in their order."""
    names: list[str] = []
    run = first_day.run

    def noted(words: Any, log: Path, *others: Any) -> Any:
        names.append(log.stem)
        return run(words, log, *others)

    monkeypatch.setattr(first_day, "run", noted)
    return names


def day(first_day: ModuleType, out: Path, *words: str) -> int:
    first_day.BEGAN = time.monotonic()
    return int(first_day.main(["--device", "cpu", "--out", str(out), *words]))


def rows_of(file: Path) -> dict[str, Any]:
    return {row.part: row for row in sys.modules["gpu_day.record"].Record.read(file)}


def test_what_fails_hangs_or_is_killed_leaves_the_others_and_the_record(
    first_day: ModuleType, stubs: Callable[..., None], tmp_path: Path
) -> None:
    assert day(first_day, tmp_path) == 1
    rows = rows_of(tmp_path / "gpu_record.tsv")
    results = {name: row.result for name, row in rows.items()}
    assert results == dict(zip(STUBS, ("failed", "timeout", "killed", "passed", "passed"), strict=True))
    assert "seen" in rows["fails"].log and "KeyboardInterrupt" in rows["hangs"].log and not rows["good"].log
    assert rows["figures"].figures == {"TB/s": 3.0, "bars": 1.0, "bars_met": 1.0}
    assert all(row.device == "CPU" and row.torch == TORCH for row in rows.values())
    assert sorted(file.name for file in tmp_path.iterdir()) == ["first_day.md", "first_day.tar.gz", "gpu_record.tsv"]
    summary = (tmp_path / "first_day.md").read_text()
    assert "seen" in summary and "TB/s 3" in summary and "copy" in summary
    with tarfile.open(tmp_path / "first_day.tar.gz") as tar:
        assert {f"first_day/{name}.log" for name in STUBS} | {"first_day/figures.json"} <= set(tar.getnames())


def test_a_name_may_have_a_dot_and_a_part_that_writes_no_figures_has_failed(
    first_day: ModuleType, stubs: Callable[..., None], tmp_path: Path
) -> None:
    line = f"python -c {shlex.quote(STUBS['figures'])} {{out}}.json"
    stubs(part_of("train-0.5b", cpu=line), part_of("silent", cpu="python -c pass --json {out}.json"))
    assert day(first_day, tmp_path) == 1
    rows = rows_of(tmp_path / "gpu_record.tsv")
    assert rows["train-0.5b"].result == "passed" and rows["train-0.5b"].figures["TB/s"] == 3.0
    assert rows["silent"].result == "failed" and "no figures" in rows["silent"].log


def test_a_part_ends_with_all_of_its_processes(first_day: ModuleType, tmp_path: Path) -> None:
    """Ranks lead sessions of their own, and do not end with the group of their launcher."""
    child = "import time; time.sleep(60)"
    start = f"subprocess.Popen([sys.executable, '-c', {child!r}], start_new_session=True)"
    code = f"import subprocess, sys, time\n{start}\ntime.sleep(60)"
    running = sys.modules["gpu_day.running"]
    ended = running.run([sys.executable, "-c", code], tmp_path / "log", 1.0, dict(os.environ), tmp_path)
    assert ended.result == "timeout" and ended.seconds < 30
    mark = f"{running.MARK}={os.getpid()}-".encode()

    def left() -> list[Path]:
        found = []
        for file in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                found += [file] if mark in file.read_bytes() else []
        return found

    until = time.monotonic() + 10  # a process that was killed is gone in a moment
    while left() and time.monotonic() < until:
        time.sleep(0.05)
    assert not left()


def test_a_command_of_a_part_has_the_marks_of_both(first_day: ModuleType, tmp_path: Path) -> None:
    """A part that is killed leaves no process of a command that it started in a session of its own."""
    running = sys.modules["gpu_day.running"]
    code = f"import os; print(os.environ[{running.MARK!r}])"
    ended = running.run([sys.executable, "-c", code], tmp_path / "log", 20.0, {running.MARK: "outer"}, tmp_path)
    outer, inner = (tmp_path / "log").read_text().split()
    assert ended.result == "passed" and outer == "outer" and inner.startswith(f"{os.getpid()}-")


def test_the_same_command_goes_on_behind_the_record(
    first_day: ModuleType, stubs: Callable[..., None], ran: list[str], tmp_path: Path
) -> None:
    stubs("fails", "good")
    assert day(first_day, tmp_path) == 1 and ran == ["fails", "good"]
    stubs("fails", "good", "figures")
    del ran[:]
    day(first_day, tmp_path)
    assert ran == ["figures", "fails"], "what never ran comes before what failed; what passed is left out"
    del ran[:]
    stubs("fails", part_of("good", limit=11.0), part_of("figures", cpu="python -c pass"))
    assert day(first_day, tmp_path) == 1 and ran == ["figures", "fails"], "its command has changed"
    del ran[:]
    assert day(first_day, tmp_path, "--again", "good", "--only", "good", "figures") == 0 and ran == ["good"]
    del ran[:]
    day(first_day, tmp_path, "--again")
    assert ran == ["fails", "good", "figures"]
    day(first_day, tmp_path, "--list")
    assert len(ran) == 3


def test_minutes_choose_what_fits_and_end_in_time(
    first_day: ModuleType, stubs: Callable[..., None], ran: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_day, "RESERVE_SECONDS", 1.0)
    stubs(part_of("long", seconds=90.0), part_of("hangs", limit=60.0), "good")
    began = time.monotonic()
    assert day(first_day, tmp_path, "--minutes", "0.07") == 0
    assert time.monotonic() - began < 0.07 * 60 + 3 and ran[0] == "hangs", "a machine under load may take longer to end"
    assert "hangs" not in rows_of(tmp_path / "gpu_record.tsv"), "it was not its own limit that ended it"
    assert "time was up" in (tmp_path / "first_day.md").read_text()
    stubs("good", "figures")
    del ran[:]
    day(first_day, tmp_path, "--minutes", "0.5")
    assert ran[-1] == "figures"
    assert {"good", "figures"} <= set(rows_of(tmp_path / "gpu_record.tsv"))


def test_an_interrupt_leaves_the_record_whole(
    first_day: ModuleType, stubs: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stubs("good", "figures")
    run = first_day.run

    def interrupted(words: Any, log: Path, *others: Any) -> Any:
        if log.stem == "figures":
            raise KeyboardInterrupt
        return run(words, log, *others)

    monkeypatch.setattr(first_day, "run", interrupted)
    assert day(first_day, tmp_path) == 130
    assert set(rows_of(tmp_path / "gpu_record.tsv")) == {"good"}


@pytest.mark.parametrize(
    "words",
    [
        "--minutes 0",
        "--minutes soon",
        "--only nope",
        "--again nope",
        "--merge {tmp}/none.tsv",
        "--merge {tmp}/new.tsv",
        "--record {tmp}/new.tsv",
        "--record {tmp}/text.tsv",
        "--record {tmp}/damaged.tsv",
        "--record {root}/docs/gpu_record.tsv",
    ],
)
def test_what_cannot_start_is_one_message(
    first_day: ModuleType, stubs: Callable[..., None], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = sys.modules["gpu_day.record"]
    head = f"{record.HEAD}{record.SCHEMA}\n" + "\t".join(record.COLUMNS) + "\n"
    (tmp_path / "new.tsv").write_text(head.replace(f"schema={record.SCHEMA}", "schema=99"))
    (tmp_path / "text.tsv").write_text("part\n")
    (tmp_path / "damaged.tsv").write_text(f"{head}part\tx\n")
    given = words.format(tmp=tmp_path, root=ROOT).split()
    with pytest.raises(SystemExit) as ended:
        raise SystemExit(day(first_day, tmp_path / "out", *given))
    said = capsys.readouterr().err
    assert ended.value.code == 2 and "Traceback" not in said and said.count("error:") == 1


def test_a_returned_record_is_merged(first_day: ModuleType, tmp_path: Path) -> None:
    record = sys.modules["gpu_day.record"]
    old = record.Row("a", H100, TORCH, "1", "2026-01-01T00:00:00Z", "failed", 1.0, "d", {}, 'x\ty\n"z"')
    new = dataclasses.replace(old, date="2026-01-02T00:00:00Z", result="passed", figures={"TB/s": 2.5}, log="")
    other = dataclasses.replace(old, device="NVIDIA H200")
    ours, theirs = tmp_path / "ours.tsv", tmp_path / "theirs.tsv"
    record.Record([old]).write(ours)
    record.Record([new, other]).write(theirs)
    assert [row.log for row in record.Record.read(ours)] == [old.log]
    assert first_day.main(["--merge", str(theirs), "--record", str(ours)]) == 0
    assert list(record.Record.read(ours)) == [new, other]
    record.Record([old]).write(theirs)
    assert first_day.main(["--merge", str(theirs), "--record", str(ours)]) == 0
    assert list(record.Record.read(ours)) == [new, other], "what is older changes nothing"


def test_the_pages_say_what_the_record_says(first_day: ModuleType) -> None:
    for file, text in first_day.page.pages(ROOT).items():
        assert file.read_text(encoding="utf-8") == text, f"{file}: python tools/write_gpu_tested.py"


def test_pages_follow_what_has_run(first_day: ModuleType, tmp_path: Path) -> None:
    page, record = first_day.page, sys.modules["gpu_day.record"]

    def row(part: str, result: str = "passed", device: str = H100, date: str = "2026-01-01T00:00:00Z") -> Any:
        return record.Row(part, device, TORCH, "1", date, result, 1.0, "d")

    nothing = page.sentences(record.Record())
    assert page.sentences(record.Record([row("tests-graphs", device="CPU"), row("graphs", "skipped")])) == nothing
    found = record.Record(
        [row("tests-graphs"), row("graphs"), row("tests-fp8"), row("layer-fp8", "failed"), row("rank")]
    )
    states = page.states(found)
    assert states["graphs"].is_proved and H100 in states["graphs"].text()
    assert not states["fp8"].is_proved and "layer-fp8" in states["fp8"].text() and "failed" in states["fp8"].text()
    assert states["memory"].has_run and not states["memory"].is_proved and "tests-memory" in states["memory"].text()
    assert not states["nccl"].has_run and states["nccl"].text() == page.NO
    assert not states["drivers"].is_proved, "no part shows it"
    later = [*found, row("layer-fp8", device="NVIDIA H200", date="2026-01-02T00:00:00Z")]
    assert page.states(record.Record(later))["fp8"].is_proved
    for name, sentence in page.sentences(found).items():
        assert H100 in sentence and sentence != nothing[name]
    for name in ("README.md", "docs/gpu.md", "docs/index.md", "docs/roadmap.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    found.write(tmp_path / page.RECORD)
    assert len(page.write(tmp_path)) == 4 and not page.write(tmp_path)
    assert H100 in (tmp_path / "README.md").read_text()


def test_every_part_is_small_and_shows_something(first_day: ModuleType) -> None:
    names, areas = [part.name for part in first_day.PARTS], {area.name for area in first_day.page.AREAS}
    assert len(set(names)) == len(names) and set(REAL) <= set(names)
    assert {row for part in first_day.PARTS for row in part.proves} == areas - {"drivers"}
    for part in first_day.PARTS:
        assert 10 <= part.seconds <= 90 and part.seconds < part.limit < 200, part.name
        assert part.decides.endswith("."), part.name
        for device in ("cuda", "cpu"):
            words = part.words(device, Path("out"))
            assert words[0] == sys.executable and not any("{" in word for word in words), part.name
            files = [word for word in words if word.endswith(".py") and word != "tools/bench/card.py"]
            assert all((ROOT / word).exists() for word in files), part.name
            assert ("--ranks-per-gpu" in words) == (device == "cuda" and part.shares_gpu), part.name


def test_parts_need_the_gpus_that_there_are(first_day: ModuleType, tmp_path: Path) -> None:
    def order(num_gpus: int) -> list[str]:
        machine = first_day.Machine("cuda", H100, num_gpus, TORCH, "1")
        record = sys.modules["gpu_day.record"].Record()
        return [part.name for part in first_day.Day(machine, first_day.PARTS, record, (), tmp_path, 0.0).order()]

    assert {"run-zero3", "run-ep"} <= set(order(4)) - set(order(1))
    assert order(1)[:3] == ["facts", "primitives", "run-dense"] and "grid-8" in order(1)


def test_every_training_run_fits_and_has_an_estimate(first_day: ModuleType, tmp_path: Path) -> None:
    hardware = hardware_of(H100)
    assert hardware is not None
    steps = [{"kind": "step", "loss": 3.0, "step_seconds": s, "memory_bytes": 1 << 30} for s in (9.0, 0.5, 0.5)]
    runs = [part for part in first_day.PARTS if part.name.startswith("run-")]
    assert len(runs) >= 10
    for part in runs:
        out = tmp_path / part.name
        words = part.words("cuda", out)
        flags, ranks = sys.modules["gpu_day.parts"].flags_of(words)
        plan = resolve(load_config(flags).config, ranks)
        assert max(rank_memory(plan, rank).total for rank in range(plan.topology.pp)) < 30 << 30, part.name
        out.with_suffix(".jsonl").write_text("\n".join(map(json.dumps, steps)))
        found = first_day.figures_of(part, words, out, tmp_path / "log", H100)
        assert not found.problem and found.figures["step_ms"] == 500 and found.figures["gib"] == 1, part.name
        ratio = 500 / found.figures["planned_ms"]
        assert found.figures["measured/planned"] == pytest.approx(ratio, rel=1e-3), part.name


def test_a_grid_with_other_losses_has_failed(first_day: ModuleType, tmp_path: Path) -> None:
    (part,) = (each for each in first_day.PARTS if each.name == "grid-8")
    words, out = part.words("cuda", tmp_path / "grid-8"), tmp_path / "grid-8"
    for change, fails in ((0.0, False), (0.01, True)):
        steps = [{"kind": "step", "loss": loss + change, "step_seconds": 1.0} for loss in part.losses]
        out.with_suffix(".jsonl").write_text("\n".join(map(json.dumps, steps)))
        found = first_day.figures_of(part, words, out, tmp_path / "log", H100)
        assert bool(found.problem) == fails and set(found.figures) == {"loss"}, "ranks that share a GPU show no times"


def test_tests_that_were_all_skipped_have_not_passed(
    first_day: ModuleType, stubs: Callable[..., None], tmp_path: Path
) -> None:
    (tmp_path / "test_it.py").write_text("import pytest\n\ndef test_it():\n    pytest.skip('not installed')\n")
    line = f"python -m pytest -p no:cacheprovider --rootdir {tmp_path} --noconftest -o addopts= {tmp_path}/test_it.py"
    stubs(part_of("skips", cpu=line))
    assert day(first_day, tmp_path / "out") == 0
    row = rows_of(tmp_path / "out" / "gpu_record.tsv")["skips"]
    assert row.result == "skipped" and row.figures == {"skipped": 1.0}


def test_the_archive_names_no_host_user_path_or_address(
    first_day: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    summary = sys.modules["gpu_day.summary"]
    monkeypatch.setattr(socket, "gethostname", lambda: "node7.example.org")
    monkeypatch.setattr(summary.getpass, "getuser", lambda: "ada")
    work, out = tmp_path / "work", tmp_path / "out"
    work.mkdir()
    out.mkdir()
    secrets = [
        "node7.example.org",
        "node7",
        f"{ROOT}/megapipe",
        f"{work}/x",
        f"{Path.home()}/.cache",
        "192.0.2.7",
        "fd00::2",
        "GPU-01234567-89ab-cdef-0123-456789abcdef",
    ]
    text = f"{' '.join(secrets)} ada: at 12:34:56 std::vector c10::Error 2.13.0 adam"
    (work / "doctor.log").write_text(text)
    summary.pack(out, work, "CPU")
    (work / "doctor.log").rename(work / "later.log")
    with tarfile.open(summary.pack(out, work, "CPU")) as tar:
        found = {one.name: tar.extractfile(one).read().decode() for one in tar}  # type: ignore[union-attr]
    assert found["first_day/doctor.log"] == found["first_day/later.log"], "what an earlier call packed is kept"
    assert found["first_day/doctor.log"] == (
        "<HOST> <HOST> <REPOSITORY>/megapipe <WORK>/x <HOME>/.cache <ADDRESS> <ADDRESS> <GPU> <USER>: at 12:34:56 "
        "std::vector c10::Error 2.13.0 adam"
    )
    assert "torch==" in found["first_day/versions.txt"]


@pytest.mark.timeout(600)
def test_real_twins_pass(first_day: ModuleType, tmp_path: Path) -> None:
    assert day(first_day, tmp_path, "--only", *REAL) == 0
    rows = rows_of(tmp_path / "gpu_record.tsv")
    assert {row.result for row in rows.values()} == {"passed"} and set(rows) == set(REAL)
    assert rows["rank"].figures["rank.step"] > 0 and rows["primitives"].figures["primitives.copy TB/s"] > 0
