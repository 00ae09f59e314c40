"""Loss spikes: detect one, reload a checkpoint from before it and skip the samples (PaLM, arXiv:2204.02311, 5.1)."""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections import deque
from pathlib import Path
from typing import Any

from megapipe.assembly.training_runtime import TrainingRuntime
from megapipe.checkpoint.disk import Disk
from megapipe.checkpoint.folder import folder_name, is_complete, move_abandoned, steps_in
from megapipe.checkpoint.rollbacks import Rollback, write_rollback
from megapipe.config.training import TrainingConfig
from megapipe.data.loader import Loader
from megapipe.errors import CheckpointError, DamageError, TrainingError
from megapipe.train.journal import Journal
from megapipe.train.loading import load, on_rank_0
from megapipe.train.state import Account, TrainingState

MAD_TO_DEVIATION = 1.4826  # a normal distribution's standard deviation over its median absolute deviation
# Of a logarithm, that is 0.3 % of the value: a curve steadier than that does not spike because of noise.
LEAST_DEVIATION = 0.003
LEAST_SHARE = 0.5  # of the window that must be filled before anything is judged


class SpikeWatch:
    """A detector of spikes from plain numbers, the same on all ranks.

    A step spikes if loss or gradient norm is more than --spike-threshold robust deviations (median absolute
    deviations, scaled to a standard deviation) above the median of the last --spike-window steps, all in logarithms;
    spiking steps do not enter the window.
    """

    def __init__(self, training: TrainingConfig) -> None:
        self._threshold, self._patience = training.spike_threshold, training.spike_steps
        self._seen: dict[str, deque[float]] = {
            name: deque(maxlen=training.spike_window) for name in ("loss", "gradient norm")
        }
        self._least = max(4, round(LEAST_SHARE * training.spike_window))
        self.num_spiking = 0  # steps in a row, the last one included

    def see(self, loss: float, grad_norm: float) -> str:
        """Take note of a step; return a description once --spike-steps steps in a row have spiked, else "".

        A value that is not finite, or 0, is left out.
        """
        values = {
            name: math.log(value)
            for name, value in (("loss", loss), ("gradient norm", grad_norm))
            if math.isfinite(value) and value > 0
        }
        why = [text for name, value in values.items() if (text := self._above(name, value))]
        if not why:
            self.num_spiking = 0
            for name, value in values.items():
                self._seen[name].append(value)
            return ""
        self.num_spiking += 1
        return " and ".join(why) if self.num_spiking >= self._patience else ""

    def _above(self, name: str, value: float) -> str:
        seen = self._seen[name]
        if len(seen) < self._least:
            return ""
        median = statistics.median(seen)
        deviation = max(LEAST_DEVIATION, MAD_TO_DEVIATION * statistics.median(abs(other - median) for other in seen))
        if value <= median + self._threshold * deviation:
            return ""
        above = (value - median) / deviation
        return (
            f"{name} {math.exp(value):.4g}, {above:.1f} deviations above the median {math.exp(median):.4g} "
            f"of {len(seen)} steps"
        )

    def state(self) -> dict[str, Any]:
        """Return plain values for the checkpoint."""
        return {"seen": {name: list(values) for name, values in self._seen.items()}, "num_spiking": self.num_spiking}

    def load_state(self, state: dict[str, Any] | None) -> None:
        """Restore `state`; None, from a checkpoint without a watch, resets it."""
        for name, values in self._seen.items():
            values.clear()
            values.extend(state["seen"][name] if state else ())
        self.num_spiking = int(state["num_spiking"]) if state else 0


class SpikeRollback:
    """The way back to a checkpoint in --save. Every method is called by all ranks together. disk: observed by tests.

    Checkpoints from after the step gone back to are kept in `abandoned-N`. The entry in rollbacks.json decides: a run
    that ends before it is written resumes from the spike, one that
    ends after it from the checkpoint before.
    """

    def __init__(self, runtime: TrainingRuntime, loader: Loader, journal: Journal, disk: Disk | None = None) -> None:
        checkpoint, training = runtime.plan.config.checkpoint, runtime.plan.config.training
        assert checkpoint.save is not None and training.spike_rollback is not None
        self._runtime, self._loader, self._journal, self._disk = runtime, loader, journal, disk or Disk()
        self._root, self._back, self._limit = Path(checkpoint.save), training.spike_rollback, training.spike_limit
        self._flags = dataclasses.replace(checkpoint, finetune=False, no_load_optim=False, no_load_rng=False)

    def go_back(self, state: TrainingState, first_bad_step: int, why: str) -> bool:
        """Load the --spike-rollback-th newest checkpoint from before first_bad_step, the oldest if there are fewer.

        `state` becomes that position, with the samples from there to now skipped. Returns False, with nothing changed,
        if there is no such checkpoint. Raises TrainingError if --spike-limit is reached, DataError if too few samples
        are left, CheckpointError.
        """
        if state.account.rollbacks >= self._limit:
            raise TrainingError(
                f"step {state.step}: {why}; the run has gone back {state.account.rollbacks} times already "
                f"(--spike-limit {self._limit}). Lower --lr, look at the data, or raise the limit"
            )
        resumed = self._load_before(first_bad_step)
        if resumed is None:
            return False
        rollback = _rollback(state, resumed, why)
        resumed.account = Account.from_dict(rollback.account)
        train_samples = self._runtime.plan.config.training.train_samples
        assert train_samples is not None
        self._loader.skip(resumed.account.skipped, train_samples)
        moved = self._commit(rollback)
        state.become(resumed)
        self._journal.rolled_back(rollback)
        for remark in moved:
            self._journal.say(remark)
        return True

    def _load_before(self, step: int) -> TrainingState | None:
        root = self._root
        complete = lambda: [s for s in steps_in(root) if s < step and is_complete(root / folder_name(s))]  # noqa: E731
        steps = on_rank_0(complete, self._runtime.groups.world)
        # the --spike-rollback-th newest; damaged ones are passed over for older ones
        for candidate in reversed(steps[: max(1, len(steps) - self._back + 1)]):
            try:
                return load(self._runtime, self._root, dataclasses.replace(self._flags, ckpt_step=candidate)).state
            except DamageError as error:
                self._journal.say(f"passed over: {error}")
        if steps:
            raise CheckpointError(f"{self._root} holds no complete checkpoint from before step {step} to go back to")
        return None

    def _commit(self, rollback: Rollback) -> tuple[str, ...]:
        """Write the rollback down and move the abandoned checkpoints; returns remarks on them."""

        def write() -> tuple[str, ...]:
            try:
                write_rollback(self._root, rollback, self._disk)
                return move_abandoned(self._root, self._disk)
            except OSError as error:
                text = f"the rollback cannot be recorded in {self._root}: {error.strerror}"
                raise CheckpointError(text) from None

        return on_rank_0(write, self._runtime.groups.world)


def _rollback(state: TrainingState, resumed: TrainingState, why: str) -> Rollback:
    """Return the entry for rollbacks.json."""
    before, skipped = state.account, state.account.skipped
    first, past = skipped.index(resumed.consumed_samples), skipped.index(state.consumed_samples - 1) + 1
    after = Account(
        skipped.plus(first, past),
        before.rollbacks + 1,
        before.discarded_samples + state.consumed_samples - resumed.consumed_samples,
        before.discarded_tokens + state.consumed_tokens - resumed.consumed_tokens,
    )
    return Rollback(after.rollbacks, state.step, resumed.step, first, past, why, time.time(), after.to_dict())
