"""Loss spikes: the run rolls back, skips the samples, and reports and records what was skipped."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megapipe.checkpoint.folder import read_rollbacks
from megapipe.checkpoint.manifest import read_manifest
from megapipe.config.training import TrainingConfig
from megapipe.data.loader import Loader
from megapipe.train import loading
from megapipe.train.guard import SpikeWatch
from tests.harness import RankPool
from tests.train.jobs import job, job_on_rank, lines_of, steps_of
from tests.train.test_saving import contents

STEADY = TrainingConfig(spike_rollback=1, spike_window=20, spike_steps=2, spike_threshold=6.0)
WATCH = (
    "--spike-rollback 1 --spike-window 8 --spike-steps 1 --spike-threshold 6 --save-interval 2 --train-iters 14 "
    "--lr 1e-3"
)


def fed(watch: SpikeWatch, losses: list[float]) -> list[str]:
    return [watch.see(loss, 1.0) for loss in losses]


@given(st.lists(st.floats(0.97, 1.03), min_size=30, max_size=60), st.floats(0.1, 10))
def test_noise_and_descent_are_not_spikes(noise: list[float], scale: float) -> None:
    assert not any(
        fed(SpikeWatch(STEADY), [scale * value * math.exp(-0.01 * step) for step, value in enumerate(noise)])
    )


@given(st.lists(st.floats(0.99, 1.01), min_size=20, max_size=20), st.floats(1.5, 100))
def test_steps_in_a_row_far_above_the_median_are_a_spike(noise: list[float], height: float) -> None:
    watch = SpikeWatch(STEADY)
    assert fed(watch, [*noise, height, 1.0, height]) == [""] * 23, "one step is not yet a spike"
    assert "deviations above the median" in watch.see(height, 1.0) and watch.num_spiking == 2
    again = SpikeWatch(STEADY)
    again.load_state(json.loads(json.dumps(watch.state())))
    assert again.see(height, 1.0) == watch.see(height, 1.0) != ""


def test_nothing_is_judged_before_half_the_window_and_gradients_count_too() -> None:
    watch = SpikeWatch(STEADY)
    assert not any(watch.see(loss, 1.0) for loss in (1.0, 50.0, 60.0, 70.0))
    watch = SpikeWatch(STEADY)
    assert not any(watch.see(1.0, 0.5 + 0.01 * (step % 3)) for step in range(15))
    assert [bool(watch.see(1.0, 30.0)) for _ in range(3)] == [False, True, True]


def louder(rank: int, *windows: tuple[int, int]) -> None:
    """Multiply the loss of a global batch of 8 by five if it holds samples from these positions of the data."""
    from megapipe.train.step import TrainStep

    run = TrainStep.run

    def recorded(self: TrainStep, microbatches: Any, *rest: Any) -> Any:
        result = run(self, microbatches, *rest)
        places = {place for ids in microbatches.sample_ids.values() for place in ids}
        hit = any(first <= place // 8 * 8 < past for first, past in windows for place in places)
        return result._replace(loss=result.loss * (5 if hit else 1))

    TrainStep.run = recorded  # type: ignore[method-assign]


def account(root: Path, step: int) -> dict[str, Any]:
    state = read_manifest(root / f"step_{step:08d}").state
    found: dict[str, Any] = state["account"]
    return found


GRIDS = [
    pytest.param(2, "--use-distributed-optimizer", id="dp2_zero"),
    pytest.param(4, "--pipeline-model-parallel-size 2", id="pp2_dp2", marks=pytest.mark.slow),
    pytest.param(
        4,
        "--tensor-model-parallel-size 2 --use-distributed-optimizer --async-save",
        id="tp2_dp2_zero",
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.parametrize(("world", "flags"), GRIDS)
def test_a_run_that_rolls_back_twice_equals_one_without_the_skipped_samples(
    tmp_path: Path, world: int, flags: str
) -> None:
    root = tmp_path / "run"
    with RankPool(world) as pool:
        results = pool.run(job_on_rank, f"{flags} {WATCH} --save {root}", louder, (56, 64), (88, 96))
        clean = pool.run(job_on_rank, f"{flags} {WATCH} --save {tmp_path}/clean", without_places, (48, 64), (80, 96))
    assert [result[1:] for result in results + clean] == [("", None)] * 2 * world, results
    # step 8 takes samples 56 to 63: back to step 6, and on with sample 64; then the second window comes up again in
    # step 10
    assert "deviations above the median" in results[0][0] and "Back to step 6; samples 48 to 63" in results[0][0]
    first, second = read_rollbacks(root)
    assert [(r.from_step, r.to_step, r.first_sample, r.past_sample) for r in (first, second)] == [
        (8, 6, 48, 64),
        (10, 8, 80, 96),
    ]
    assert account(root, 14) == {
        "skipped_samples": [[48, 64], [80, 96]],
        "rollbacks": 2,
        "discarded_samples": 32,
        "discarded_tokens": 32 * 8,
    }
    last = steps_of(root / "metrics.jsonl")[-1]
    assert (last["consumed_samples"], last["skipped_samples"], last["spike_rollbacks"]) == (14 * 8, 32, 2)
    assert [line["number"] for line in lines_of(root / "run.jsonl") if line["kind"] == "rollback"] == [1, 2]
    found, expected = contents(root, 14), contents(tmp_path / "clean", 14)
    assert len(found) > 20 and all(torch.equal(found[name], expected[name]) for name in expected)


def without_places(rank: int, *windows: tuple[int, int]) -> None:
    """Run on data that never contained these positions."""
    from megapipe.data.dataset import SkippedSamples

    skip = Loader.skip
    Loader.skip = lambda self, skipped, number: skip(  # type: ignore[method-assign]
        self, SkippedSamples.of(windows), number
    )


class Crash(BaseException):
    pass


def in_process(monkeypatch: pytest.MonkeyPatch, *windows: tuple[int, int]) -> None:
    from megapipe.train.step import TrainStep

    monkeypatch.setattr(TrainStep, "run", TrainStep.run)
    louder(0, *windows)


def test_abandoned_checkpoints_are_kept_apart_and_a_run_from_them_must_save_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = f"{WATCH} --spike-steps 2 --save {tmp_path}/c --keep-last 3"
    in_process(monkeypatch, (56, 72))
    code, said = job(flags)
    assert code == 0, said
    # steps 8 and 9 spike; step 8 is saved before the spike is known, and its checkpoint is dropped
    assert "Back to step 6; samples 48 to 71" in said
    assert (tmp_path / "c" / "abandoned-1" / "step_00000008" / "manifest.json").exists()
    assert sorted(path.name for path in (tmp_path / "c").glob("step_*")) == [
        f"step_{step:08d}" for step in (10, 12, 14)
    ]
    assert (tmp_path / "c" / "latest").read_text().strip() == "step_00000014"
    monkeypatch.undo()
    old = f"--load {tmp_path}/c/abandoned-1 --train-iters 14 --lr 1e-3"
    code, said = job(f"{old} --save {tmp_path}/c")
    assert code == 1 and "step 8 of an abandoned branch" in said
    code, said = job(f"{old} --save {tmp_path}/other")
    assert code == 0 and "continuing after step 8, 64 samples" in said


@pytest.mark.parametrize("event", ["written", "moved"])
def test_a_crash_in_a_rollback_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, event: str) -> None:
    flags = f"{WATCH} --spike-steps 2 --save {tmp_path}/c --load {tmp_path}/c"
    in_process(monkeypatch, (56, 72))
    assert job(flags.replace("/c", "/undisturbed"))[0] == 0
    move = loading.move_abandoned

    def crash(*where: Any) -> Any:
        if event == "moved":
            move(*where)
        raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(loading, "move_abandoned", crash)
        with pytest.raises(Crash):
            job(flags)
    code, said = job(flags)
    assert code == 0, said
    assert "continuing after step 6, 48 samples" in said and "Back to" not in said
    if event == "written":
        assert "was abandoned by a rollback" in said
    found, expected = contents(tmp_path / "c", 14), contents(tmp_path / "undisturbed", 14)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert account(tmp_path / "c", 14) == account(tmp_path / "undisturbed", 14)


def test_the_account_survives_a_resume_on_another_dp(tmp_path: Path, rank_pools: Callable[[int], RankPool]) -> None:
    common = f"{WATCH} --optimizer sgd --clip-grad 0 --dtype fp64"
    with RankPool(2) as pool:
        whole = pool.run(job_on_rank, f"{common} --save {tmp_path}/whole", louder, (56, 64), (96, 104))
        part = pool.run(job_on_rank, f"{common} --save {tmp_path}/c --exit-interval 10", louder, (56, 64), (96, 104))
    with RankPool(1) as pool:
        rest = pool.run(job_on_rank, f"{common} --save {tmp_path}/c --load {tmp_path}/c", louder, (56, 64), (96, 104))
    assert [result[1:] for result in whole + part + rest] == [("", None)] * 5
    assert account(tmp_path / "c", 14) == account(tmp_path / "whole", 14)
    assert account(tmp_path / "c", 14)["rollbacks"] == 2


def test_a_nan_loss_is_a_spike_and_the_limit_ends_the_run(tmp_path: Path) -> None:
    code, said = job(f"{WATCH} --save {tmp_path}/c --save-interval 1 --lr 1e30 --spike-limit 2")
    assert code == 1
    assert "Back to step 1; samples 8 to 15" in said
    assert "Back to step 1; samples 16 to 23" in said
    assert "(--spike-limit 2)" in said
    assert [rollback.number for rollback in read_rollbacks(tmp_path / "c")] == [1, 2]
