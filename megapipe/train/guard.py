"""`Guard`: judge every step, agree with the other ranks on what follows, and recover from a bad step."""

from __future__ import annotations

import math

from megapipe.assembly.microbatches import read_microbatches
from megapipe.assembly.training_runtime import TrainingRuntime
from megapipe.comm.collectives import broadcast_object
from megapipe.data.loader import Loader
from megapipe.errors import TrainingError
from megapipe.monitor.heartbeat import PATIENCE
from megapipe.train.agreement import Agreement, Decision, StepHealth, StopRequest
from megapipe.train.copies_check import CopiesCheck
from megapipe.train.journal import Journal
from megapipe.train.nonfinite import OutputWatch, Sums, describe_nonfinite, repeat_step
from megapipe.train.saving import Saving
from megapipe.train.spikes import SpikeRollback, SpikeWatch
from megapipe.train.state import TrainingState
from megapipe.train.step import StepBatch, StepResult

WAY_OUT = "Lower --lr, look at the data, or ignore it with --no-check-for-nan-in-loss-and-grad"


class Guard:
    """Checks for NaN and infinity, spikes, changed copies of parameters; stop signals and limits of time.

    loader: of the training data, None if nothing is trained.
    """

    def __init__(
        self,
        runtime: TrainingRuntime,
        state: TrainingState,
        loader: Loader | None,
        saving: Saving,
        journal: Journal,
        stop: StopRequest,
    ) -> None:
        training = runtime.plan.config.training
        self._runtime, self._state, self._loader = runtime, state, loader
        self._saving, self._journal = saving, journal
        self._agreement = Agreement(runtime, stop)
        self.copies = CopiesCheck(runtime)
        self._outputs = OutputWatch(runtime) if training.check_for_nan_in_loss_and_grad else None
        self._sums: dict[int, Sums] = {}  # of the outputs of steps whose results are not known yet, by step
        self._spikes, self._rollback = None, None
        if training.spike_rollback is not None and loader is not None:
            self._spikes = SpikeWatch(training)
            self._spikes.load_state(state.spikes)
            self._rollback = SpikeRollback(runtime, loader, journal)
        self._spike = ""  # why the last step is one
        self._nonfinite: tuple[StepBatch, StepResult, Sums] | None = None  # the last step, if it is to be explained

    def stop_signal(self) -> str | None:
        """Return the stop signal that any rank has received, where no step has ended."""
        return self._agreement.stop_signal()

    def has_run(self, batch: StepBatch) -> None:
        """Take note of the outputs of a step that has run, whether or not its result is known."""
        if self._outputs is not None:
            self._sums[batch.step] = self._outputs.take()

    def is_nonfinite(self, batch: StepBatch, result: StepResult) -> bool:
        """Return True if the loss or the gradient norm of a step is not finite and the run must stop or go back it."""
        sums = self._sums.pop(batch.step, None)
        # an overflow belongs to the search for a loss scale, until the scale cannot fall any further
        lowest = self._runtime.plan.config.precision.min_loss_scale
        is_searching = self._runtime.optimizer.scaler.is_dynamic and result.update.loss_scale > lowest
        is_overflow = result.update.skipped and math.isfinite(result.loss) and is_searching
        if sums is None or result.is_finite or is_overflow:
            return False
        self._nonfinite = batch, result, sums
        return True

    def has_spiked(self, result: StepResult) -> bool:
        """Return True, on rank 0, if loss or norm have been far above the last steps' for long enough.

        Takes note of the step.
        """
        self._spike = "" if self._spikes is None else self._spikes.see(result.loss, result.update.grad_norm)
        return bool(self._spike) and self._runtime.groups.world.rank == 0

    def decide(self, health: StepHealth) -> Decision:
        """Agree with all ranks on what follows the last step."""
        saving = self._saving
        return self._agreement.after_step(self._state.step, saving.seconds_since_save, saving.is_ready, health)

    def prepare_save(self) -> None:
        """Check the copies of the parameters, and put the state of the spike watch into the state to be saved."""
        self.copies.compare(self._state.step)
        if self._spikes is not None:
            self._state.spikes = self._spikes.state()

    def recover(self) -> bool:
        """Go back to a checkpoint, as --spike-rollback says. Called by all ranks together once they have agreed that a
        step was bad.

        Returns False if there is no checkpoint yet and the run can continue without. Raises TrainingError if going back
        is not asked for, or not possible and the numbers are not finite.
        """
        why, first_bad, error = self._spike, self._state.step, None
        if self._spikes is not None:
            first_bad -= max(0, self._spikes.num_spiking - 1)
        if self._nonfinite is not None:
            why, self._nonfinite = self._explain(*self._nonfinite), None
            error = TrainingError(f"step {self._state.step}: {why}. {WAY_OUT}")
        if self._spikes is None or self._rollback is None:
            raise error or TrainingError(why)
        # rank 0 decides, as the last bits of a norm may differ
        why, first_bad = broadcast_object((why, first_bad), self._runtime.groups.world)
        self._saving.finish(is_last=False)
        with self._runtime.heartbeat.phase("loading", PATIENCE):
            went_back = self._rollback.go_back(self._state, first_bad, why)
        if not went_back:
            if error is not None:
                raise error
            self._journal.say(
                f"step {self._state.step}: {why}; there is no checkpoint from before it yet: the run continues"
            )
        self._spikes.load_state(self._state.spikes)
        return went_back

    def _explain(self, batch: StepBatch, result: StepResult, sums: Sums) -> str:
        """Say what is known of a non-finite step, and what repeating it shows if it has changed no weights."""
        loader = self._loader
        assert loader is not None
        count = len(batch.microbatches)

        def repeat() -> str:
            if self._runtime.updates is not None or not result.update.skipped:
                return ""
            again = read_microbatches(self._runtime, loader, batch.first_sample, count, batch.step - 1)
            with self._runtime.heartbeat.phase("searching", PATIENCE):
                return repeat_step(self._runtime, again)

        return describe_nonfinite(self._runtime, sums, batch, result, repeat)
