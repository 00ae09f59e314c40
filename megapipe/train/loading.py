"""Loading: find the checkpoint to resume from, read its tensors and state as the checkpoint flags say, and go back to
one from before a loss spike (PaLM, arXiv:2204.02311, 5.1)."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from megapipe.assembly.runtime import TrainingRuntime
from megapipe.checkpoint.changes import changes_since, check_tokenizer, data_parallel_change
from megapipe.checkpoint.disk import Disk
from megapipe.checkpoint.folder import (
    CheckpointFolder,
    Rollback,
    account_of,
    complete_steps,
    find_checkpoint,
    has_saved,
    move_abandoned,
    read_rollbacks,
    write_rollback,
)
from megapipe.checkpoint.load import load_tensors
from megapipe.checkpoint.lock import Owner, SaveLock, acquire
from megapipe.checkpoint.manifest import MANIFEST_NAME
from megapipe.checkpoint.save import from_rank_0
from megapipe.checkpoint.shard import padding_of, tensor_box
from megapipe.checkpoint.starts import Starts, count_start, no_progress_error
from megapipe.comm.collectives import all_reduce
from megapipe.comm.groups import Group
from megapipe.config.changes import DATA, LOSS, OPTIMIZER, SCHEDULE
from megapipe.config.config import Config, ResolvedConfig
from megapipe.config.files import CheckpointConfig
from megapipe.data.fingerprint import Fingerprint, differences, has_another_order
from megapipe.data.loader import Loader
from megapipe.environment import Environment
from megapipe.errors import CheckpointError, DamageError, RemovedError, TrainingError
from megapipe.sharding.state_dtypes import LAST_CHANGE
from megapipe.tokenizers.tokenizer import Fingerprint as TokenizerFingerprint
from megapipe.train.facts import changed_versions, versions
from megapipe.train.journal import Journal, last_failure, recorded_folder
from megapipe.train.state import (
    Account,
    Schedules,
    TrainingState,
    changed_extensions,
    check_position,
    on_rank_0,
    rise_text,
    samples_to_take,
    schedule_changes,
    schedules_to_resume,
)

# flags to resume this job's own run
LOAD_ALL: dict[str, Any] = {"finetune": False, "no_load_optim": False, "no_load_rng": False}
ALLOW_ALL: dict[str, Any] = {"allow_changed_model": True, "allow_changed_optimizer": True, "allow_changed_data": True}
Weights = Mapping[str, "WholeTensor"]  # 'master/' + parameter -> values
CountedStarts = Starts | CheckpointError | None  # None: nothing is saved, so there is nothing to count


class WholeTensor(Protocol):
    """A tensor on disk, [shape of the parameter] without vocabulary padding."""

    def detach(self) -> torch.Tensor:
        """Read it."""
        ...


@dataclass(frozen=True)
class Resumed:
    """The point from which a run continues."""

    state: TrainingState
    schedules: Schedules | None  # in force from here on, None without --lr
    path: Path | None = None  # of the checkpoint, None for a fresh start
    remarks: tuple[str, ...] = ()
    damaged: tuple[Path, ...] = ()  # newer checkpoints that looked complete and were not


@contextmanager
def save_lock(config: Config, environment: Environment) -> Iterator[SaveLock | CheckpointError | None]:
    """Hold the lock of --save on rank 0 inside the block; yield the error, for `count_this_start`, if that fails."""
    if environment.global_rank != 0 or config.checkpoint.save is None or config.training.skip_train:
        yield None
        return
    try:
        lock = acquire(Path(config.checkpoint.save), Owner.here(environment), partial(print, flush=True))
    except CheckpointError as error:
        yield error
        return
    try:
        yield lock
    finally:
        lock.release()


def count_this_start(
    config: Config, environment: Environment, lock: SaveLock | CheckpointError | None
) -> CountedStarts:
    """Count this start of a job on rank 0, before it meets the other ranks: a start that fails there counts, too.

    lock: of --save; an error is returned. None if nothing is saved.
    """
    if lock is None or isinstance(lock, CheckpointError):
        return lock
    assert config.checkpoint.save is not None
    try:
        return count_start(Path(config.checkpoint.save), environment.job, environment.restart_count > 0)
    except CheckpointError as error:
        return error


def share_starts(counted: CountedStarts, config: Config, world: Group) -> Starts | None:
    """Return rank 0's count on all ranks. Raises NoProgressError, or rank 0's CheckpointError, on all of them."""
    starts: Starts | None = from_rank_0(counted, world)
    if starts is not None and starts.exhausted:
        assert config.checkpoint.save is not None  # else nothing is counted
        folder = recorded_folder(config)
        failure = None if folder is None else last_failure(folder, starts.times[0])
        raise no_progress_error(starts, Path(config.checkpoint.save), failure)
    return starts


def flags_of_start(config: Config, starts: CountedStarts) -> CheckpointConfig:
    """Return the flags with which a run resumes: from --save after a restart, if that holds a checkpoint."""
    flags = config.checkpoint
    if isinstance(starts, Starts) and starts.is_restart and flags.save is not None and has_saved(Path(flags.save)):
        # the job's own checkpoints take precedence over --load, --ckpt-step, --finetune
        may_change = flags.allow_changed_optimizer or flags.no_load_optim  # the first start was allowed to
        return replace(flags, load=flags.save, ckpt_step=None, allow_changed_optimizer=may_change, **LOAD_ALL)
    return flags


def resume(
    runtime: TrainingRuntime,
    journal: Journal,
    starts: Starts | None = None,
    data: Fingerprint | None = None,
    weights: Weights | None = None,
    made_with: TokenizerFingerprint | None = None,
) -> Resumed:
    """Load from --load, or from --save after a restart if it holds a checkpoint; else start from the beginning.

    data: of the training data, on rank 0. weights: those of --load, if that is not a checkpoint of a run. made_with:
    the fingerprint of the tokenizer.
    """
    config = runtime.plan.config
    flags = flags_of_start(config, starts)
    if flags != config.checkpoint:
        unused = "--load and its flags apply only to the first start"
        journal.say(f"a restart: continuing from --save {flags.save}; {unused}")
    if flags.load is None:
        return Resumed(TrainingState(), None if config.optimizer.lr is None else Schedules.of(config))
    started = time.perf_counter()
    if weights is not None and flags == config.checkpoint:
        load_whole(runtime, weights)
        schedules = None if config.optimizer.lr is None else Schedules.of(config)
        resumed = Resumed(TrainingState(), schedules, Path(flags.load))
    else:
        resumed = load(runtime, Path(flags.load), flags, data, made_with)
    journal.say(*resumed.remarks)
    if resumed.path is not None:
        position = f"step {resumed.state.step}, {resumed.state.consumed_samples:,} samples"
        journal.say(f"loaded {resumed.path} in {time.perf_counter() - started:.1f} s: continuing after {position}")
        journal.record("resumed", path=str(resumed.path))
    return resumed


def load(
    runtime: TrainingRuntime,
    root: Path,
    flags: CheckpointConfig | None = None,
    data: Fingerprint | None = None,
    made_with: TokenizerFingerprint | None = None,
) -> Resumed:
    """Load the newest complete checkpoint of root, or --ckpt-step, from any grid. A collective.

    If the newest one proves damaged while it is read, the one before is taken. A root without any checkpoint is a fresh
    start, unless --exit-on-missing-checkpoint or --ckpt-step. flags: instead of the configuration's. data (on rank 0),
    made_with: fingerprints of the training data and of the tokenizer, to be compared. Raises CheckpointError on all
    ranks.
    """
    flags = flags or runtime.plan.config.checkpoint
    remarks: list[str] = []
    damaged: list[CheckpointFolder] = []
    while True:
        below = damaged[-1].step if damaged else None
        folder = on_rank_0(partial(_found, root, flags, below), runtime.groups.world)
        if folder is None and damaged:
            raise CheckpointError(f"{root} holds no complete checkpoint:\n  " + "\n  ".join(remarks))
        try:
            resumed = _load_from(runtime, root, folder, flags, data, made_with)
        except RemovedError:  # by the run that saves there; a newer one may exist
            continue
        except DamageError as error:
            if folder is None or flags.ckpt_step is not None:
                raise
            damaged.append(folder)
            remarks += [*folder.remarks, f"passed over: {error}"]
            continue
        return replace(resumed, remarks=(*remarks, *resumed.remarks), damaged=tuple(one.path for one in damaged))


def _found(root: Path, flags: CheckpointConfig, below: int | None) -> CheckpointFolder | None:
    """Return the checkpoint to load, None for a fresh start. Raises CheckpointError where that is not wanted."""
    folder = find_checkpoint(root, flags.ckpt_step, below)
    if folder is None and below is None:
        if flags.exit_on_missing_checkpoint:
            raise CheckpointError(f"--load {root} holds no checkpoint (--exit-on-missing-checkpoint)")
        if not root.exists() and (flags.save is None or Path(flags.save) != root):
            way = "give the folder of a run or of a Hugging Face model, or leave --load out to start from step 0"
            raise CheckpointError(f"--load {root} does not exist; {way}")
    return folder


def _load_from(
    runtime: TrainingRuntime,
    root: Path,
    folder: CheckpointFolder | None,
    flags: CheckpointConfig,
    data: Fingerprint | None,
    made_with: TokenizerFingerprint | None,
) -> Resumed:
    config = runtime.plan.config
    schedules = None if config.optimizer.lr is None else Schedules.of(config)
    if folder is None:
        return Resumed(TrainingState(), schedules, None, (f"{root} holds no checkpoint: starting from step 0",))
    saved = folder.manifest.state
    with_optimizer = not (flags.no_load_optim or flags.finetune)
    with understood(folder.path):
        state = TrainingState.from_dict(saved["training"])
        if state.step != folder.step:
            raise ValueError(f"step {state.step} in a checkpoint of step {folder.step}")
        check_position(state, saved.get("batches"))
        state.since = state.step, state.consumed_samples
        _check(runtime, saved, folder.path, flags)
        if with_optimizer and schedules is not None and saved["schedules"] is not None:
            of_checkpoint = Schedules.from_dict(saved["schedules"])
            schedules = schedules_to_resume(schedules, of_checkpoint, config.optimizer, str(folder.path))
        # the account of the run's last rollback, if that came after the checkpoint
        state.account = Account.from_dict(account_of(saved, read_rollbacks(root)))
        other_versions = changed_versions(saved.get("versions"), versions(config))
        state.spikes = saved.get("spikes")
        state.compiles_blocks = saved.get("compiles_blocks")
    remarks = (*folder.remarks, *changed_extensions(saved.get("extensions", []), str(folder.path)))
    if other_versions:
        remarks += (f"other versions than those that saved {folder.path}: {other_versions}",)
    remarks += on_rank_0(
        partial(told_changes, folder, config, schedules, data, flags, runtime.plan.topology.dp), runtime.groups.world
    )
    given = {"is_finetuning": flags.finetune, "may_differ": flags.allow_changed_data}
    remarks += on_rank_0(partial(check_tokenizer, saved, made_with, str(folder.path), **given), runtime.groups.world)
    _load_tensors(runtime, folder, with_optimizer, flags.allow_changed_model)
    if with_optimizer:
        with understood(folder.path):
            plain = dict(saved["optimizer"])
            if saved["precision"] != config.precision.dtype:
                # the loss scale of another precision means nothing here
                plain["loss_scaler"] = runtime.optimizer.plain_state()["loss_scaler"]
            runtime.optimizer.load_plain_state(plain)
    return Resumed(TrainingState() if flags.finetune else state, schedules, folder.path, remarks)


@contextmanager
def understood(path: Path) -> Iterator[None]:
    """Turn the errors of state that is not of the expected kinds into a CheckpointError."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        what = f"{type(error).__name__}: {error}"
        raise CheckpointError(f"the state in {path / MANIFEST_NAME} cannot be understood: {what}") from None


