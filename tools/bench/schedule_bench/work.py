"""The inputs of the contenders of a case: stages, one step's batch, the loss, the shape of a message."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from megapipe.comm.channels import MessageSpec
from megapipe.schedule.action import Op
from megapipe.schedule.costs import Costs
from megapipe.schedule.families import build_schedule
from megapipe.schedule.recompute import replay_ahead
from megapipe.schedule.schedule import Schedule
from schedule_bench.cases import Case, RealCase
from schedule_bench.devices import WIDTH, EmulatedStage, Stages, Stopwatch
from schedule_bench.model import TransformerStage, draw_batch, loss_of


class Contender(Protocol):
    """A way to run a step.

    `schedule`: the actions that it really runs, without messages, for the replay.
    """

    schedule: Schedule

    def begin_step(self) -> None:
        """Prepare a step, before the clock starts."""

    def step(self) -> None:
        """Run the timed part."""


@dataclass(frozen=True)
class Work:
    """The work of a step.

    inputs, labels: of the whole step, split into microbatches along their first axis. output: of the last stage, for
    one microbatch. watch: of an emulated device, else idle.
    """

    case: Case | RealCase
    message: MessageSpec
    output: MessageSpec
    inputs: Tensor
    labels: Tensor
    loss: Callable[[Tensor, Tensor], Tensor]
    watch: Stopwatch

    def schedule(self) -> Schedule:
        """Return megapipe's schedule of the case. An update, which has no weights here, takes no time."""
        case, steps = self.case, self.num_steps
        schedule = build_schedule(case.schedule, case.ranks, case.chunks, case.microbatches, num_steps=steps)
        if isinstance(case, Case) and case.replays == "in bubbles":
            stages = range(schedule.num_stages)
            costs = Costs.equal(len(stages), 1.0, 2.0, 1.0)
            schedule = replay_ahead(
                schedule, replace(costs, seconds={**costs.seconds, **{(stage, Op.RECOMPUTE): 1.0 for stage in stages}})
            )
        rows = (tuple(action for action in row if action.op is not Op.UPDATE) for row in schedule.rows)
        return replace(schedule, rows=tuple(rows))

    @property
    def num_steps(self) -> int:
        """Training steps that are run in one go."""
        return self.case.steps if isinstance(self.case, Case) else 1

    def stages(self, numbers: tuple[int, ...], num_stages: int) -> Stages:
        """Return new modules for some stages."""
        case = self.case
        if isinstance(case, Case):
            is_replayed = bool(case.replays)
            return Stages(
                numbers,
                lambda stage, queue, replays: EmulatedStage(stage, self.watch, queue, replays if is_replayed else None),
            )
        return Stages(numbers, lambda stage, queue, _: TransformerStage(case, stage, num_stages, queue))

    def microbatches(self) -> list[tuple[Tensor, Tensor]]:
        """Return (input, label) of each microbatch."""
        count = self.case.microbatches * self.num_steps
        return list(zip(self.inputs.chunk(count), self.labels.chunk(count), strict=True))


def make_work(case: Case | RealCase) -> Work:
    """Return the inputs of one contender; every call makes new ones."""
    if isinstance(case, RealCase):
        message = MessageSpec((case.micro_batch, case.seq, case.hidden), torch.float32)
        output = MessageSpec((case.micro_batch, case.seq, case.vocab), torch.float32)
        return Work(case, message, output, *draw_batch(case), loss_of, Stopwatch(0.0))
    rows = case.message_bytes // 4 // WIDTH
    count = case.microbatches * case.steps
    inputs = torch.ones(count * rows, WIDTH)
    message = MessageSpec((rows, WIDTH), torch.float32)
    return Work(
        case,
        message,
        message,
        inputs,
        torch.zeros(count),
        lambda output, label: output.sum(),
        Stopwatch(case.seconds),
    )
