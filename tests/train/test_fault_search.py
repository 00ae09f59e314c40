"""The search for the origin of a NaN: it names module, stage, rank, microbatch and samples for every kind of origin."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megapipe.tensor_parallel.linear import RowParallelLinear
from megapipe.train.step import TrainStep
from tests.harness import RankPool
from tests.train.jobs import job_on_rank

FLAGS = "--train-iters 3 --pipeline-model-parallel-size 2"
LAST_LINEAR = r"decoder\.layers\.2\.mlp\.linear_fc2 \(RowParallelLinear\)"
HIT = 21  # a sample of microbatch 2 in step 3, which holds samples 20 and 21


def in_step_three(rank: int, plant: Callable[[Any], None]) -> None:
    """Run the third step and each repetition of it with the fault from `plant`; called on both ranks."""
    launch, count = TrainStep.run, 0

    def launched(self: TrainStep, microbatches: Any, *rest: Any) -> Any:
        nonlocal count
        count += 1
        if count == 3:
            plant(self.runtime)
        return launch(self, microbatches, *rest)

    TrainStep.run = launched  # type: ignore[method-assign]


class Break(torch.autograd.Function):
    """Multiply by NaN in the forward or in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, backwards: bool) -> torch.Tensor:
        ctx.backwards = backwards
        return x.clone() if backwards else x * torch.nan

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * torch.nan if ctx.backwards else gradient, None


def break_mlp(runtime: Any, backwards: bool, transient: bool = False) -> None:
    """Make the last linear of layer 2 return NaN in the third microbatch."""
    if 1 not in runtime.stages:
        return
    broken = runtime.stages[1].decoder.layers["2"].mlp.linear_fc2
    forward, calls = RowParallelLinear.forward, []

    def planted(self: RowParallelLinear, *arguments: Any) -> torch.Tensor:
        output = forward(self, *arguments)
        if self is broken:
            calls.append(1)
            if len(calls) % 4 == 3 and not (transient and len(calls) > 4):
                return Break.apply(output, backwards)
        return output

    RowParallelLinear.forward = planted  # type: ignore[method-assign]


def forward(runtime: Any) -> None:
    break_mlp(runtime, backwards=False)


def once(runtime: Any) -> None:
    break_mlp(runtime, backwards=False, transient=True)


def backward(runtime: Any) -> None:
    break_mlp(runtime, backwards=True)


def weight(runtime: Any) -> None:
    if 0 in runtime.stages:
        with torch.no_grad():
            runtime.buffers[0].parameter("decoder.layers.1.self_attention.linear_qkv.weight").view(-1)[3] = torch.inf


def weight_gradient(runtime: Any) -> None:
    if 0 not in runtime.stages:
        return
    runner, gradient = runtime.runners[0], runtime.buffers[0].main_grad("decoder.layers.0.mlp.linear_fc1.weight")
    original = type(runner).backward

    def broken(self: Any, microbatch: int, *rest: Any) -> Any:
        result = original(self, microbatch, *rest)
        if self is runner and microbatch == 1:
            gradient.view(-1)[0] = torch.nan
        return result

    type(runner).backward = broken


CASES = {
    forward: LAST_LINEAR + r" returns values that are not finite from finite inputs: "
    r"stage 1 on rank 1, microbatch 2, "
    r"samples 20, 21 \(1 of 4 microbatches are affected\)",
    backward: r"the backward of (what follows )?decoder\.layers\.2\.mlp\.?\S* \(\w+\) "
    r"gives a gradient that is not finite: "
    r"stage 1 on rank 1, microbatch 2, samples 20, 21",
    weight: r"weight decoder\.layers\.1\.self_attention\.linear_qkv\.weight of stage 0 on rank 0 "
    r"was not finite before the step",
    weight_gradient: r"the gradient of weight decoder\.layers\.0\.mlp\.linear_fc1\.weight is not finite .*"
    r": stage 0 on rank 0, microbatch 1, samples 18, 19",
    once: r"repeated, the step is finite everywhere: the fault does not repeat itself",
}


@pytest.mark.parametrize("plant", CASES, ids=lambda plant: plant.__name__)
def test_the_first_bad_number_is_named(plant: Callable[[Any], None]) -> None:
    with RankPool(2) as pool:
        results = pool.run(job_on_rank, FLAGS, in_step_three, plant)
    for _, kind, text in results:
        assert (kind, text) == ("TrainingError", results[0][2])
        assert text.startswith("step 3: loss ") and re.search(CASES[plant], text), text


def shard_of_weights(runtime: Any) -> None:
    if 0 in runtime.stages:
        bucket = runtime.buffers[0].buffers[0].layout.buckets[0]
        runtime.buffers[0].buffers[0].held_parameters(bucket)[1][3] = torch.inf


@pytest.mark.parametrize("plant", [forward, shard_of_weights], ids=lambda plant: plant.__name__)
def test_the_first_bad_number_is_found_in_sharded_weights(plant: Callable[[Any], None]) -> None:
    flags = f"{FLAGS} --global-batch-size 16 --data-parallel-sharding-strategy optim_grads_params"
    where = LAST_LINEAR + r" returns .* from finite inputs: stage 1 on rank 2, microbatch 2"
    if plant is shard_of_weights:
        where = r"weight decoder\.layers\.\S+ of stage 0 on rank 0 was not finite before the step"
    with RankPool(4) as pool:
        results = pool.run(job_on_rank, flags, in_step_three, plant)
    for _, kind, text in results:
        assert (kind, text) == ("TrainingError", results[0][2])
        assert re.search(where, text), text