def _check(runtime: TrainingRuntime, saved: dict[str, Any], path: Path, flags: CheckpointConfig) -> None:
    """Raise CheckpointError if the run cannot continue from a checkpoint's state with these flags."""
    config, batch, seed = runtime.plan.config, runtime.plan.batch, runtime.plan.config.training.seed
    before = saved.get("global_batch_size")
    trains_on = not (flags.finetune or config.training.skip_train)
    # a batch size that is derived from the number of ranks changes with it
    if trains_on and batch.is_derived and before not in (None, batch.full):
        raise CheckpointError(
            f"--global-batch-size is not given, and micro-batch-size x data-parallel size {runtime.plan.topology.dp} "
            f"would make it {batch.full}, but {path} was trained with {before}: give --global-batch-size {before} to "
            f"continue with the same steps on any number of ranks, or --global-batch-size {batch.full} if the change "
            "is wanted"
        )
    if not (flags.finetune or flags.no_load_rng):
        if saved["random"] is None:
            raise CheckpointError(
                f"{path} holds no random state (--no-save-rng); give --no-load-rng to continue with --seed {seed}"
            )
        saved_seed = saved["random"]["seed"]
        if saved_seed != seed:
            raise CheckpointError(
                f"--seed {seed} differs from the seed {saved_seed} of {path}: dropout and the order of the data would "
                f"change; give --seed {saved_seed}, or --no-load-rng if that is wanted"
            )
    if not (flags.finetune or flags.no_load_optim):
        way_out = "give --no-load-optim to continue with a fresh optimizer, or --finetune to start at step 0"
        if saved["optimizer"] is None:
            raise CheckpointError(f"{path} holds no optimizer state (--no-save-optim); {way_out}")
        rule, own = saved["optimizer"]["rule"], config.optimizer.optimizer
        if rule != own:
            raise CheckpointError(f"{path} holds the state of --optimizer {rule}, this run uses {own}; {way_out}")


