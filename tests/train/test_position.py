"""A manifest whose consumed samples do not fit its step and batch sizes is refused; right ones never are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from megapipe.checkpoint.manifest import read_manifest
from megapipe.plan.batch import BatchSchedule, ramp
from megapipe.train.state import TrainingState, batches_to_dict, check_position
from tests.checkpoint.test_crafted import rewrite
from tests.train.jobs import job

RAMP = BatchSchedule(16, 2, ramp(4, 4, 16, 40))
OLD = {"full": 16, "start": 4, "increment": 4, "ramp_samples": 40}  # as older versions wrote it
STEPS = BatchSchedule(8, 2, ((0, 4), (20, 12), (90, 8)))


@pytest.mark.parametrize("batch", [BatchSchedule(8, 2), RAMP, STEPS], ids=["constant", "ramp", "steps"])
@pytest.mark.parametrize("since", [(0, 0), (3, 20), (50, 1000)], ids=["start", "resumed", "late"])
def test_every_position_of_a_run_fits_its_batches_and_no_other_does(
    batch: BatchSchedule, since: tuple[int, int]
) -> None:
    state = TrainingState(*since, since=since)
    for _ in range(20):
        check_position(state, batches_to_dict(batch, state))
        for wrong in (-1, 1):
            other = TrainingState(state.step, state.consumed_samples + wrong, since=since)
            with pytest.raises(ValueError, match=f"{other.consumed_samples} consumed samples after step {state.step}"):
                check_position(other, batches_to_dict(batch, other))
        state.advance(batch.size_at(state.consumed_samples), 0)


@pytest.mark.parametrize(
    "sizes",
    [
        {"full": 0, "steps": []},
        {"full": -8, "steps": []},
        {"full": 12},
        {"steps": [[1, 16]]},
        {"steps": [[0, 4], [9, 0], [18, 16]]},
        {"steps": [[0, 4], [9, 8], [8, 16]]},
        OLD | {"increment": 5},
        OLD | {"increment": -4},
        OLD | {"increment": 40},
        OLD | {"full": 10**15, "increment": 1},
        OLD | {"start": 0},
        OLD | {"ramp_samples": -1},
    ],
    ids=str,
)
def test_impossible_batch_sizes_are_refused(sizes: dict[str, Any]) -> None:
    state = TrainingState(2, 8)
    saved = batches_to_dict(RAMP, state)
    if "start" in sizes:
        del saved["steps"]
    with pytest.raises(ValueError, match="batch sizes"):
        check_position(state, saved | sizes)


def test_the_ramp_of_an_older_checkpoint_is_read() -> None:
    state = TrainingState()
    for _ in range(12):
        check_position(state, {"since": [0, 0], **OLD})
        state.advance(RAMP.size_at(state.consumed_samples), 0)


def test_a_run_that_resumes_with_another_batch_size_resumes_again_and_a_wrong_position_is_refused(
    tmp_path: Path,
) -> None:
    flags = f"--lr-decay-style constant --save {tmp_path} --load {tmp_path}"
    for steps, size in ((2, 8), (4, 4), (6, 4)):
        code, said = job(f"--train-iters {steps} --global-batch-size {size} {flags}")
        assert code == 0, said
    folder = tmp_path / "step_00000006"
    state = read_manifest(folder).state
    assert state["training"]["consumed_samples"] == 2 * 8 + 4 * 4 and state["batches"]["since"] == [4, 24]
    rewrite(folder, lambda content: content["state"]["training"].update(consumed_samples=48))
    code, said = job(f"--train-iters 8 --global-batch-size 4 {flags}")
    assert code != 0 and "48 consumed samples after step 6" in said
    rewrite(folder, lambda content: content["state"].pop("batches"))  # as older versions wrote it
    assert job(f"--train-iters 7 --global-batch-size 4 {flags}")[0] == 0
    assert read_manifest(tmp_path / "step_00000007").state["batches"]["since"] == [6, 48]
