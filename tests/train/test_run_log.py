"""run.jsonl: description and outcome of a run, for the report."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from megapipe import __version__
from megapipe.config.load import from_yaml
from megapipe.extras.report.folder import read_run
from megapipe.extras.report.page import page
from megapipe.train.journal import Journal
from tests.harness import RankPool
from tests.train.jobs import job, job_on_rank, lines_of


def test_a_run_records_its_start_its_notes_and_its_end_and_a_resumed_one_appends(tmp_path: Path) -> None:
    flags = f"--lr-decay-style constant --save {tmp_path} --load {tmp_path}"
    assert job(f"--train-iters 2 {flags}")[0] == 0
    assert job(f"--train-iters 3 --use-mcore-models {flags}")[0] == 0
    records = lines_of(tmp_path / "run.jsonl")
    starts = [record for record in records if record["kind"] == "start"]
    assert [record["path"] for record in records if record["kind"] == "resumed"] == [str(tmp_path / "step_00000002")]
    assert starts[0]["versions"]["megapipe"] == __version__ and starts[0]["grid"]["world_size"] == 1
    assert from_yaml(starts[0]["config"]).training.train_iters == 2
    assert "every element of the model once" in starts[0]["plan"]
    ends = [record for record in records if record["kind"] == "end"]
    assert [(end["step"], end["reason"], end["early"]) for end in ends] == [
        (2, "all 2 steps done", False),
        (3, "all 3 steps done", False),
    ]
    assert any(record["kind"] == "note" and record["text"].startswith("saved ") for record in records)
    run = read_run(tmp_path)
    assert [[record["step"] for record in segment.steps] for segment in run.segments] == [[1, 2], [3]]
    assert starts[0]["remarks"] == [] and "--use-mcore-models" in starts[1]["remarks"][0]
    assert f"from {tmp_path}/step_00000002" in page(run)


def test_a_rank_that_fails_leaves_its_message(rank_pools: Callable[[int], RankPool], tmp_path: Path) -> None:
    flags = f"--train-iters 9 --lr 1e30 --pipeline-model-parallel-size 2 --metrics-file {tmp_path}/metrics.jsonl"
    outcomes = RankPool(2).run(job_on_rank, flags)
    assert outcomes[0][1] == "TrainingError"
    failures = [record for record in lines_of(tmp_path / "run.jsonl") if record["kind"] == "failure"]
    assert outcomes[0][2] in [record["text"] for record in failures]
    assert read_run(tmp_path).last.ending == "failed"


def test_a_disk_that_refuses_writes_costs_only_the_record(tmp_path: Path, capsys: object) -> None:
    (tmp_path / "file").write_text("")
    log = Journal(tmp_path / "file" / "below")
    log.record("note", text="one")
    log.record("note", text="two")
    assert capsys.readouterr().err.count("the run continues without it") == 1  # type: ignore[attr-defined]


def test_a_run_without_a_folder_leaves_no_record(tmp_path: Path, monkeypatch: object) -> None:
    monkeypatch.chdir(tmp_path)  # type: ignore[attr-defined]
    assert job("--train-iters 1")[0] == 0
    assert list(tmp_path.iterdir()) == []