def told_changes(
    folder: CheckpointFolder,
    config: ResolvedConfig,
    schedules: Schedules | None,
    data: Fingerprint | None,
    flags: CheckpointConfig,
    dp: int,
) -> tuple[str, ...]:
    """Return the lines about the changes since a checkpoint. schedules: those in force from here on.

    Raises CheckpointError if the run computes another function or, unless it starts from step 0, has another optimizer
    or other data, without the flags that allow it.
    """
    state = folder.manifest.state
    if flags.finetune or config.training.skip_train or int(state["training"]["consumed_samples"]) == 0:
        return changes_since(folder, config, (), {}).told(flags)
    of_data, remarks = _data_changes(folder, data)
    with understood(folder.path):
        more = {DATA: of_data, LOSS: data_parallel_change(state, config, dp)}
    if schedules is not None and state["schedules"] is not None:
        with understood(folder.path):
            saved, samples = Schedules.from_dict(state["schedules"]), int(state["training"]["consumed_samples"])
            more[SCHEDULE] = schedule_changes(saved, schedules) + rise_text(saved, schedules, samples)
    kinds = {LOSS, SCHEDULE, OPTIMIZER} | ({DATA} if state.get("data") is not None else set())
    if flags.no_load_optim:
        flags = replace(flags, allow_changed_optimizer=True)
    return (*remarks, *changes_since(folder, config, kinds, more).told(flags))


