"""`StreamStep`: training with an asynchronous schedule, whose pipeline does not drain between steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megapipe.assembly.microbatches import Microbatches
from megapipe.assembly.runtime import TrainingRuntime, Updates
from megapipe.gpu.device_clock import Timers
from megapipe.model.microbatch import StageLoss
from megapipe.optimizer.optimizer import GradientSums, StepReport
from megapipe.optimizer.schedule import Rates
from megapipe.pipeline.engine import Before, Context, StreamEngine
from megapipe.schedule.action import COMPLETES_OPS, COMPUTE_OPS, Action, Op
from megapipe.schedule.families import SCHEDULES
from megapipe.schedule.stream import Place
from megapipe.train.step import PendingLoss, Routed, StepBatch, StepResult, TrainStep, sum_of_routed


@dataclass
class BegunStep:
    """A step of which some microbatch is in flight, or whose update is still to come."""

    batch: StepBatch
    loss_scale: float = 1.0
    reports: list[StageLoss] = field(default_factory=list)  # of its microbatches, on the last stage
    pending: PendingLoss | None = None
    sums: GradientSums | None = None
    norm_before: float | None = None  # of the gradient of the update before, by which that of this step is clipped
    routed: list[Routed] = field(default_factory=list)  # by the experts' routers in the forwards of its updates so far


class StreamStep(TrainStep):
    """Steps of a stream (`schedule.stream`). NOT synchronous training: weights change while microbatches are in flight.

    The loss of a step is that of its microbatches, each under the weights it met. Where updates are delayed (2BW), the
    gradients of a step are clipped by their norm over the model and checked for overflows, as in a synchronous step;
    the sums run while the next step computes. Otherwise each stage updates at its own time, clipped by its own norm, or
    with --clip-grad-delay by that of the model's gradients in the update before, except in the first one of a run. The
    reported norm is that of the last update of every stage in the step, and nothing is skipped. The biases of the
    experts' routers have versions as the weights do, and an update moves them by the loads of its microbatches.
    """

    def __init__(self, runtime: TrainingRuntime, timers: Timers | None = None) -> None:
        super().__init__(runtime, timers)
        versions = SCHEDULES[runtime.plan.schedule_name].versions
        assert versions is not None, f"{runtime.plan.schedule_name} is synchronous"
        self._versions, self._num_ranks = versions, runtime.plan.topology.pp
        ((stage, self._buffers),) = runtime.buffers.items()
        self._module = runtime.stages[stage]
        handlers = {
            Op.UPDATE: self._update_later if versions.is_delayed else self._update_at_once,
            Op.REDUCE_GRAD: lambda action: runtime.stores.close(action.stage),
            Op.NORM: self._sum,
        }
        self._hooks = Updates(self._around, handlers)
        self._side = torch.cuda.Stream(runtime.device) if runtime.device.type == "cuda" else None
        self._clips_late = bool(runtime.plan.config.optimizer.clip_grad_delay)
        self._objective = self._average.objective(lambda: runtime.optimizer.loss_scale)
        self._engines: dict[int, StreamEngine] = {}
        self._size = 0  # microbatches of a step in this stream; 0: nothing is in flight
        self._update_size = 0  # microbatches whose gradients an update takes
        self._begun: dict[int, BegunStep] = {}  # by number in this stream, until they are finished
        self._finished: list[tuple[StepBatch, StepResult]] = []  # during this call of `advance`
        self._num_run = self._num_forwards = self._num_updates = 0  # of this stream
        self._first = 0  # buffer of version 0
        self._installed = -1  # version
        # (step, version of the weights) by the number that the microbatch's actions carry
        self._in_flight: dict[int, tuple[int, int]] = {}
        self._loss_scale = 1.0  # of the microbatch whose backward runs
        for router in self.expert_loads.routers:
            router.loss_scale = lambda: self._loss_scale
        self._routed: dict[int, list[Routed]] = {}  # by the experts' routers, by number of the update to come
        self._biases: dict[int, list[Tensor]] = {}  # of the experts' routers, by version

    def run(self, microbatches: Microbatches, rates: Rates) -> StepResult:
        """Run one step in a pipeline that fills and drains. Raises nothing for a NaN: norm and loss show it."""
        ((_, result),) = self.advance(StepBatch(0, 0, 0, microbatches, rates), None)
        return result

    def advance(self, batch: StepBatch, following: StepBatch | None) -> list[tuple[StepBatch, StepResult]]:
        """Run one more step; return the steps whose results are known now: with `following` those before this one.

        batch: in a stream the `following` of the call before. following: the step after it, with as many microbatches,
        of which the first forwards are run; None drains the pipeline.
        """
        if not self._size:
            self._begin(batch)
        if following is not None:
            self._begun[self._num_run + 1] = BegunStep(following)
        step = self.runtime.step(batch.microbatches, self._loss, trains=True)
        self._finished = []
        with self._timers.phase("forward-backward"):
            self._engines[self._size].advance(step, None if following is None else following.microbatches)
        if not self._versions.is_delayed:  # the sums of this step are under way on other ranks
            self._finish_at_once(self._num_run + (following is None))
        self._num_run += 1
        if following is None:
            self._end()
        return self._finished

    def _begin(self, batch: StepBatch) -> None:
        runtime, self._size = self.runtime, len(batch.microbatches)
        if self._size not in self._engines:
            self._engines[self._size] = runtime.stream_engine(self._size, self._hooks)
        self._update_size = runtime.plan.stream(self._size).update_size
        self._begun, self._first = {0: BegunStep(batch)}, self._buffers.newest
        self._num_run = self._num_forwards = self._num_updates = 0
        self._biases, self._installed = {0: [bias.clone() for bias in self.expert_loads.biases]}, -1
        self._routed = {}
        self.expert_loads.clear()
        runtime.stores.begin_step(self._update_size)

    def _end(self) -> None:
        """Leave the newest version: evaluation, saving and the next stream start from it."""
        self._install(self._num_updates)
        self._size = 0

    # Versions

    def _place_of(self, version: int) -> int:
        return (self._first + version) % self._buffers.num_versions

    def _install(self, version: int) -> None:
        """Let the stage compute with this version."""
        if version == self._installed:
            return
        self._installed = version
        self._buffers.install(self._place_of(version))
        self._module.use_version(version)
        for bias, values in zip(self.expert_loads.biases, self._biases.get(version, ()), strict=False):
            bias.copy_(values)

    def _around(self, action: Action) -> Context | None:
        if action.op not in COMPUTE_OPS:
            return None
        return partial(Before, partial(self._before_forward if action.op is Op.F else self._before_backward, action))

    def _before_forward(self, action: Action) -> None:
        number, self._num_forwards = self._num_forwards, self._num_forwards + 1
        step, of_step = divmod(number, self._size)
        if of_step == 0:
            self._begun[step].loss_scale = self.runtime.optimizer.loss_scale
        update, of_update = divmod(number, self._update_size)
        if of_update == 0 and update > self._num_updates:  # the update before this one is still to come
            self._routed[update - 1] = self._take_routed(self._begun[(number - 1) // self._size])
        version = self._versions.of_forward(Place(number, self._num_updates, self._size, self._num_ranks))
        assert action.microbatch is not None
        self._in_flight[action.microbatch] = step, version
        self._install(version)

    def _before_backward(self, action: Action) -> None:
        assert action.microbatch is not None
        step, version = self._in_flight[action.microbatch]
        if action.op in COMPLETES_OPS:
            del self._in_flight[action.microbatch]
        self._loss_scale = self._begun[step].loss_scale
        self._install(version if self._versions.is_stashed else self._num_updates)

    def _loss(self, output: StageLoss, payload: Any) -> tuple[Tensor, StageLoss]:
        """Return the engine's loss of a microbatch, and keep its report for the step to which it belongs."""
        objective, report = self._objective(output, payload)
        self._begun[(self._num_forwards - 1) // self._size].reports.append(report)  # forwards are in order
        return objective, report

    def _take_routed(self, begun: BegunStep) -> list[Routed]:
        """Return what routers have recorded in the forwards of an update. begun: the step of the update."""
        return self.expert_loads.take()

    # Updates

    def _balance(self, begun: BegunStep, skipped: bool = False) -> None:
        """Add what the routers did in the forwards of the last update to its step, and move the biases of its version
        by it unless it was skipped. A collective of the ranks that hold the stage.
        """
        number = self._num_updates - 1
        # the forwards of the update after this one have not begun where the stream ends
        routed = self._routed.pop(number) if number in self._routed else self._take_routed(begun)
        begun.routed = list(map(sum_of_routed, begun.routed, routed)) if begun.routed else routed
        self._biases[number + 1] = [bias.clone() for bias in self._biases[number]]
        self._biases.pop(number + 1 - self._buffers.num_versions, None)
        if not skipped:
            self.expert_loads.balance(routed, self._biases[number + 1])

    def _start_sums(self, begun: BegunStep) -> None:
        """Start to sum the loss and the reduced gradients of a step over the world."""
        runtime = self.runtime
        begun.pending = self._average.pending(begun.reports, runtime.groups, runtime.device, self._size)
        totals, counts_zeros = begun.pending.totals, self._count_zero_gradients
        begun.sums = runtime.optimizer.start_sums(counts_zeros, totals, self._side)

    def _start_version(self) -> None:
        """Let the update that follows write the next version."""
        self._num_updates += 1
        self._buffers.newest = self._place_of(self._num_updates)

    def _finish(self, number: int, report: StepReport) -> None:
        begun = self._begun.pop(number)
        assert begun.pending is not None
        self._finished.append((begun.batch, StepResult(*begun.pending.of(report.beside), report, begun.routed)))

    def _update_at_once(self, action: Action) -> None:
        """Update this stage with the gradients since its last update (UPDATE)."""
        runtime, size = self.runtime, self._update_size
        step, before = divmod(self._num_updates * size, self._size)
        begun, factor = self._begun[step], 1.0 / (size * runtime.groups.dp.size) / runtime.optimizer.loss_scale
        runtime.stores.finish_gradients()
        if before + size == self._size:
            self._start_sums(begun)
            self._before_update(factor)
        if self._clips_late:
            last = self._begun.get(step - 1)
            begun.norm_before = runtime.optimizer.last_norm if last is None else self._norm_of(last)
        self._start_version()
        runtime.optimizer.update_stage(factor, begun.batch.rates, begun.norm_before)
        self._balance(begun)
        if begun.sums is not None:
            self._after_update()
        runtime.stores.begin_step(size)

    def _finish_at_once(self, stop: int) -> None:
        """Finish the steps before `stop`, whose last updates were made."""
        for number in [number for number in self._begun if number < stop]:
            begun = self._begun[number]
            assert begun.sums is not None
            _, num_zeros, others = begun.sums.values
            norm = self.runtime.optimizer.last_norm = self._norm_of(begun)
            scale, before = begun.loss_scale, begun.norm_before
            self._finish(number, StepReport(norm, 1.0, False, scale, num_zeros, tuple(others), before))

    def _norm_of(self, begun: BegunStep) -> float:
        """Return the norm of the averaged gradients of the last update of a step, which is waited for."""
        assert begun.sums is not None
        factor = 1.0 / (self._update_size * self.runtime.groups.dp.size)
        return begun.sums.values[0] * factor / begun.loss_scale

    def _sum(self, action: Action) -> None:
        """Finish the reductions of a step, and start to sum over the model what decides on its update (NORM)."""
        self.runtime.stores.finish_own_gradients()
        if action.stage == 0:  # the tied embedding counts in its norm, and the last stage is here before the first
            self.runtime.stores.finish_tied()
        self._start_sums(self._begun[self._num_updates])

    def _update_later(self, action: Action) -> None:
        """Update with the gradients of the step before (UPDATE), or with those of this one where the stream ends."""
        number, optimizer = self._num_updates, self.runtime.optimizer
        begun = self._begun[number]
        if begun.sums is None:
            self.runtime.stores.close(action.stage)
            self._sum(action)
        assert begun.sums is not None and begun.pending is not None
        others = begun.sums.values[2]
        self.runtime.stores.finish_tied()
        self._before_update(begun.pending.gradient_factor(others) / begun.loss_scale)
        self._start_version()
        factor = begun.pending.gradient_factor
        report = optimizer.finish_step(begun.sums, factor, begun.batch.rates, begun.loss_scale)
        if report.skipped:  # the memory of the next version has an older one
            optimizer.masters_to_parameters()
        self._balance(begun, report.skipped)
        self._after_update()
        self._finish(number, report)

    def _before_update(self, factor: float) -> None:
        """Do nothing: called before the last update of a step. factor: of the raw sums of gradients, for averages."""

    def _after_update(self) -> None:
        """Do nothing: called after the last update of a step."""


def train_step(runtime: TrainingRuntime, timers: Timers | None = None) -> TrainStep:
    """Build the kind of step that the plan asks for."""
    return (TrainStep if runtime.plan.is_synchronous else StreamStep)(runtime, timers)
