"""--optimizer-post-validation.

The weights equal those of a run with the barrier bit-identically, and no rank waits for a norm before its update.
"""

from __future__ import annotations

import re
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megapipe.assembly.runtime import TrainingRuntime
from megapipe.comm.trace import Event, Tracer
from megapipe.model.block import Block
from megapipe.optimizer import optimizer as optimizer_module
from megapipe.optimizer.gradients import ModelSum
from megapipe.optimizer.optimizer import EarlyUpdatePolicy, StepReport
from megapipe.optimizer.schedule import Rates
from megapipe.train import saving as saving_module
from megapipe.train.step import PostValidationStep, StepBatch, StepResult, train_step
from tests.harness import RankPool
from tests.train.grids import runtime_of, step_microbatches
from tests.train.jobs import job_on_rank, steps_of
from tests.train.runs import state_of, tiny
from tests.train.test_loop import plant, signal_in_step

PP2 = {"pipeline_model_parallel_size": 2}
ZERO1 = {
    "use_distributed_optimizer": True,
    "overlap_param_gather": True,
    "overlap_grad_reduce": True,
    "ddp_bucket_size": 400,
}
GRIDS: dict[str, dict[str, Any]] = {
    "pp4": {"pipeline_model_parallel_size": 4, "pipeline_schedule": "zb-h2"},
    "pp2_dp2": PP2,
    "pp2_dp2_zero1": PP2 | ZERO1,
    "pp2_dp2_zero3": PP2
    | {
        "data_parallel_sharding_strategy": "optim_grads_params",
        "data_parallel_sharding_units": 2,
        "overlap_param_gather": True,
        "overlap_grad_reduce": True,
    },
    "pp2_tp2_sequence": PP2 | {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp2_zb_v_tied_dp2_zero1_bf16": PP2
    | ZERO1
    | {"pipeline_schedule": "zb-v", "untie_embeddings_and_output_weights": False, "dtype": "bf16"},
}
FP16 = {"dtype": "fp16", "initial_loss_scale": 2.0**22, "hysteresis": 1, "loss_scale_window": 2}
STEPS = 6
CLIP = 0.45  # some of the norms of the six steps are above, some below


def setting(**changes: Any) -> dict[str, Any]:
    return {"untie_embeddings_and_output_weights": True, "hidden_dropout": 0.1, "global_batch_size": 16} | changes


def spoil(rank: int, where: int | None, call: int) -> Callable[[], None]:
    """Make a gradient of the call-th layer computed on rank `where` infinite; return a function that undoes it."""
    forward, calls = Block.forward, 0

    def broken(self: Block, *arguments: Any) -> Tensor:
        nonlocal calls
        output = forward(self, *arguments)
        calls += 1
        if calls == call:
            output.register_hook(lambda gradient: gradient.index_fill(0, torch.tensor([0]), torch.inf))
        return output

    if rank == where:
        Block.forward = broken  # type: ignore[method-assign]
    return lambda: setattr(Block, "forward", forward)


def batch_of(
    runtime: TrainingRuntime, rows: np.ndarray, index: int, rates: Rates, needs_result: bool = False
) -> StepBatch:
    return StepBatch(index + 1, 0, len(rows), step_microbatches(runtime, rows, index), rates, needs_result)


def train(
    rank: int, world_size: int, changes: dict[str, Any], is_ahead: bool, steps: int = STEPS, spoiled: int | None = None
) -> tuple[dict[str, Tensor], dict[str, Any], list[StepResult]]:
    """Train some steps and return state, scaler state and results.

    spoiled: the rank whose fourth step gets an infinite gradient.
    """
    runtime = runtime_of(tiny(**changes, optimizer_post_validation=is_ahead), rank, world_size)
    step, results = train_step(runtime), []
    rows = np.random.RandomState(0).randint(0, 29, (STEPS, 16, 9))

    def settle(batch: StepBatch, result: StepResult) -> bool:
        results.append(result)
        return True

    for index in range(steps):
        restore = spoil(rank, spoiled if index == 3 else None, 1)
        batch = batch_of(runtime, rows[index], index, Rates(3e-2, 0.1), needs_result=index == steps - 1)
        try:
            result = step.take(batch, settle)
        finally:
            restore()
        if result is not None:
            settle(batch, result)
    return state_of(runtime), runtime.optimizer.plain_state(), results


def without_rollbacks(results: list[StepResult]) -> list[tuple[float, float, float, bool, float]]:
    return [
        (r.loss, r.update.grad_norm, r.update.clip_coefficient, r.update.skipped, r.update.loss_scale) for r in results
    ]


def assert_equal_to_the_barrier(
    pool: RankPool, changes: dict[str, Any], spoiled: int | None = None
) -> list[StepReport]:
    """Assert that every rank matches the run with the barrier, in state and in reported numbers.

    Return the results of the run without the barrier.
    """
    barrier = pool.run(train, changes, False, STEPS, spoiled)
    ahead = pool.run(train, changes, True, STEPS, spoiled)
    for (state, plain, results), (found_state, found_plain, found) in zip(barrier, ahead, strict=True):
        assert found_plain == plain
        np.testing.assert_equal(without_rollbacks(found), without_rollbacks(results))
        assert found_state.keys() == state.keys()
        for name, values in state.items():
            assert torch.equal(found_state[name], values), name
        assert not any(result.update.rolled_back for result in results)
        assert [r.update.rolled_back for r in found] == [r.update.rolled_back for r in ahead[0][2]]
    return [result.update for result in ahead[0][2]]


def amended(reports: list[StepReport]) -> list[bool]:
    return [report.skipped or report.clip_coefficient != 1.0 for report in reports]


@pytest.mark.parametrize("grid", GRIDS)
def test_clipped_and_unclipped_steps_leave_the_bits_of_the_barrier(
    rank_pools: Callable[[int], RankPool], grid: str
) -> None:
    reports = assert_equal_to_the_barrier(rank_pools(4), setting(**GRIDS[grid], clip_grad=CLIP))
    assert 0 < sum(report.rolled_back for report in reports) < STEPS
    assert not all(amended(reports))


@pytest.mark.parametrize("grid", ["pp4", "pp2_dp2_zero1"])
def test_overflows_of_fp16_leave_the_bits_of_the_barrier(rank_pools: Callable[[int], RankPool], grid: str) -> None:
    reports = assert_equal_to_the_barrier(rank_pools(4), setting(**GRIDS[grid], **FP16, clip_grad=0.0))
    assert any(report.rolled_back and report.skipped for report in reports)
    assert not all(report.skipped for report in reports)


@pytest.mark.parametrize(
    "changes", [{"optimizer": "sgd"}, {"dtype": "bf16"}, {"dtype": "fp64"}], ids=["sgd", "bf16", "fp64"]
)
def test_an_infinite_gradient_on_one_rank_is_taken_back_on_all(
    rank_pools: Callable[[int], RankPool], changes: dict[str, Any]
) -> None:
    reports = assert_equal_to_the_barrier(
        rank_pools(4), setting(**GRIDS["pp2_dp2_zero1"], **changes, clip_grad=0.0), spoiled=3
    )
    assert [report.rolled_back for report in reports] == [index == 3 for index in range(STEPS)]


def test_if_every_step_is_clipped_the_run_returns_to_the_barrier(rank_pools: Callable[[int], RankPool]) -> None:
    reports = assert_equal_to_the_barrier(rank_pools(4), setting(**GRIDS["pp2_dp2"], clip_grad=1e-3))
    assert [report.rolled_back for report in reports] == [True] * 4 + [False] * 2
    assert all(amended(reports))
    assert [index for index, report in enumerate(reports) if report.remark] == [3]
    assert reports[3].remark.startswith(
        "4 of the last 4 steps had their gradients clipped or skipped: waiting for the norm before each"
    )


def test_early_updates_resume_when_clips_become_rare() -> None:
    policy = EarlyUpdatePolicy()
    clipped = [True, False, True, True, False, True, *[False] * 6, True, *[False] * 3]
    allowed, remarks = [], []
    for index, is_clipped in enumerate(clipped):
        allowed.append(policy.allows)
        if remark := policy.add(not is_clipped):
            remarks.append((index, remark))
    assert allowed == [True] * 6 + [False] * 6 + [True] * 4
    assert [index for index, _ in remarks] == [5, 11]
    assert (
        remarks[1][1]
        == "1 of the last 8 steps had their gradients clipped or skipped: updating before the norm is known again"
    )


def late_norm(rank: int, world_size: int, changes: dict[str, Any], flag: str) -> list[Event]:
    """Delay the last rank's part of the norm of step 0 and return the events of rank 0.

    The part is sent only after rank 0 has updated its weights and run the head start of step 1.
    """
    tracer = Tracer()
    runtime = runtime_of(tiny(**changes, optimizer_post_validation=True), rank, world_size, tracer=tracer)
    step = train_step(runtime)
    rows = np.random.RandomState(0).randint(0, 29, (16, 9))

    class Late(ModelSum):
        def __init__(self, *arguments: Any) -> None:
            while rank == world_size - 1 and not Path(flag).exists():
                time.sleep(0.001)  # forever, if any rank waits for this norm
            super().__init__(*arguments)

    optimizer_module.ModelSum = Late  # type: ignore[misc]
    try:
        step.take(batch_of(runtime, rows, 0, Rates(1e-2, 0.0)), lambda batch, result: True)
        tracer.events.clear()
        if rank == 0:
            finish = step.finish
            step.finish = lambda loss: (Path(flag).touch(), finish(loss))[1]  # type: ignore[method-assign]
        step.take(batch_of(runtime, rows, 1, Rates(1e-2, 0.0), needs_result=True), lambda batch, result: True)
    finally:
        optimizer_module.ModelSum = ModelSum  # type: ignore[misc]
    return tracer.events


def test_a_late_norm_delays_neither_updates_nor_the_head_start_of_others(
    rank_pools: Callable[[int], RankPool], tmp_path: Path
) -> None:
    changes = setting(**GRIDS["pp4"], clip_grad=0.0)
    events = rank_pools(4).run(late_norm, changes, str(tmp_path / "flag"))[0]
    verdict = next(event for event in events if event.name == "world all_reduce")
    forwards = [event for event in events if event.kind == "action" and re.fullmatch(r"0F\d", event.name)]
    early = [event.name for event in forwards if event.end_ns < verdict.end_ns]
    assert early == ["0F0", "0F1", "0F2"]


def premature(rank: int, world_size: int, changes: dict[str, Any]) -> list[str]:
    runtime = runtime_of(tiny(**changes, optimizer_post_validation=True), rank, world_size)
    step, rows = train_step(runtime), np.random.RandomState(0).randint(0, 29, (16, 9))
    batch = batch_of(runtime, rows, 0, Rates(1e-2, 0.0))
    assert step.take(batch, lambda batch, result: True) is None
    optimizer = runtime.optimizer
    said = []
    for use in (
        lambda: list(optimizer.state()),
        optimizer.plain_state,
        optimizer.parameters_norm,
        lambda: step.evaluate(batch.microbatches),
    ):
        with pytest.raises(RuntimeError) as error:
            use()
        said.append(str(error.value))
    optimizer.settle()
    assert list(optimizer.state())
    return said


def test_nothing_is_saved_measured_or_evaluated_before_the_verdict(rank_pools: Callable[[int], RankPool]) -> None:
    said = rank_pools(4).run(premature, setting(**GRIDS["pp4"]))[0]
    assert all(text.startswith("a step was started and its global norm is not known yet") for text in said)


FLAGS = "--pipeline-model-parallel-size 2 --untie-embeddings-and-output-weights --seed 3"
AHEAD = f"{FLAGS} --optimizer-post-validation"


def shards(folder: Path, step: int) -> dict[str, bytes]:
    (found,) = folder.glob(f"*{step}")
    return {path.name: path.read_bytes() for path in found.iterdir() if path.suffix == ".safetensors"}


def test_a_job_logs_evaluates_and_saves_what_the_barrier_does(
    rank_pools: Callable[[int], RankPool], tmp_path: Path
) -> None:
    flags = "--train-iters 7 --clip-grad 0.35 --eval-iters 1 --eval-interval 3 --save-interval 4 --log-interval 2"
    said = {}
    for name, base in (("barrier", FLAGS), ("ahead", AHEAD)):
        files = f"--save {tmp_path}/{name} --metrics-file {tmp_path}/{name}.jsonl"
        results = rank_pools(2).run(job_on_rank, f"{base} {flags} {files}")
        assert [result[1:] for result in results] == [("", None)] * 2
        said[name] = results[0][0]
    barrier, ahead = (steps_of(tmp_path / f"{name}.jsonl") for name in ("barrier", "ahead"))
    assert ahead[-1]["rolled_back_steps"] > 0
    same = ("step", "loss", "grad_norm", "lr", "skipped_steps", "consumed_samples", "loss_scale", "global_batch_size")
    assert [[line[key] for key in same] for line in ahead] == [[line[key] for key in same] for line in barrier]
    losses = re.compile(r"validation.*?: [\d.]+")
    assert losses.findall(said["ahead"]) == losses.findall(said["barrier"]) != []
    for step in (4, 7):
        assert shards(tmp_path / "ahead", step) == shards(tmp_path / "barrier", step) != {}


def test_a_signal_gives_up_the_step_begun_and_saves_the_last_whole_one(tmp_path: Path) -> None:
    with RankPool(2) as pool:
        (said, *_), _ = pool.run(job_on_rank, f"{AHEAD} --train-iters 6 --save {tmp_path}/ahead", signal_in_step, 3)
    assert (
        "ended after step 2: SIGUSR1 received" in said
    )  # it arrived while step 3 began, before the validation of step 2
    with RankPool(2) as pool:
        pool.run(job_on_rank, f"{FLAGS} --train-iters 6 --exit-interval 2 --save {tmp_path}/barrier")
    assert shards(tmp_path / "ahead", 2) == shards(tmp_path / "barrier", 2) != {}


def minutes_pass(rank: int) -> None:
    """Make every step take one minute of the loop's clock."""
    take, now = PostValidationStep.take, 0.0

    def one_minute(self: PostValidationStep, *arguments: Any) -> Any:
        nonlocal now
        now += 60.0
        return take(self, *arguments)

    PostValidationStep.take = one_minute  # type: ignore[method-assign]
    saving_module.time = types.SimpleNamespace(  # type: ignore[assignment]
        monotonic=lambda: now, perf_counter=time.perf_counter
    )


def test_a_timed_save_gives_up_the_step_begun_and_repeats_it(tmp_path: Path) -> None:
    with RankPool(2) as pool:
        (said, *raised), _ = pool.run(
            job_on_rank, f"{AHEAD} --train-iters 6 --save-interval-minutes 3 --save {tmp_path}/ahead", minutes_pass
        )
    assert raised == ["", None], said
    with RankPool(2) as pool:
        pool.run(job_on_rank, f"{FLAGS} --train-iters 6 --save-interval 2 --save {tmp_path}/barrier")
    for step in (2, 4, 6):  # each save makes the next step start again
        assert shards(tmp_path / "ahead", step) == shards(tmp_path / "barrier", step) != {}


def test_a_nan_is_named_where_it_arose_not_where_it_spread(tmp_path: Path) -> None:
    with RankPool(4) as pool:  # pp 4: rank 2 holds layer 2; the third microbatch of its second step
        flags = AHEAD.replace("size 2", "size 4")
        results = pool.run(
            job_on_rank, f"{flags} --train-iters 4 --save-interval 1 --save {tmp_path}", plant, 2, 2, 4 + 3, False
        )
    for _, kind, text in results:
        assert kind == "TrainingError"
        assert text is not None
        assert text.startswith(
            "step 2: loss nan, gradient norm nan; first seen in the forward of stage 2 (layers 2 to 2) on rank 2, "
        )
        assert "microbatch 2, samples 12, 13 of the training data" in text
    assert [path.name[-1] for path in tmp_path.iterdir() if "step" in path.name or path.name[-1].isdigit()] == ["1"]
