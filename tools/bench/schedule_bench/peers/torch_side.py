"""torch.distributed.pipelining on the stages of a case."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleDualPipeV,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)

from megapipe.extras.report.schedule_csv import from_csv
from megapipe.schedule.schedule import Schedule
from megapipe.tensor_parallel.gradients import WeightQueue
from schedule_bench.work import Work

CLASSES = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "breadth-first": ScheduleLoopedBFS,
    "zb-h1": ScheduleInterleavedZeroBubble,  # with one stage a rank
    "zb-v": ScheduleZBVZeroBubble,
    "dualpipe-v": ScheduleDualPipeV,
}
ONE_STAGE = (ScheduleGPipe, Schedule1F1B)
SPLITS = (ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble, ScheduleDualPipeV)


class TorchSide:
    """torch's schedule classes, static shapes, no gradient scaling, outputs not returned: the least work possible.

    Where the schedule splits the backward, weight gradients wait in megapipe's queue through `dw_builder`, torch's hook
    for that: cheaper than torch's splitting of the autograd graph, and without it the first stage would do all of its
    backward in W.
    """

    def __init__(self, work: Work, rank: int, group: Any) -> None:
        kind, ours = CLASSES[work.case.schedule], work.schedule()
        placement = ours.placement
        self.stages = work.stages(placement.stages_of(rank), placement.num_stages)
        incoming, outgoing, output = (
            torch.empty(spec.shape, dtype=spec.dtype, requires_grad=True)
            for spec in (work.message, work.message, work.output)
        )
        first, last = work.microbatches()[0][0], placement.num_stages - 1
        made = [
            PipelineStage(
                module,
                number,
                placement.num_stages,
                torch.device("cpu"),
                input_args=first if number == 0 else incoming,
                output_args=output if number == last else outgoing,
                group=group,
                dw_builder=DeferredWeights(self.stages.queues[number]) if kind in SPLITS else None,
            )
            for number, module in self.stages.items()
        ]
        self._run = kind(
            made[0] if kind in ONE_STAGE else made, work.case.microbatches, loss_fn=work.loss, scale_grads=False
        )
        self.schedule = ours if kind in ONE_STAGE else _as_schedule(self._run, ours)
        self._inputs = (work.inputs,) if 0 in self.stages else ()
        self._labels = work.labels if placement.num_stages - 1 in self.stages else None

    def begin_step(self) -> None:
        self.stages.begin_step()

    def step(self) -> None:
        self._run.step(*self._inputs, target=self._labels, return_outputs=False)


class DeferredWeights:
    """The function that torch calls after a backward; it returns the queued weight gradients as a function that
    computes them."""

    def __init__(self, queue: WeightQueue) -> None:
        self._queue, self._number = queue, 0
        queue.defer(0)

    def __call__(self) -> Callable[[], None]:
        mine = self._number
        self._number += 1
        self._queue.immediate()
        self._queue.defer(self._number)
        return lambda: self._queue.run(mine)


def _as_schedule(run: Any, ours: Schedule) -> Schedule:
    """Return the actions that torch's runtime executes."""
    text = "\n".join(
        ",".join("" if action is None else str(action) for action in run.pipeline_order[rank])
        for rank in range(ours.num_ranks)
    )
    return from_csv(text, f"torch {ours.name}", ours.placement).compute_only()
