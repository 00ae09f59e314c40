"""Emulated devices: a stage that sleeps where a real one would compute, with real autograd and real tensors around it.

A rank that sleeps needs no core, so eight ranks keep their schedule on a machine of two, and everything that is not
computation is real: Python between actions, autograd, messages, waits.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import Function

from megapipe.tensor_parallel.gradients import WeightQueue

WIDTH = 256  # columns of a message


class Span(NamedTuple):
    """One part of one action of one rank; nanoseconds of the machine's monotonic clock. A full backward is a W and an
    I."""

    stage: int
    op: str  # 'F', 'I' or 'W'
    microbatch: int  # counted by this stage's forwards in this step
    start_ns: int
    end_ns: int


class Stopwatch:
    """A clock that sleeps on behalf of stages and records the durations of the sleeps alone."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.spans: list[Span] = []

    def pass_time(self, stage: int, op: str, microbatch: int) -> None:
        """Sleep for the device's time of one operation."""
        start = time.perf_counter_ns()
        if self.seconds:
            time.sleep(self.seconds)
        self.spans.append(Span(stage, op, microbatch, start, time.perf_counter_ns()))

    def take(self) -> list[Span]:
        """Return the spans since the last call."""
        spans, self.spans = self.spans, []
        return spans


class EmulatedStage(nn.Module):
    """A stage [rows, WIDTH] -> [rows, WIDTH] that multiplies by a trained factor for each column; F, I and W sleep.

    Its weight gradient goes through `queue` if that is deferring. The first stage also trains an offset, so that its I
    has something to pass through.
    """

    def __init__(self, stage: int, watch: Stopwatch, queue: WeightQueue) -> None:
        super().__init__()
        self.stage, self.watch, self.queue = stage, watch, queue
        self.factor = nn.Parameter(torch.ones(WIDTH))
        self.offset = nn.Parameter(torch.zeros(WIDTH)) if stage == 0 else None
        self.num_forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        number, self.num_forwards = self.num_forwards, self.num_forwards + 1
        self.watch.pass_time(self.stage, "F", number)
        if self.offset is not None:
            x = x + self.offset
        return _InputGradient.apply(x, self, number) * _WeightGradient.apply(self.factor, self, number)


class _InputGradient(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, stage: EmulatedStage, number: int) -> Tensor:
        ctx.stage, ctx.number = stage, number
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        ctx.stage.watch.pass_time(ctx.stage.stage, "I", ctx.number)
        return gradient, None, None


class _WeightGradient(Function):
    @staticmethod
    def forward(ctx: Any, factor: Tensor, stage: EmulatedStage, number: int) -> Tensor:
        ctx.stage, ctx.number = stage, number
        return factor.view_as(factor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None]:
        stage: EmulatedStage = ctx.stage
        if stage.queue.is_deferring:
            stage.queue.submit(_Waiting(stage, ctx.number, gradient))
            return None, None, None
        stage.watch.pass_time(stage.stage, "W", ctx.number)
        return gradient, None, None


class _Waiting:
    """A weight gradient between I and W."""

    def __init__(self, stage: EmulatedStage, number: int, gradient: Tensor) -> None:
        self._stage, self._number, self._gradient = stage, number, gradient

    def launch(self) -> None:
        """Do nothing: there is nothing to communicate."""

    def accumulate(self) -> None:
        self._stage.watch.pass_time(self._stage.stage, "W", self._number)
        factor = self._stage.factor
        factor.grad = self._gradient if factor.grad is None else factor.grad.add_(self._gradient)


class Stages(dict[int, nn.Module]):
    """The modules of one contender on one rank, by stage, each with the queue of its weight gradients."""

    def __init__(self, numbers: tuple[int, ...], make: Callable[[int, WeightQueue], nn.Module]) -> None:
        self.queues = {number: WeightQueue() for number in numbers}
        super().__init__({number: make(number, queue) for number, queue in self.queues.items()})

    def begin_step(self) -> None:
        """Forget the gradients of the step before, and count microbatches from 0."""
        for module in self.values():
            module.zero_grad()
            if isinstance(module, EmulatedStage):
                module.num_forwards = 0
