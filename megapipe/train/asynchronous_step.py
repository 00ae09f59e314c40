"""`AsynchronousStep`: one step of a schedule that updates weights while microbatches are under way. NOT synchronous."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megapipe.assembly.machines import Machines
from megapipe.model.microbatch import Microbatch
from megapipe.pipeline.engine import Step
from megapipe.train.step import NO_TIMERS, Rates, StepResult, TrainStep
from megapipe.train.timers import Timers


class AsynchronousStep(TrainStep):
    """All microbatches through one row that fills, updates on its way and drains: several updates of every stage.

    The loss is the average over the step's microbatches, each under the weights it met. The gradient norm, over the whole model, is that of
    each stage's last update: during the row no rank knows those of the others. Nothing is clipped and nothing skipped.
    """

    def launch(
        self,
        microbatches: Sequence[Microbatch],
        rates: Rates,
        timers: Timers = NO_TIMERS,
        settled: Callable[[StepResult], bool] = lambda _: True,
    ) -> bool:
        """One step but for its result. Nothing is raised for a NaN: the norm and the loss say so."""
        machines, count = self._machines, len(microbatches)
        updates = machines.updates
        assert updates is not None, "a synchronous schedule has no updates in its row"
        versions = machines.plan.weight_versions(count, machines.coordinates.pp_rank)
        updates.begin(versions, rates.lr, rates.weight_decay, rates.decoupled_lr)
        with timers.phase("forward-backward"):
            objective = self._average.objective(lambda: machines.optimizer.loss_scale)
            reports = machines.engine(count).run(Step(microbatches, machines.message, objective))
        updates.finish()
        replicas, world = machines.groups.dp_cp.size, machines.groups.world
        self._loss = self._average.start(reports, machines.reports_loss, count, replicas, world, machines.device)
        return True

    def settle(self, timers: Timers = NO_TIMERS) -> StepResult:
        """The result of the step that was launched last."""
        loss = self._take_loss()
        return StepResult(loss.loss, loss.num_tokens, self._machines.optimizer.last_update(self._count_zero_gradients))


def step_of(machines: Machines, count_zero_gradients: bool = False) -> TrainStep:
    """The step that the plan's schedule takes."""
    kind = TrainStep if machines.updates is None else AsynchronousStep
    return kind(machines, count_zero_gradients)
