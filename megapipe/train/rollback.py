"""`SpikeRollback`: back to a checkpoint from before a spike, past the samples that led to it (PaLM, arXiv:2204.02311, section 5.1)."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path

from megapipe.assembly.training_runtime import TrainingRuntime
from megapipe.checkpoint.disk import Disk
from megapipe.checkpoint.folder import folder_name, is_complete, move_abandoned, steps_in
from megapipe.checkpoint.rollbacks import Rollback, write_rollback
from megapipe.comm.collectives import broadcast_object
from megapipe.data.loader import Loader
from megapipe.errors import CheckpointError, DamageError, TrainingError
from megapipe.train import persistence
from megapipe.train.state import Account, TrainingState
from megapipe.train.writers import Writers


class SpikeRollback:
    """Goes back in --save; every method is called by all ranks together. disk: observed by tests.

    Checkpoints from behind the step gone back to are kept in `abandoned-N`. What counts is the entry in rollbacks.json: a run that ends
    before it goes on from the spike; one that ends after it, from before.
    """

    def __init__(self, runtime: TrainingRuntime, loader: Loader, writers: Writers, disk: Disk | None = None) -> None:
        checkpoint, training = runtime.plan.config.checkpoint, runtime.plan.config.training
        assert checkpoint.save is not None and training.spike_rollback is not None
        self._runtime, self._loader, self._writers, self._disk = runtime, loader, writers, disk or Disk()
        self._root, self._back, self._limit = Path(checkpoint.save), training.spike_rollback, training.spike_limit
        self._flags = dataclasses.replace(checkpoint, finetune=False, no_load_optim=False, no_load_rng=False)

    def go_back(self, state: TrainingState, first_bad_step: int, why: str) -> bool:
        """Load the --spike-rollback-th newest checkpoint from before first_bad_step, the oldest if there are fewer, and make `state` that
        position, with the samples from there to now skipped. False, and nothing is changed, if there is none.

        Raises TrainingError if --spike-limit is reached, DataError if too few samples are left, CheckpointError.
        """
        if state.account.rollbacks >= self._limit:
            raise TrainingError(
                f"step {state.step}: {why}; the run has gone back {state.account.rollbacks} times already (--spike-limit {self._limit}). "
                "Lower --lr, look at the data, or raise the limit"
            )
        resumed = self._load_before(first_bad_step)
        if resumed is None:
            return False
        rollback = self._entry(state, resumed, why)
        resumed.account = Account.from_dict(rollback.account)
        train_samples = self._runtime.plan.config.training.train_samples
        assert train_samples is not None
        self._loader.skip(resumed.account.skipped, train_samples)
        moved = self._commit(rollback)
        state.become(resumed)
        self._writers.rolled_back(rollback)
        for remark in moved:
            self._writers.say(remark)
        return True

    def _load_before(self, step: int) -> TrainingState | None:
        world = self._runtime.groups.world
        found = (
            [s for s in steps_in(self._root) if s < step and is_complete(self._root / folder_name(s))]
            if world.rank == 0
            else []
        )
        found = broadcast_object(found, world)
        for candidate in reversed(found[: max(1, len(found) - self._back + 1)]):
            try:
                return persistence.load(
                    self._runtime, self._root, dataclasses.replace(self._flags, ckpt_step=candidate)
                ).state
            except DamageError as error:
                self._writers.say(f"passed over: {error}")
        if found:
            raise CheckpointError(f"{self._root} holds no complete checkpoint from before step {step} to go back to")
        return None

    def _entry(self, state: TrainingState, resumed: TrainingState, why: str) -> Rollback:
        before, skipped = state.account, state.account.skipped
        first, past = skipped.index(resumed.consumed_samples), skipped.index(state.consumed_samples - 1) + 1
        after = Account(
            skipped.plus(first, past),
            before.rollbacks + 1,
            before.discarded_samples + state.consumed_samples - resumed.consumed_samples,
            before.discarded_tokens + state.consumed_tokens - resumed.consumed_tokens,
        )
        return Rollback(after.rollbacks, state.step, resumed.step, first, past, why, time.time(), after.to_dict())

    def _commit(self, rollback: Rollback) -> tuple[str, ...]:
        world = self._runtime.groups.world
        outcome: tuple[str, ...] | CheckpointError = ()
        if world.rank == 0:
            try:
                write_rollback(self._root, rollback, self._disk)
                outcome = move_abandoned(self._root, self._disk)
            except CheckpointError as error:
                outcome = error
            except OSError as error:
                outcome = CheckpointError(f"the rollback cannot be written down in {self._root}: {error.strerror}")
        outcome = broadcast_object(outcome, world)
        if isinstance(outcome, CheckpointError):
            raise outcome
        return outcome
