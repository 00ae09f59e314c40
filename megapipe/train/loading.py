"""Loading: find the checkpoint to resume from, and read its tensors and state as the checkpoint flags say."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from megapipe.assembly.runtime import TrainingRuntime
from megapipe.checkpoint.disk import Disk
from megapipe.checkpoint.folder import (
    CheckpointFolder,
    Rollback,
    account_of,
    find_checkpoint,
    folder_name,
    is_complete,
    move_abandoned,
    read_rollbacks,
    steps_in,
    write_rollback,
)
from megapipe.checkpoint.load import load_tensors
from megapipe.checkpoint.shard import padding_of, tensor_box
from megapipe.checkpoint.starts import Starts, count_start, no_progress_error
from megapipe.comm.collectives import broadcast_object
from megapipe.comm.groups import Group
from megapipe.config.config import Config
from megapipe.config.files import CheckpointConfig
from megapipe.data.loader import Loader
from megapipe.environment import Environment
from megapipe.errors import CheckpointError, DamageError, TrainingError
from megapipe.train.journal import Journal, last_failure, recorded_folder
from megapipe.train.state import Account, Schedules, TrainingState, on_rank_0, schedules_to_resume

CountedStarts = Starts | CheckpointError | None  # None: nothing is saved, so there is nothing to count


@dataclass(frozen=True)
class Resumed:
    """The point from which a run continues.

    path: of the checkpoint, None for a fresh start. schedules: in force from here on, None without --lr. damaged: newer
    checkpoints that looked complete and were not.
    """

    state: TrainingState
    schedules: Schedules | None
    path: Path | None = None
    remarks: tuple[str, ...] = ()
    damaged: tuple[Path, ...] = ()


def count_this_start(config: Config, environment: Environment) -> CountedStarts:
    """Count this start of a job on rank 0, before it meets the other ranks: a start that fails there counts, too."""
    if environment.global_rank != 0 or config.checkpoint.save is None or config.training.skip_train:
        return None
    try:
        return count_start(Path(config.checkpoint.save), environment.job, environment.restart_count > 0)
    except CheckpointError as error:
        return error


def share_starts(counted: CountedStarts, config: Config, world: Group) -> Starts | None:
    """Return rank 0's count on all ranks. Raises NoProgressError, or rank 0's CheckpointError, on all of them."""
    starts: CountedStarts = broadcast_object(counted, world)
    if isinstance(starts, CheckpointError):
        raise starts
    if starts is not None and starts.exhausted:
        assert config.checkpoint.save is not None
        folder = recorded_folder(config)
        failure = None if folder is None else last_failure(folder, starts.times[0])
        raise no_progress_error(starts, Path(config.checkpoint.save), failure)
    return starts


def resume(runtime: TrainingRuntime, journal: Journal, starts: Starts | None = None) -> Resumed:
    """Load from --load, or from --save after a restart if it holds a checkpoint; else start from the beginning."""
    config = runtime.plan.config
    flags = restart_flags(config.checkpoint, starts)
    if flags != config.checkpoint:
        journal.say(f"a restart: going on from --save {flags.save}; --load and its flags apply only to the first start")
    if flags.load is None:
        return Resumed(TrainingState(), None if config.optimizer.lr is None else Schedules.of(config))
    started = time.perf_counter()
    resumed = load(runtime, Path(flags.load), flags)
    for remark in resumed.remarks:
        journal.say(remark)
    if resumed.path is not None:
        state, seconds = resumed.state, time.perf_counter() - started
        journal.say(
            f"loaded {resumed.path} in {seconds:.1f} s: going on after step {state.step}, "
            f"{state.consumed_samples:,} samples"
        )
        journal.resumed(resumed.path)
    return resumed


def restart_flags(flags: CheckpointConfig, starts: Starts | None) -> CheckpointConfig:
    """Return the flags of a restart: the job's own checkpoints take precedence over --load, --ckpt-step, --finetune."""
    if starts is None or not starts.is_restart or flags.save is None or not steps_in(Path(flags.save)):
        return flags
    return replace(flags, load=flags.save, ckpt_step=None, finetune=False, no_load_optim=False, no_load_rng=False)


def load(runtime: TrainingRuntime, root: Path, flags: CheckpointConfig | None = None) -> Resumed:
    """Load the newest complete checkpoint of root, or --ckpt-step, as the flags of the checkpoint section say; called
    by all ranks.

    If the newest one proves damaged while it is read, the one before is taken. A root without any checkpoint is a fresh
    start, unless --exit-on-missing-checkpoint or --ckpt-step. The checkpoint may come from any grid. flags: instead of
    the configuration's. Raises CheckpointError on all ranks.
    """
    flags = flags or runtime.plan.config.checkpoint
    remarks: list[str] = []
    damaged: list[tuple[Path, int]] = []
    while True:
        below = damaged[-1][1] if damaged else None
        folder = on_rank_0(partial(find_checkpoint, root, flags.ckpt_step, below), runtime.groups.world)
        if folder is None and damaged:
            raise CheckpointError(f"{root} holds no complete checkpoint:\n  " + "\n  ".join(remarks))
        try:
            resumed = _load_from(runtime, root, folder, flags)
        except DamageError as error:
            if folder is None or flags.ckpt_step is not None:
                raise
            damaged.append((folder.path, folder.step))
            remarks += [*folder.remarks, f"passed over: {error}"]
            continue
        return replace(resumed, remarks=(*remarks, *resumed.remarks), damaged=tuple(path for path, _ in damaged))


