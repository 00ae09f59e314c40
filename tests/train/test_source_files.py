"""A run whose token files change ends with one message that names the file, and saves nothing afterwards."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from megapipe.train.metrics import Observer, StepSummary
from tests.data.test_source_files import other_bytes
from tests.harness import RankPool
from tests.token_files import IndexedWriter
from tests.train import jobs
from tests.train.jobs import TINY, job, job_on_rank, lines_of, steps_of

BASE = TINY.replace("--mock-data", "")
AFTER = 3  # the step after which the files change


def change_during_run(monkeypatch: pytest.MonkeyPatch, path: Path, act: Callable[[Path], None]) -> None:
    def on_step_end(self: Observer, step: StepSummary) -> None:
        if step.step == AFTER:
            act(path)

    monkeypatch.setattr(Observer, "on_step_end", on_step_end)


def flags_of(folder: Path) -> str:
    data = f"--data-path {folder}/x --data-cache-path {folder}/cache --vocab-size 256 --split 1,0,0"
    return f"{data} --train-iters 6 --save {folder}/run --save-interval 2"


def with_same_time(path: Path) -> None:
    before = os.stat(path)
    other_bytes(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def removed(path: Path) -> None:
    path.unlink()


def cut(path: Path) -> None:
    os.truncate(path, 20)


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    """Token files with other tokens of the vocabulary once their bytes are others."""
    with IndexedWriter(tmp_path / "x", "u1") as writer:
        for document in range(60):
            writer.add_document([(7 * document + place) % 200 for place in range(12)])
    return tmp_path / "x"


@pytest.mark.parametrize(
    ("act", "suffix", "says", "last_logged"),
    [
        (other_bytes, "bin", "has changed since the run began", AFTER),
        (with_same_time, "bin", "has changed since the run began", AFTER),
        (cut, "bin", "was cut since it was opened", AFTER),
        (cut, "idx", "was cut since it was opened", AFTER),
        (removed, "bin", "now. Steps since the last check", AFTER),
        (removed, "idx", "which cannot be read (No such file or directory) now", AFTER),
    ],
    ids=["overwritten", "overwritten_with_its_time", "cut", "cut_index", "vanished", "vanished_index"],
)
def test_a_run_whose_token_file_changes_ends_and_saves_nothing_more(
    tmp_path: Path,
    prefix: Path,
    monkeypatch: pytest.MonkeyPatch,
    act: Callable[[Path], None],
    suffix: str,
    says: str,
    last_logged: int,
) -> None:
    path = prefix.with_suffix(f".{suffix}")
    change_during_run(monkeypatch, path, act)
    code, said = job(flags_of(tmp_path), BASE)
    assert code == 1 and said.count(f"token file {path} ") == 1 and says in said, said
    assert steps_of(tmp_path / "run" / "metrics.jsonl")[-1]["step"] == last_logged
    assert [path.name for path in (tmp_path / "run").glob("step_*")] == ["step_00000002"]
    failures = [record["error"] for record in lines_of(tmp_path / "run" / "run.jsonl") if record["kind"] == "failure"]
    assert failures == ["DataError"]


def test_a_run_whose_token_files_are_touched_goes_on_with_one_remark(
    tmp_path: Path, prefix: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change_during_run(monkeypatch, prefix.with_suffix(".bin"), lambda path: os.utime(path, (1, 1)))
    code, said = job(flags_of(tmp_path), BASE)
    assert code == 0 and said.count("x.bin was written to or touched during the run") == 1, said


def _change(rank: int, path: Path) -> None:
    jobs.TINY = BASE

    def on_step_end(self: Observer, step: StepSummary) -> None:
        if step.step == AFTER and rank == 1:
            other_bytes(path)

    Observer.on_step_end = on_step_end  # type: ignore[method-assign]


def test_all_ranks_end_with_one_message_if_a_token_file_changes(tmp_path: Path, prefix: Path) -> None:
    outcomes = RankPool(2).run(job_on_rank, flags_of(tmp_path), _change, prefix.with_suffix(".bin"))
    (first, said), *others = [outcome[1:] for outcome in outcomes]
    assert first == "DataError" and f"token file {prefix}.bin has changed" in str(said)
    assert others == [(first, said)]
