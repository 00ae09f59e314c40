"""`Recovery`: after a loss that is no number, or a spike: say where it came from, and go back to a checkpoint if that is asked for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from megapipe.assembly.training_runtime import TrainingRuntime
from megapipe.comm.collectives import broadcast_object
from megapipe.data.loader import Loader
from megapipe.errors import TrainingError
from megapipe.monitor.heartbeat import PATIENCE, Heartbeat
from megapipe.train.fault_search import search
from megapipe.train.faults import Sums, unsound
from megapipe.train.reading import Reader
from megapipe.train.rollback import SpikeRollback
from megapipe.train.saving import Saves
from megapipe.train.spikes import SpikeWatch
from megapipe.train.state import TrainingState
from megapipe.train.step import Rates, StepResult, is_sound
from megapipe.train.writers import Writers


@dataclass(frozen=True)
class Launched:
    """What is still to be known of a step when its result comes. sums: of its stages' outputs, None unless watched."""

    num_microbatches: int
    samples: int
    rates: Rates
    sample_ids: Mapping[int, tuple[int, ...]]
    sums: Sums | None


class Recovery:
    """Judges every step's result; `recover` is called by all ranks together once they have agreed that a step was bad.

    loader: of the training data, None where nothing is trained.
    """

    def __init__(
        self,
        runtime: TrainingRuntime,
        state: TrainingState,
        loader: Loader | None,
        reader: Reader,
        writers: Writers,
        heartbeat: Heartbeat,
    ) -> None:
        training = runtime.plan.config.training
        self._runtime, self._state, self._loader, self._reader = runtime, state, loader, reader
        self._writers, self._heartbeat = writers, heartbeat
        self._spikes, self._rollback = None, None
        if training.spike_rollback is not None and loader is not None:
            self._spikes = SpikeWatch(training)
            self._spikes.load_state(state.spikes)
            self._rollback = SpikeRollback(runtime, loader, writers)
        self._spike = ""
        self._unsound: tuple[StepResult, Launched] | None = None

    def is_unsound(self, result: StepResult, launched: Launched) -> bool:
        """Is the loss or the norm of this step no number? Then `recover` explains it."""
        # an overflow is part of the search for a loss scale, until that cannot fall any further
        lowest = self._runtime.plan.config.precision.min_loss_scale
        searching = self._runtime.optimizer.scaler.is_dynamic and result.update.loss_scale > lowest
        overflow = result.update.skipped and math.isfinite(result.loss) and searching
        if launched.sums is None or is_sound(result) or overflow:
            return False
        self._unsound = result, launched
        return True

    def has_spiked(self, result: StepResult) -> bool:
        """Take note of a sound step: have loss or norm been far above what they were for long enough?"""
        self._spike = "" if self._spikes is None else self._spikes.see(result.loss, result.update.grad_norm)
        return bool(self._spike)

    def keep_state(self) -> None:
        """Put what the watch has seen into the state that is about to be saved."""
        if self._spikes is not None:
            self._state.spikes = self._spikes.state()

    def recover(self, saves: Saves | None) -> bool:
        """Go back to a checkpoint, as --spike-rollback says. False if there is none yet, and the run can go on without.

        Raises TrainingError if going back is not asked for, or not possible and no number is left to go on with.
        """
        why, first_bad, error = self._spike, self._state.step, None
        if self._spikes is not None:
            first_bad -= max(0, self._spikes.num_spiking - 1)
        if self._unsound is not None:
            error = self._explained(*self._unsound)
            why, self._unsound = str(error).partition(". Lower --lr")[0].partition(": ")[2], None
        if self._spikes is None or self._rollback is None:
            raise error or TrainingError(why)
        why, first_bad = broadcast_object(
            (why, first_bad), self._runtime.groups.world
        )  # the last bits of a norm may differ
        if saves is not None:
            saves.finish(is_last=False)
        with self._heartbeat.phase("loading", PATIENCE):
            went_back = self._rollback.go_back(self._state, first_bad, why)
        if not went_back:
            if error is not None:
                raise error
            self._writers.say(
                f"step {self._state.step}: {why}; there is no checkpoint from before it yet: the run goes on"
            )
        self._spikes.load_state(self._state.spikes)
        return went_back

    def _explained(self, result: StepResult, launched: Launched) -> TrainingError:
        """What is known of a step whose loss or norm is no number, and what running it once more shows, if it has changed no weights."""
        assert launched.sums is not None and self._loader is not None
        consumed, step = self._state.consumed_samples - launched.samples, self._state.step - 1
        microbatches = self._reader.microbatches(self._loader, consumed, launched.num_microbatches, step)

        def again() -> str:
            if self._runtime.updates is not None or not result.update.skipped:
                return ""
            with self._heartbeat.phase("searching", PATIENCE):
                return search(self._runtime, microbatches)

        return unsound(self._runtime, launched.sums, result, self._state.step, launched.sample_ids, again)