def _load_from(
    runtime: TrainingRuntime, root: Path, folder: CheckpointFolder | None, flags: CheckpointConfig
) -> Resumed:
    config = runtime.plan.config
    schedules = None if config.optimizer.lr is None else Schedules.of(config)
    if folder is None:
        if flags.exit_on_missing_checkpoint:
            raise CheckpointError(f"--load {root} holds no checkpoint (--exit-on-missing-checkpoint)")
        return Resumed(TrainingState(), schedules, None, (f"{root} holds no checkpoint: starting from step 0",))
    saved = folder.manifest.state
    with_optimizer = not (flags.no_load_optim or flags.finetune)
    if not (flags.finetune or config.training.skip_train):
        _check_batch(runtime, saved, folder.path)
    if not (flags.finetune or flags.no_load_rng):
        _check_random(config, saved, folder.path)
    if with_optimizer:
        _check_optimizer(config, saved, folder.path)
        if schedules is not None and saved["schedules"] is not None:
            of_checkpoint = Schedules.from_dict(saved["schedules"])
            schedules = schedules_to_resume(schedules, of_checkpoint, config.optimizer, str(folder.path))
    _load_tensors(runtime, folder, with_optimizer)
    if with_optimizer:
        _load_optimizer_state(runtime, saved)
    state = TrainingState() if flags.finetune else _position(saved, read_rollbacks(root))
    return Resumed(state, schedules, folder.path, folder.remarks)


def _position(saved: dict[str, Any], rollbacks: Sequence[Rollback]) -> TrainingState:
    """Return a checkpoint's position, with the account of the run's last rollback if that came after the checkpoint."""
    account = Account.from_dict(account_of(saved, rollbacks))
    return TrainingState.from_dict(saved["training"], account, saved.get("spikes"))


def _check_random(config: Config, saved: dict[str, Any], path: Path) -> None:
    if saved["random"] is None:
        raise CheckpointError(
            f"{path} holds no random state (--no-save-rng); give --no-load-rng to continue with --seed "
            f"{config.training.seed}"
        )
    seed = saved["random"]["seed"]
    if seed != config.training.seed:
        raise CheckpointError(
            f"--seed {config.training.seed} differs from the seed {seed} of {path}: dropout and the order of the data "
            f"would change; give --seed {seed}, or --no-load-rng if that is wanted"
        )


def _check_batch(runtime: TrainingRuntime, saved: dict[str, Any], path: Path) -> None:
    """Refuse a batch size that is derived from the number of ranks and has changed with it."""
    batch, dp = runtime.plan.batch, runtime.plan.topology.dp
    before = saved.get("global_batch_size")
    if before is None or not batch.is_derived or before == batch.full:
        return
    raise CheckpointError(
        f"--global-batch-size is not given, and micro-batch-size x data-parallel size {dp} would make it {batch.full}, "
        f"but {path} was trained with {before}: give --global-batch-size {before} to continue with the same steps on "
        f"any number of ranks, or --global-batch-size {batch.full} if the change is wanted"
    )


def _check_optimizer(config: Config, saved: dict[str, Any], path: Path) -> None:
    way_out = "give --no-load-optim to continue with a fresh optimizer, or --finetune to start at step 0"
    if saved["optimizer"] is None:
        raise CheckpointError(f"{path} holds no optimizer state (--no-save-optim); {way_out}")
    rule = saved["optimizer"]["rule"]
    if rule != config.optimizer.optimizer:
        raise CheckpointError(
            f"{path} holds the state of --optimizer {rule}, this run uses {config.optimizer.optimizer}; {way_out}"
        )


def _load_tensors(runtime: TrainingRuntime, folder: CheckpointFolder, with_optimizer: bool) -> None:
    """Fill masters (else weights) and, if asked for, moments; parameters and masters agree afterwards."""
    runtime.gather.finish()
    world = runtime.groups.world
    if not with_optimizer and not folder.manifest.holds("master"):
        load_tensors(folder, (box for _, box in runtime.held_weights()), world)
        runtime.optimizer.parameters_to_masters()
        return
    wanted = []
    for held in runtime.optimizer.state():
        if held.key != "master" and not with_optimizer:
            continue
        if held.key != "master":
            padding_of(held.piece, held.values).zero_()  # vocabulary padding is not saved
        box = tensor_box(held.key, held.piece, held.values)
        if box is not None:
            wanted.append(box)
    load_tensors(folder, wanted, world)
    runtime.optimizer.masters_to_parameters()


def _load_optimizer_state(runtime: TrainingRuntime, saved: dict[str, Any]) -> None:
    plain = dict(saved["optimizer"])
    if saved["precision"] != runtime.plan.config.precision.dtype:
        # the loss scale of another precision means nothing here
        plain["loss_scaler"] = runtime.optimizer.plain_state()["loss_scaler"]
    runtime.optimizer.load_plain_state(plain)


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
