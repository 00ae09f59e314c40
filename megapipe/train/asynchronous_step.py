"""`AsynchronousStep`: one step of a schedule that updates weights while microbatches are under way. NOT synchronous."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from megapipe.assembly.training_runtime import TrainingRuntime
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
        runtime, count = self._runtime, len(microbatches)
        updates = runtime.updates
        assert updates is not None, "a synchronous schedule has no updates in its row"
        versions = runtime.plan.weight_versions(count, runtime.coordinates.pp_rank)
        updates.begin(versions, rates.lr, rates.weight_decay, rates.decoupled_lr)
        with timers.phase("forward-backward"):
            objective = self._average.objective(lambda: runtime.optimizer.loss_scale)
            reports = runtime.engine(count).run(Step(microbatches, runtime.message, objective))
        updates.finish()
        replicas, world = runtime.groups.dp_cp.size, runtime.groups.world
        self._loss = self._average.start(reports, runtime.reports_loss, count, replicas, world, runtime.device)
        return True

    def settle(self, timers: Timers = NO_TIMERS) -> StepResult:
        """The result of the step that was launched last."""
        loss = self._take_loss()
        return StepResult(loss.loss, loss.num_tokens, self._runtime.optimizer.last_update(self._count_zero_gradients))


def step_of(runtime: TrainingRuntime, count_zero_gradients: bool = False) -> TrainStep:
    """The step that the plan's schedule takes."""
    kind = TrainStep if runtime.updates is None else AsynchronousStep
    return kind(runtime, count_zero_gradients)
