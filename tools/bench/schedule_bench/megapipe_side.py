"""megapipe's engine on the stages of a case, and the same model in one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

from torch import Tensor

from megapipe.comm.channels import Channels
from megapipe.comm.groups import Group
from megapipe.comm.trace import Tracer
from megapipe.pipeline.engine import Engine, Step, StreamEngine
from megapipe.pipeline.stage import StageRunner
from megapipe.schedule.action import Op
from megapipe.schedule.families import build_stream
from megapipe.schedule.lower import default_receive_depth, lower, without_pairs
from megapipe.schedule.simulate import unhindered_send_depth
from schedule_bench.devices import Stages
from schedule_bench.work import Work

# of a stream whose stages have no weights to update
UPDATES = dict.fromkeys((Op.UPDATE, Op.REDUCE_GRAD, Op.NORM), lambda action: None)


class MegapipeSide:
    """megapipe as in training on CPUs: the lowered schedule, channels as deep as its proof requires, queued weight
    gradients."""

    def __init__(self, work: Work, pp: Group, tracer: Tracer | None = None) -> None:
        schedule, receive_depth = work.schedule(), default_receive_depth(may_use_gpu=False)
        # as the engine runs it on a CPU
        self.schedule = replace(schedule, rows=tuple(map(without_pairs, schedule.rows)))
        placement, count = schedule.placement, work.case.microbatches
        stream = None if work.num_steps == 1 else build_stream(schedule.name, placement.num_ranks, count, receive_depth)
        lowered = lower(schedule, receive_depth) if stream is None else stream.stretch
        depth = 1 + unhindered_send_depth(lowered)
        self.stages: Stages = work.stages(placement.stages_of(pp.rank), placement.num_stages)
        runners = {
            stage: StageRunner(
                _Picked(module, stage == 0), self.stages.queues[stage], replays=self.stages.replays[stage]
            )
            for stage, module in self.stages.items()
        }
        channels, loss = Channels.build(placement, pp, max_in_flight=depth), _loss_for_engine(work.loss)
        self._engine: Engine | StreamEngine
        if stream is None:
            handlers = {Op.RECOMPUTE: lambda action: runners[action.stage].recompute(action.microbatch)}
            self._engine = Engine(lowered, pp.rank, runners, channels, handlers, tracer=tracer)
        else:
            self._engine = StreamEngine(stream, pp.rank, runners, channels, UPDATES)
        payloads = work.microbatches()
        self._steps = [
            Step(payloads[first : first + count], lambda boundary: (work.message,), loss)
            for first in range(0, len(payloads), count)
        ]

    def begin_step(self) -> None:
        self.stages.begin_step()

    def step(self) -> None:
        if not isinstance(self._engine, StreamEngine):
            self._engine.run(self._steps[0])
            return
        for step, following in pairwise([*self._steps, None]):
            assert step is not None
            self._engine.advance(step, None if following is None else following.microbatches)


class Alone:
    """All stages of the case in one process, microbatch by microbatch, without a pipeline. Other ranks are idle."""

    def __init__(self, work: Work, rank: int) -> None:
        self.schedule = work.schedule()
        count = self.schedule.num_stages
        self._stages = work.stages(tuple(range(count)) if rank == 0 else (), count)
        self._microbatches, self._loss = work.microbatches() if rank == 0 else [], work.loss

    def begin_step(self) -> None:
        self._stages.begin_step()

    def step(self) -> None:
        for x, label in self._microbatches:
            for stage in self._stages.values():
                x = stage(x)
            self._loss(x, label).backward()


class _Picked:
    """A module that takes the tensor of the previous stage, or on the first stage the microbatch's input."""

    def __init__(self, module: Callable[[Tensor], Tensor], is_first: bool) -> None:
        self._module, self._is_first = module, is_first

    def __call__(self, *arguments: Any) -> Tensor:
        return self._module(arguments[-1][0] if self._is_first else arguments[0])


def _loss_for_engine(loss: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Any, Any], tuple[Tensor, Any]]:
    def of(output: Tensor, microbatch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        value = loss(output, microbatch[1])
        return value, value.detach()

    return of
