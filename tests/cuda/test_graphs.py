"""CUDA graphs: losses equal those without graphs, in one process, over pipeline stages and with evaluation and
checkpoints."""

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
from tests.launch.scripts import launch
from tests.train.jobs import job

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

GRAPHS = "--cuda-graph-impl local --cuda-graph-warmup-steps 2"
LLAMA = "--position-embedding-type rope --normalization RMSNorm --swiglu --group-query-attention --num-query-groups 2"


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
    assert_close(on_one(tmp_path / "graphs", f"{flags} {GRAPHS}", CARD), plain)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_pipeline_ranks_that_share_a_gpu_replay_their_stages(schedule: str, tmp_path: Path) -> None:
    expected = on_one(tmp_path / "one", "", CARD)
    flags = f"--pipeline-model-parallel-size 2 --pipeline-schedule {schedule} {GRAPHS}"
    words = [*WORDS, *EXACT.split(), *SHARED.split(), *flags.split(), "--train-iters", str(STEPS)]
    with launch(tmp_path, 2, *words, "--metrics-file", str(tmp_path / "metrics.jsonl")) as command:
        ended = command.ended()
    assert ended.code == 0, ended.error
    assert_close(losses(tmp_path), expected)


def test_a_step_of_replays_waits_for_nothing_and_calls_no_module(monkeypatch: pytest.MonkeyPatch) -> None:
    start, forward = TrainStep.start, torch.nn.Module.__call__
    steps: list[int] = []
    calls: list[int] = []

    def strict(self: TrainStep, *arguments: object) -> bool:
        steps.append(len(calls))
        if len(steps) > 3:  # two warm-up steps, and one that records
            torch.cuda.set_sync_debug_mode("error")
        try:
            return start(self, *arguments)  # type: ignore[arg-type]
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def counted(self: torch.nn.Module, *arguments: object, **named: object) -> object:
        calls.append(1)
        return forward(self, *arguments, **named)

    monkeypatch.setattr(TrainStep, "start", strict)
    monkeypatch.setattr(torch.nn.Module, "__call__", counted)
    code, said = job(f"--device {CARD} --bf16 --train-iters {STEPS} {EXACT} {GRAPHS}")
    assert code == 0, said
    assert "recorded after 2 steps" in said
    assert len(steps) == STEPS and steps[3] == len(calls) > 0


@pytest.mark.skipif(
    "check_input_liveness" not in inspect.signature(torch.cuda.graph).parameters, reason="fixed in torch 2.13"
)
def test_no_replay_reads_freed_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "graph", functools.partial(torch.cuda.graph, check_input_liveness=True))
    code, said = job(
        f"--device {CARD} --bf16 --train-iters {STEPS} {EXACT} {GRAPHS} {LLAMA} --window-size 5 --eval-iters 1 "
        "--eval-interval 3"
    )
    assert code == 0, said


def test_a_synchronization_inside_a_stage_ends_the_run_with_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = RowParallelLinear.forward

    def waits(self: RowParallelLinear, *arguments: Any) -> torch.Tensor:
        output = forward(self, *arguments)
        return output * float(output.detach().isfinite().all())

    monkeypatch.setattr(RowParallelLinear, "forward", waits)
    code, said = job(f"--device {CARD} --train-iters {STEPS} {EXACT} {GRAPHS}")
    assert code == 1
    assert "the forward of stage 0 cannot be captured as a CUDA graph" in said