def _data_changes(folder: CheckpointFolder, own: Fingerprint | None) -> tuple[list[str], tuple[str, ...]]:
    """Return how the training data differ from a checkpoint's, and remarks."""
    saved: Fingerprint | None = folder.manifest.state.get("data")
    if own is None:
        return [], ()
    if saved is None:
        return [], (f"{folder.path} does not say what data it was trained on, so the data were not compared",)
    with understood(folder.path):
        changes = differences(saved, own)
        if not changes and has_another_order(saved, own):
            order = (
                "this run takes the samples in another order (another length that needs more or fewer epochs, or "
                "another seed): some that the checkpoint's run has read will be read again before others are read at "
                "all"
            )
            return [], (order,)
    return changes, ()


def _load_tensors(
    runtime: TrainingRuntime, folder: CheckpointFolder, with_optimizer: bool, may_leave_out: bool = False
) -> None:
    """Fill masters (else weights) and, if asked for, moments; parameters and masters agree afterwards. The moments of
    parameters that were frozen when the checkpoint was saved become zero, and so does the last change
    (--delay-error-feedback) if the checkpoint has none; if this run has none, that of the checkpoint is left out.

    may_leave_out: the checkpoint may hold parameters that the model lacks. Raises CheckpointError on all ranks.
    """
    runtime.stores.finish_weights()
    world = runtime.groups.world
    if not with_optimizer and not folder.manifest.holds("master"):
        weights = [box for _, box in runtime.held_weights()]
        check_all_asked_for(folder, {box.name for box in weights}, {"weights"}, may_leave_out, world, runtime.device)
        load_tensors(folder, weights, world)
        runtime.optimizer.parameters_to_masters()
        return
    wanted = [held for held in runtime.optimizer.state() if with_optimizer or held.key == "master"]
    for held in wanted:
        if held.key != "master":
            padding_of(held.piece, held.values).zero_()  # vocabulary padding is not saved
    frozen = [box for _, box in runtime.held_weights("master", only_frozen=True)]
    saved = folder.manifest.tensors
    keys = {name.split("/")[0] for name in saved} if with_optimizer else {"master"}
    named = {f"{held.key}/{held.piece.spec.name}" for held in wanted} | {
        f"{key}/{box.name.removeprefix('master/')}" for box in frozen for key in keys
    }
    kept = {held.key for held in wanted}
    needed = keys if LAST_CHANGE in kept else keys - {LAST_CHANGE}
    check_all_asked_for(folder, named, needed, may_leave_out, world, runtime.device)
    had_moments = {name.partition("/")[2] for name in saved if not name.startswith("master/")}
    boxes = []
    for held in wanted:
        is_new = held.key == LAST_CHANGE and LAST_CHANGE not in keys
        if held.key == "master" or (held.piece.spec.name in had_moments and not is_new):
            boxes.append(tensor_box(held.key, held.piece, held.values))
        else:
            held.values.zero_()
    load_tensors(folder, (box for box in boxes if box is not None), world)
    load_tensors(folder, frozen, world, may_round=True)  # of the master weights that they had before
    runtime.optimizer.load_state(wanted)


