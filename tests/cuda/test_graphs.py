"""CUDA graphs: losses equal those without graphs, in one process, over pipeline stages and with evaluation and
checkpoints.

A capture that fails leaves the allocator and the generators of its process in that state, so each job runs in a process
of its own.
"""

from __future__ import annotations

import functools
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

from megapipe.tensor_parallel.linear import RowParallelLinear
from megapipe.train.step import TrainStep
from tests.cuda.test_implementations import needs_fp8
from tests.cuda.test_training import CARD, EXACT, SHARED, STEPS, WORDS, assert_close, losses, on_one
from tests.harness import run_ranks
from tests.launch.scripts import launch
from tests.train.jobs import job

pytestmark = pytest.mark.timeout(300)
on_gpu = pytest.mark.gpu

GRAPHS = "--cuda-graph-impl local --cuda-graph-warmup-steps 2"
LLAMA = "--position-embedding-type rope --normalization RMSNorm --swiglu --group-query-attention --num-query-groups 2"


def alone(rank: int, world_size: int, folder: Path, flags: str, device: str) -> list[float]:
    """Return the losses of a job, in a process of its own."""
    folder.mkdir()
    return on_one(folder, flags, device)


def test_a_job_in_a_process_of_its_own_has_the_losses_of_one_in_this(tmp_path: Path) -> None:
    (found,) = run_ranks(alone, 1, tmp_path / "alone", "", "cpu")
    assert found == on_one(tmp_path, "", "cpu")


@on_gpu
@pytest.mark.parametrize(
    "flags",
    [
        pytest.param("", id="plain"),
        pytest.param(f"{LLAMA} --bf16", id="llama, bf16"),
        pytest.param("--bf16 --fp8 hybrid --hidden-size 32 --ffn-hidden-size 32", id="fp8"),
        pytest.param("--bf16 --cross-entropy-chunk-size 5 --window-size 5", id="loss in chunks, a mask"),
        pytest.param(
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", id="full recompute"
        ),
        pytest.param("--pipeline-model-parallel-layout Et|tt|tL", id="three stages on a rank"),
        pytest.param(
            "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather", id="distributed optimizer"
        ),
    ],
)
def test_replayed_steps_give_the_losses_of_launched_ones(flags: str, tmp_path: Path) -> None:
    if "--fp8" in flags:
        needs_fp8()
    plain = on_one(tmp_path / "plain", flags, CARD)
    assert len(set(plain)) == STEPS
    (replayed,) = run_ranks(alone, 1, tmp_path / "graphs", f"{flags} {GRAPHS}", CARD)
    assert_close(replayed, plain)


@on_gpu
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_pipeline_ranks_that_share_a_gpu_replay_their_stages(schedule: str, tmp_path: Path) -> None:
    expected = on_one(tmp_path / "one", "", CARD)
    flags = f"--pipeline-model-parallel-size 2 --pipeline-schedule {schedule} {GRAPHS}"
    words = [*WORDS, *EXACT.split(), *SHARED.split(), *flags.split(), "--train-iters", str(STEPS)]
    with launch(tmp_path, 2, *words, "--metrics-file", str(tmp_path / "metrics.jsonl")) as command:
        ended = command.ended()
    assert ended.code == 0, ended.error
    assert_close(losses(tmp_path), expected)


def strict_job(rank: int, world_size: int, flags: str, strict_from: int) -> tuple[int, str, list[int], int]:
    """Run a job in which the gradients of a step may not wait for the device, from a step on. Returns its exit code and
    output, the calls of modules before each step, and all of them.
    """
    start, forward = TrainStep.gradients, torch.nn.Module.__call__
    steps: list[int] = []
    calls: list[int] = []

    def strict(self: TrainStep, *arguments: object) -> object:
        steps.append(len(calls))
        if len(steps) > strict_from:
            torch.cuda.set_sync_debug_mode("error")
        try:
            return start(self, *arguments)  # type: ignore[arg-type]
        finally:
            if len(steps) > strict_from:
                torch.cuda.set_sync_debug_mode("default")

    def counted(self: torch.nn.Module, *arguments: object, **named: object) -> object:
        calls.append(1)
        return forward(self, *arguments, **named)

    TrainStep.gradients = strict  # type: ignore[assignment, method-assign]
    torch.nn.Module.__call__ = counted  # type: ignore[assignment, method-assign]
    return *job(flags), steps, len(calls)


JOB = f"--bf16 --train-iters {STEPS} {EXACT}"


def test_a_job_is_followed_in_a_process_of_its_own() -> None:
    ((code, said, steps, calls),) = run_ranks(strict_job, 1, JOB, STEPS)
    assert code == 0, said
    assert len(steps) == STEPS and sorted(set(steps)) == steps and steps[3] < calls


@on_gpu
def test_a_step_of_replays_waits_for_nothing_and_calls_no_module() -> None:
    # strict after two warm-up steps, and one that records
    ((code, said, steps, calls),) = run_ranks(strict_job, 1, f"--device {CARD} {JOB} {GRAPHS}", 3)
    assert code == 0, said
    assert "recorded after 2 steps" in said
    assert len(steps) == STEPS and steps[3] == calls > 0


def live_job(rank: int, world_size: int, flags: str) -> tuple[int, str]:
    """Run a job in which torch checks that no replay reads freed memory."""
    torch.cuda.graph = functools.partial(torch.cuda.graph, check_input_liveness=True)  # type: ignore[misc, assignment]
    return job(flags)


@on_gpu
@pytest.mark.skipif(
    "check_input_liveness" not in inspect.signature(torch.cuda.graph).parameters,
    reason="torch.cuda.graph has no check_input_liveness, as it has in torch 2.13",
)
def test_no_replay_reads_freed_memory() -> None:
    flags = f"--device {CARD} {JOB} {GRAPHS} {LLAMA} --window-size 5 --eval-iters 1 --eval-interval 3"
    ((code, said),) = run_ranks(live_job, 1, flags)
    assert code == 0, said


def waiting_job(rank: int, world_size: int, flags: str) -> tuple[int, str, bool]:
    """Run a job whose linears read a value. Returns its exit code, its output, and whether the stream is as before."""
    forward = RowParallelLinear.forward

    def waits(self: RowParallelLinear, *arguments: Any) -> torch.Tensor:
        output = forward(self, *arguments)
        return output * float(output.detach().isfinite().all())

    RowParallelLinear.forward = waits  # type: ignore[assignment, method-assign]
    before = torch.cuda.current_stream()
    return *job(flags), torch.cuda.current_stream() == before


@on_gpu
def test_a_synchronization_inside_a_stage_ends_the_run_with_a_message() -> None:
    ((code, said, is_restored),) = run_ranks(waiting_job, 1, f"--device {CARD} --train-iters {STEPS} {EXACT} {GRAPHS}")
    assert code == 1
    assert "forward of stage 0 cannot be captured" in said
    assert is_restored
