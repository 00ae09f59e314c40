"""Loading: find the checkpoint to resume from, and read its tensors and state as the checkpoint flags say."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from megapipe.assembly.training_runtime import TrainingRuntime
from megapipe.checkpoint.folder import CheckpointFolder, find_checkpoint, steps_in
from megapipe.checkpoint.load import load_tensors
from megapipe.checkpoint.rollbacks import Rollback, account_of, read_rollbacks
from megapipe.checkpoint.starts import Starts, count_start, no_progress_error
from megapipe.checkpoint.tensor_box import padding_of, tensor_box
from megapipe.comm.collectives import broadcast_object
from megapipe.comm.groups import Group
from megapipe.config.config import Config
from megapipe.config.files import CheckpointConfig
from megapipe.environment import Environment
from megapipe.errors import CheckpointError, DamageError
from megapipe.train.journal import Journal, last_failure, recorded_folder
from megapipe.train.schedules import Schedules, schedules_to_resume
from megapipe.train.state import Account, TrainingState

T = TypeVar("T")
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


def on_rank_0(call: Callable[[], T], world: Group) -> T:
    """Return on all ranks what `call` returns on rank 0; its CheckpointError is raised on all of them."""
    outcome: Any = None
    if world.rank == 0:
        try:
            outcome = call()
        except CheckpointError as error:
            outcome = error
    outcome = broadcast_object(outcome, world)
    if isinstance(outcome, CheckpointError):
        raise outcome
    found: T = outcome
    return found


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