def load_whole(runtime: TrainingRuntime, weights: Weights) -> None:
    """Fill masters and parameters from whole tensors; each rank reads those of which it holds a part.

    Raises CheckpointError if one cannot be read.
    """
    runtime.stores.finish_weights()
    held = [one for one in runtime.optimizer.state() if one.key == "master"]
    name, whole = "", torch.empty(0)
    for one in held:
        box = tensor_box(one.key, one.piece, one.values)
        if box is None:
            continue
        if box.name != name:  # the pieces of a parameter follow each other
            name, whole = box.name, weights[box.name].detach()
        box.values.copy_(whole[box.box.slices].reshape(-1))
    for _, box in runtime.held_weights("master", only_frozen=True):
        box.values.copy_(weights[box.name].detach()[box.box.slices].reshape(-1))
    runtime.optimizer.load_state(held)


def check_all_asked_for(
    folder: CheckpointFolder, named: set[str], keys: set[str], may_leave_out: bool, world: Group, device: torch.device
) -> None:
    """Raise CheckpointError on all ranks if some tensor of these keys is named by no rank. A collective."""
    held = sorted(name for name in folder.manifest.tensors if name.split("/")[0] in keys)
    asked = torch.tensor([name in named for name in held], dtype=torch.int64, device=device)
    if not held or may_leave_out:
        return
    all_reduce(asked, world, "max")
    left = [name for name, count in zip(held, asked.tolist(), strict=True) if not count]
    if left:
        shown = ", ".join(left[:4]) + (f" and {len(left) - 4} others" if len(left) > 4 else "")
        raise CheckpointError(
            f"{folder.path} holds {shown}, which this model does not have; give the model that was trained, or "
            "--allow-changed-model to leave them out"
        )


