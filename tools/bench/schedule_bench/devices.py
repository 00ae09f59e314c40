"""Emulated devices: a stage that sleeps where a real one would compute, with real autograd and real tensors around it.

A rank that sleeps needs no core, so eight ranks keep their schedule on a machine of two, and everything that is not
computation is real: Python between actions, autograd, messages, waits.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from megapipe.model.recompute import RecomputedSegment
from megapipe.tensor_parallel.gradients import WeightQueue
from schedule_bench.figures import Durations

WIDTH = 256  # columns of a message
Replays = list[Callable[[], None]]


class Stopwatch:
    """A clock that sleeps on behalf of stages and records how long the sleeps alone took.

    durations: seconds by (stage, op value), where a full backward is a W and an I. end_ns: of the last sleep, on the
    machine's monotonic clock.
    """

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.reset()

    def reset(self) -> None:
        self.durations: Durations = defaultdict(list)
        self.end_ns = 0

    def pass_time(self, stage: int, op: str) -> None:
        """Sleep for the device's time of one operation."""
        start = time.perf_counter_ns()
        if self.seconds:
            time.sleep(self.seconds)
        self.end_ns = time.perf_counter_ns()
        self.durations[stage, op].append((self.end_ns - start) / 1e9)


class EmulatedStage(nn.Module):
    """A stage [rows, WIDTH] -> [rows, WIDTH] that multiplies by a trained factor for each column; F, I and W sleep.

    Its weight gradient goes through `queue` if that is deferring. With `replays` the forward keeps its input alone, and
    leaves there what runs it again. The first stage also trains an offset, so that its I
    has something to pass through.
    """

    def __init__(self, stage: int, watch: Stopwatch, queue: WeightQueue, replays: Replays | None = None) -> None:
        super().__init__()
        self.stage, self.watch, self.queue, self.replays = stage, watch, queue, replays
        self.factor = nn.Parameter(torch.ones(WIDTH))
        self.offset = nn.Parameter(torch.zeros(WIDTH)) if stage == 0 else None

    def forward(self, x: Tensor) -> Tensor:
        if self.replays is None:
            return self.compute(x)
        segment = RecomputedSegment(self.compute)
        output = segment(x)
        self.replays.append(segment.ahead(output))
        return output

    def compute(self, x: Tensor) -> Tensor:
        """Return the output, after the device's time of a forward."""
        self.watch.pass_time(self.stage, "F")
        if self.offset is not None:
            x = x + self.offset
        return _InputGradient.apply(x, self) * _WeightGradient.apply(self.factor, self)


class _InputGradient(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, stage: EmulatedStage) -> Tensor:
        ctx.stage = stage
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.stage.watch.pass_time(ctx.stage.stage, "I")
        return gradient, None


class _WeightGradient(Function):
    @staticmethod
    def forward(ctx: Any, factor: Tensor, stage: EmulatedStage) -> Tensor:
        ctx.stage = stage
        return factor.view_as(factor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None]:
        stage: EmulatedStage = ctx.stage
        if stage.queue.is_deferring:
            stage.queue.submit(_Waiting(stage, gradient))
            return None, None
        stage.watch.pass_time(stage.stage, "W")
        return gradient, None


class _Waiting:
    """A weight gradient between I and W."""

    def __init__(self, stage: EmulatedStage, gradient: Tensor) -> None:
        self._stage, self._gradient = stage, gradient

    def launch(self) -> None:
        """Do nothing: there is nothing to communicate."""

    def accumulate(self) -> None:
        self._stage.watch.pass_time(self._stage.stage, "W")
        factor = self._stage.factor
        factor.grad = self._gradient if factor.grad is None else factor.grad.add_(self._gradient)


class Stages(dict[int, nn.Module]):
    """The modules of one contender on one rank, by stage, with the queue of the weight gradients of each, and where its
    forwards leave their replays."""

    def __init__(self, numbers: tuple[int, ...], make: Callable[[int, WeightQueue, Replays], nn.Module]) -> None:
        self.queues = {number: WeightQueue() for number in numbers}
        self.replays: dict[int, Replays] = {number: [] for number in numbers}
        super().__init__({number: make(number, queue, self.replays[number]) for number, queue in self.queues.items()})

    def begin_step(self) -> None:
        """Forget the gradients of the step before."""
        for module in self.values():
            module.zero_grad()
