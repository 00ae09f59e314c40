"""The engine runs slices of unequal cost and unequal messages: on emulated devices, whose stages sleep."""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import fmean
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function

from megapipe.comm.channels import Channels, MessageSpec
from megapipe.comm.collectives import barrier
from megapipe.pipeline.engine import Engine, Step
from megapipe.pipeline.stage import StageRunner
from megapipe.schedule.action import Op
from megapipe.schedule.costs import Costs
from megapipe.schedule.families import build_lowered
from megapipe.schedule.lifetimes import peak_live_chunks
from megapipe.schedule.schedule import Schedule
from megapipe.schedule.simulate import simulate
from tests.harness import RankPool
from tests.pipeline.stages import pp_group

SECONDS = {Op.F: 0.12, Op.B: 0.24}  # of a stage for a whole microbatch
RANKS, MICROBATCHES = 4, 2
SHARES = {1: (1.0,), 2: (0.5, 0.5), 3: (0.5, 0.3, 0.2), 4: (0.25, 0.25, 0.25, 0.25)}
LENGTHS = {1: (60,), 2: (36, 24), 3: (30, 20, 10), 4: (21, 16, 13, 10)}
Payload = tuple[int, float]  # the length of a slice, and its share of the costs


class Slept(NamedTuple):
    """The measured seconds of a sleep: machines do not keep time exactly."""

    op: Op
    share: float
    seconds: float


class Sleep(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, share: float, slept: list[Slept]) -> Tensor:
        ctx.share, ctx.slept = share, slept
        sleep(Op.F, share, slept)
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        sleep(Op.B, ctx.share, ctx.slept)
        return grad * 1.0, None, None


def sleep(op: Op, share: float, slept: list[Slept]) -> None:
    start = time.monotonic()
    time.sleep(SECONDS[op] * share)
    slept.append(Slept(op, share, time.monotonic() - start))


class EmulatedStage(nn.Module):
    """[length, 4] -> the same, times a trained factor; sleeps for its share of the costs."""

    def __init__(self) -> None:
        super().__init__()
        self.slept: list[Slept] = []
        self.factor = nn.Parameter(torch.full((), 2.0, dtype=torch.float64))

    def forward(self, *inputs: Any) -> Tensor:
        length, share = inputs[-1]
        # what the first stage reads needs a gradient too, so that its backward sleeps
        x = inputs[0] if len(inputs) == 2 else torch.ones(length, 4, dtype=torch.float64, requires_grad=True)
        assert x.shape[0] == length  # every message has the length of its slice
        return Sleep.apply(x, share, self.slept) * self.factor


def schedule_of(slices: int) -> Schedule:
    return build_lowered("1f1b", RANKS, 1, MICROBATCHES, num_slices=slices)


class Found(NamedTuple):
    """Start and end of a rank's steps, its sleeps, the most slices alive, and the gradient of its factor."""

    starts: list[float]
    ends: list[float]
    slept: list[Slept]
    alive: int
    gradient: float


def run(rank: int, world_size: int, slices: int, steps: int) -> Found:
    group, schedule = pp_group(rank, world_size), schedule_of(slices)
    stage = EmulatedStage()
    runner, alive = StageRunner(stage), 0

    def observe(microbatch: int, output: Any) -> None:
        nonlocal alive
        alive = max(alive, runner.num_live + 1)

    runner.observe = observe
    channels = Channels.build(schedule.placement, group, torch.device("cpu"), max_in_flight=8)
    engine = Engine(schedule, rank, {rank: runner}, channels)

    def message(boundary: int, number: int = 0) -> tuple[MessageSpec, ...]:
        return (MessageSpec((LENGTHS[slices][number], 4), torch.float64),)

    payloads = list(zip(LENGTHS[slices], SHARES[slices], strict=True)) * MICROBATCHES
    loss = lambda output, payload: (output.sum(), output.detach().sum())  # noqa: E731
    starts, ends = [], []
    for _ in range(steps):
        stage.zero_grad()
        barrier(group)
        starts.append(time.monotonic())
        engine.run(Step(payloads, message, loss))
        ends.append(time.monotonic())
    assert stage.factor.grad is not None
    return Found(starts, ends, stage.slept, alive, float(stage.factor.grad))


def shares_of(seconds: dict[tuple[int, Op], tuple[float, ...]]) -> dict[tuple[int, Op], tuple[float, ...]]:
    """Return the shares of slices in the seconds of whole microbatches."""
    return {key: tuple(one / sum(each) for one in each) for key, each in seconds.items()}


CASES = [
    pytest.param(2, 3, 1.5, id="2 slices"),
    *(pytest.param(k, 12, 1.05, id=f"{k} slices, closely", marks=pytest.mark.slow) for k in (1, 2, 3, 4)),
]


@pytest.mark.parametrize(("slices", "steps", "most"), CASES)
def test_an_emulated_step_with_slices_takes_the_simulated_time(
    slices: int, steps: int, most: float, rank_pools: Callable[[int], RankPool]
) -> None:
    """The fastest of some steps; the long variant holds on a machine that has nothing else to do."""
    schedule = schedule_of(slices)
    found = rank_pools(RANKS).run(run, slices, steps)
    took = [max(rank.ends[step] for rank in found) - min(rank.starts[step] for rank in found) for step in range(steps)]
    means = {
        (op, share): fmean(each.seconds for rank in found for each in rank.slept if each[:2] == (op, share))
        for op in SECONDS
        for share in SHARES[slices]
    }
    keys = [(stage, op) for stage in range(RANKS) for op in SECONDS]
    asked = {(op, share): SECONDS[op] * share for op, share in means}
    simulated, least = (
        simulate(schedule, Costs({key: sum(each[key]) for key in keys}, slice_shares=shares_of(each))).makespan_seconds
        for each in (
            {(stage, op): tuple(seconds[op, share] for share in SHARES[slices]) for stage, op in keys}
            for seconds in (means, asked)
        )
    )
    assert least <= min(took) < most * simulated, (took, simulated, least)
    assert [rank.alive for rank in found] == list(peak_live_chunks(schedule))
    elements = 60 * 4 * MICROBATCHES
    assert [rank.gradient for rank in found] == [elements * 2.0 ** (RANKS - 1)] * RANKS