def go_back(
    runtime: TrainingRuntime,
    loader: Loader,
    journal: Journal,
    state: TrainingState,
    first_bad_step: int,
    why: str,
    disk: Disk | None = None,
) -> bool:
    """Load the --spike-rollback-th newest checkpoint from before first_bad_step, the oldest if there are fewer.

    A collective. `state` becomes that position, with the samples from there to now skipped; later checkpoints are kept
    in `abandoned-N`. The entry in rollbacks.json decides: a run that ends before it is written resumes from the spike,
    one that ends after it from the checkpoint before. Returns False, with nothing changed, if there is no such
    checkpoint. disk: through which rank 0 changes --save. Raises TrainingError at --spike-limit, DataError if too few
    samples are left, CheckpointError.
    """
    training, flags, world = runtime.plan.config.training, runtime.plan.config.checkpoint, runtime.groups.world
    assert flags.save is not None and training.spike_rollback is not None
    root, before = Path(flags.save), state.account
    if before.rollbacks >= training.spike_limit:
        raise TrainingError(
            f"step {state.step}: {why}; the run has gone back {before.rollbacks} times already "
            f"(--spike-limit {training.spike_limit}). Lower --lr, look at the data, or raise the limit"
        )
    resumed = _load_before(runtime, root, first_bad_step, training.spike_rollback, journal)
    if resumed is None:
        return False
    skipped = before.skipped
    first, past = skipped.index(resumed.consumed_samples), skipped.index(state.consumed_samples - 1) + 1
    samples = before.discarded_samples + state.consumed_samples - resumed.consumed_samples
    tokens = before.discarded_tokens + state.consumed_tokens - resumed.consumed_tokens
    account = resumed.account = Account(skipped.plus(first, past), before.rollbacks + 1, samples, tokens)
    rollback = Rollback(account.rollbacks, state.step, resumed.step, first, past, why, time.time(), account.to_dict())
    loader.skip(account.skipped, samples_to_take(runtime.plan, resumed))

    def commit() -> tuple[str, ...]:
        try:
            write_rollback(root, rollback, disk or Disk())
            return move_abandoned(root, disk)
        except OSError as error:
            raise CheckpointError(f"the rollback cannot be recorded in {root}: {error.strerror}") from None

    moved = on_rank_0(commit, world)
    state.become(resumed)
    journal.record("rollback", **asdict(rollback))
    skip = f"samples {first:,} to {past - 1:,} of the training data are skipped (rollback {rollback.number})"
    journal.say(f"step {rollback.from_step}: {why}. Back to step {rollback.to_step}; {skip}", *moved)
    return True


def _load_before(runtime: TrainingRuntime, root: Path, step: int, back: int, journal: Journal) -> TrainingState | None:
    """Load the `back`-th newest checkpoint from before a step, the oldest if there are fewer, or return None."""
    # what was allowed at the start of the run is not asked again
    flags = replace(runtime.plan.config.checkpoint, **LOAD_ALL, **ALLOW_ALL)
    steps = on_rank_0(lambda: [s for s in complete_steps(root) if s < step], runtime.groups.world)
    for candidate in reversed(steps[: max(1, len(steps) - back + 1)]):
        try:
            return load(runtime, root, replace(flags, ckpt_step=candidate)).state
        except DamageError as error:  # then an older one
            journal.say(f"passed over: {error}")
    if steps:
        raise CheckpointError(f"{root} holds no complete checkpoint from before step {step} to go back to")
    return None
