"""megapipe's engine on the stages of a case, and the same model in one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from megapipe.comm.channels import Channels
from megapipe.comm.groups import Group
from megapipe.comm.trace import Tracer
from megapipe.pipeline.engine import Engine, Step
from megapipe.pipeline.stage import StageRunner
from megapipe.schedule.lower import lower, without_pairs
from megapipe.schedule.simulate import unhindered_send_depth
from schedule_bench.devices import Stages
from schedule_bench.work import Work


class MegapipeSide:
    """megapipe as in a training run: the lowered schedule, channels as deep as its proof requires, queued weight
    gradients."""

    def __init__(self, work: Work, pp: Group, receive_depth: int, tracer: Tracer | None = None) -> None:
        schedule = work.schedule()
        # as the engine runs it on a CPU
        self.schedule = replace(schedule, rows=tuple(map(without_pairs, schedule.rows)))
        placement = schedule.placement
        lowered = lower(schedule, receive_depth)
        depth = 1 + unhindered_send_depth(lowered)
        self.stages: Stages = work.stages(placement.stages_of(pp.rank), placement.num_stages)
        runners = {
            stage: StageRunner(_Picked(module, stage == 0), self.stages.queues[stage])
            for stage, module in self.stages.items()
        }
        self._engine = Engine(
            lowered, pp.rank, runners, Channels.build(placement, pp, max_in_flight=depth), tracer=tracer
        )
        self._step = Step(work.microbatches(), lambda boundary: (work.message,), _loss_for_engine(work.loss))

    def begin_step(self) -> None:
        self.stages.begin_step()

    def step(self) -> None:
        self._engine.run(self._step)


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
