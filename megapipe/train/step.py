"""`TrainStep`: one optimizer step through the engine; the same function for pretraining, verification and tests."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from megapipe.assembly.loss import LossAverage, PendingLoss, StepLoss
from megapipe.assembly.training_runtime import TrainingRuntime
from megapipe.comm.trace import Tracer
from megapipe.model.microbatch import Microbatch
from megapipe.optimizer.optimizer import StepReport
from megapipe.pipeline.engine import BegunRun, Engine, Step
from megapipe.train.timers import Timers

NO_TIMERS = Timers(0, torch.device("cpu"))


@dataclass(frozen=True)
class Rates:
    """What the schedules say for one step."""

    lr: float
    weight_decay: float
    decoupled_lr: float | None = None


@dataclass(frozen=True)
class StepResult:
    """One step; the same on every rank. loss: before the update, averaged as the configuration says."""

    loss: float
    num_tokens: float
    update: StepReport


class TrainStep:
    """Forward and backward of all microbatches, reduction, update.

    The order: zero and arm the gradients, run this rank's row, finish the reductions, average the loss over the world (every rank learns
    it), update the shards; the parameter gather it starts runs under the next step's forwards.

    `run` is a whole step. A loop that leaves no barrier between steps calls `launch`, which ends when this rank has done its part of the
    step, and learns the result from the next launch or from `settle`. With --optimizer-post-validation the update has then been made
    without a word from other pipeline ranks (`is_ahead`), and the next launch begins with forwards (schedule.head_start) before it
    waits for the verdict; if the update was taken back, they are run again.
    """

    def __init__(self, runtime: TrainingRuntime, count_zero_gradients: bool = False) -> None:
        self._runtime = runtime
        self._average = LossAverage(runtime.plan.config.training.calculate_per_token_loss)
        self._count_zero_gradients = count_zero_gradients
        self._loss: PendingLoss | None = None  # of the step under way

    def gradients(self, microbatches: Sequence[Microbatch], timers: Timers = NO_TIMERS) -> StepLoss:
        """Everything up to the reduced raw gradients in the buffers."""
        loss = self._reduced_gradients(microbatches, timers, lambda _: True)
        assert loss is not None
        return loss.wait()

    def run(self, microbatches: Sequence[Microbatch], rates: Rates, timers: Timers = NO_TIMERS) -> StepResult:
        """One step. Nothing is raised for a NaN: `update.skipped` and the loss say so."""
        self.launch(microbatches, rates, timers)
        return self.settle(timers)

    def launch(
        self,
        microbatches: Sequence[Microbatch],
        rates: Rates,
        timers: Timers = NO_TIMERS,
        settled: Callable[[StepResult], bool] = lambda _: True,
    ) -> bool:
        """One step but for its result. settled: called with the result of the step before, where that is not known yet; False abandons
        this step without a trace. All ranks must give the same answer. Returns whether the step was made."""
        if self._loss is not None and not self.is_ahead and not settled(self.settle(timers)):
            return False
        loss = self._reduced_gradients(microbatches, timers, settled)
        if loss is None:
            return False
        with timers.phase("optimizer"):
            self._runtime.optimizer.start(
                1.0 / loss.denominator,
                rates.lr,
                rates.weight_decay,
                rates.decoupled_lr,
                count_zero_gradients=self._count_zero_gradients,
            )
        self._loss = loss
        return True

    def settle(self, timers: Timers = NO_TIMERS) -> StepResult:
        """The result of the step that was launched last; its weights are final from here on."""
        loss = self._take_loss()
        with timers.phase("verdict" if self._runtime.optimizer.is_ahead else "optimizer"):
            update = self._runtime.optimizer.settle()
        return StepResult(loss.loss, loss.num_tokens, update)

    @property
    def is_ahead(self) -> bool:
        """The step launched last has updated before its verdict, and is not settled: its weights may still be taken back."""
        return self._runtime.optimizer.is_ahead

    def _take_loss(self) -> StepLoss:
        pending, self._loss = self._loss, None
        if pending is None:
            raise RuntimeError("no step is under way: call launch first")
        return pending.wait()

    def _reduced_gradients(
        self, microbatches: Sequence[Microbatch], timers: Timers, settled: Callable[[StepResult], bool]
    ) -> PendingLoss | None:
        """None if `settled`, asked about the step before, says no."""
        runtime, count = self._runtime, len(microbatches)
        engine = runtime.engine(count)
        step = Step(microbatches, runtime.message, self._average.objective(lambda: runtime.optimizer.loss_scale))
        goes_on, begun = self._head_start(engine, step, timers, settled) if self.is_ahead else (True, None)
        if not goes_on:
            return None
        with timers.phase("forward-backward"):
            runtime.reducer.begin_step(count)
            reports = engine.run(step) if begun is None else engine.finish(begun)
        with timers.phase("gradient-reduce"):
            runtime.reducer.finish()
        if runtime.graphs is not None:
            runtime.graphs.after_step(step)
        replicas, world = runtime.groups.dp_cp.size, runtime.groups.world
        return self._average.start(reports, runtime.reports_loss, count, replicas, world, runtime.device)

    def _head_start(
        self, engine: Engine, step: Step, timers: Timers, settled: Callable[[StepResult], bool]
    ) -> tuple[bool, BegunRun | None]:
        """Forwards with weights that may be taken back, then the verdict: (what `settled` says, the run begun, unless it was in vain)."""
        tracer = self._runtime.tracer or Tracer()
        mark = len(tracer.events)
        with timers.phase("forward-backward"):
            begun = engine.begin(step)
        with tracer.aside(mark) as of_head_start:
            result = self.settle(timers)
            goes_on = settled(result)
            if goes_on and not result.update.rolled_back:
                return True, begun
            engine.discard()
            of_head_start.clear()  # not computation but idle time
        return goes_on, None

    @torch.no_grad()
    def evaluate(self, microbatches: Sequence[Microbatch]) -> StepLoss:
        """The loss of one global batch, forwards only, without dropout."""
        runtime = self._runtime
        if self.is_ahead:
            raise RuntimeError("the verdict on the last update is not known yet: call settle before an evaluation")
        runtime.gather.finish()
        count = len(microbatches)
        run = Step(microbatches, runtime.message, self._average.objective(lambda: 1.0))
        reports = runtime.forward_engine(count).run(run)
        replicas, world = runtime.groups.dp_cp.size, runtime.groups.world
        return self._average.start(reports, runtime.reports_loss, count, replicas, world, runtime.device).wait()


def is_sound(result: StepResult) -> bool:
    """Loss and gradient norm are finite."""
    return math.isfinite(result.loss) and math.isfinite(result.update.grad_norm)
