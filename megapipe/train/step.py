"""`TrainStep`: one optimizer step through the engine; the same function for pretraining, verification and tests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megapipe.build.loss import LossAverage, StepLoss
from megapipe.build.machines import Machines
from megapipe.model.microbatch import Microbatch
from megapipe.optimizer.optimizer import StepReport
from megapipe.pipeline.engine import Step
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

    The order: zero and arm the gradients, run this rank's row, average the loss over the world (every rank learns it), finish the
    reductions, update the shards; the parameter gather it starts runs under the next step's forwards.
    """

    def __init__(self, machines: Machines, count_zero_gradients: bool = False) -> None:
        self._machines = machines
        self._average = LossAverage(machines.plan.config.training.calculate_per_token_loss)
        self._count_zero_gradients = count_zero_gradients

    def gradients(self, microbatches: Sequence[Microbatch], timers: Timers = NO_TIMERS) -> StepLoss:
        """Everything up to the reduced raw gradients in the buffers."""
        machines = self._machines
        count = len(microbatches)
        machines.reducer.begin_step(count)
        loss = self._average.objective(machines.optimizer.loss_scale)
        with timers.phase("forward-backward"):
            reports = machines.engine(count).run(Step(microbatches, machines.message, loss))
        with timers.phase("gradient-reduce"):
            machines.reducer.finish()
        return self._average.over(reports, machines.reports_loss, count, machines.groups.dp_cp.size, machines.groups.world, machines.device)

    def run(self, microbatches: Sequence[Microbatch], rates: Rates, timers: Timers = NO_TIMERS) -> StepResult:
        """One step. Nothing is raised for a NaN: `update.skipped` and the loss say so."""
        loss = self.gradients(microbatches, timers)
        with timers.phase("optimizer"):
            update = self._machines.optimizer.step(
                1.0 / loss.denominator,
                rates.lr,
                rates.weight_decay,
                rates.decoupled_lr,
                count_zero_gradients=self._count_zero_gradients,
            )
        return StepResult(loss.loss, loss.num_tokens, update)

    @torch.no_grad()
    def evaluate(self, microbatches: Sequence[Microbatch]) -> StepLoss:
        """The loss of one global batch, forwards only, without dropout."""
        machines = self._machines
        machines.gather.finish()
        count = len(microbatches)
        run = Step(microbatches, machines.message, self._average.objective(1.0))
        reports = machines.engine(count, training=False).run(run)
        return self._average.over(reports, machines.reports_loss, count, machines.groups.dp_cp.size, machines.groups.world, machines.device)


def is_sound(result: StepResult) -> bool:
    """Loss and gradient norm are finite."""
    return math.isfinite(result.loss) and math.isfinite(result.update.grad_norm)
