"""The state of a run to a checkpoint and back: which tensors of `TrainingRuntime` are saved and loaded, and what the checkpoint flags mean.

What stands in the manifest's `state`:
    training    step, consumed samples and tokens, skipped steps
    optimizer   updates made, loss scaler, update rule; null with --no-save-optim
    random      the seed: all streams are keyed by (seed, step, ...), so that seed and step are the random state; null with --no-save-rng
    account     windows of the data set that are skipped, rollbacks, what they cost
    spikes      losses and norms that the watch for spikes compares with; null without --spike-rollback
    schedules   learning rates and weight decay as they were in force
    global_batch_size   sequences of a step, at the end of a ramp-up
    grid, precision   for people and `tools/inspect_checkpoint.py`
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megapipe.assembly.saved_weights import held_weights
from megapipe.assembly.training_runtime import TrainingRuntime
from megapipe.checkpoint.attempt import Extras, SaveReport
from megapipe.checkpoint.disk import Disk
from megapipe.checkpoint.folder import (
    CheckpointFolder,
    Retention,
    find_checkpoint,
    move_abandoned,
    prepare_root,
    step_of_folder,
)
from megapipe.checkpoint.load import load_tensors
from megapipe.checkpoint.rollbacks import Rollback, abandoned_by, account_of, read_rollbacks
from megapipe.checkpoint.save import save_checkpoint
from megapipe.checkpoint.tensor_box import TensorBox, padding_of, tensor_box
from megapipe.comm.collectives import all_reduce, broadcast_object
from megapipe.comm.groups import Group
from megapipe.config.checkpoint import CheckpointConfig
from megapipe.config.config import Config
from megapipe.errors import CheckpointError, DamageError
from megapipe.train.schedules import Schedules, schedules_to_resume
from megapipe.train.state import Account, TrainingState


@dataclass(frozen=True)
class Resumed:
    """What `load` found. path: of the checkpoint, None for a fresh start. schedules: that hold from here on, None without --lr.
    damaged: newer checkpoints that looked complete and were not."""

    state: TrainingState
    schedules: Schedules | None
    path: Path | None = None
    remarks: tuple[str, ...] = ()
    damaged: tuple[Path, ...] = ()


def prepare_save(
    root: Path, step: int, world: Group, damaged: Sequence[Path] = (), num_rollbacks: int = 0
) -> tuple[str, ...]:
    """Before a run that starts at `step` saves in root: cleans up after interrupted saves, sets aside those of the damaged checkpoints that
    lie there, and what rollbacks have given up, and says so. num_rollbacks: that the run has behind it.

    Raises CheckpointError on all ranks if root cannot be written to or holds complete checkpoints of later steps.
    """
    outcome: tuple[str, ...] | CheckpointError = ()
    if world.rank == 0:
        here = [path for path in damaged if path.parent.resolve() == root.resolve()]
        try:
            _check_way(root, step, num_rollbacks)
            outcome = (*move_abandoned(root), *prepare_root(root, step, [step_of_folder(path) for path in here]))
        except CheckpointError as error:
            outcome = error
    outcome = broadcast_object(outcome, world)
    if isinstance(outcome, CheckpointError):
        raise outcome
    return outcome


def _check_way(root: Path, step: int, num_rollbacks: int) -> None:
    """Raises CheckpointError for a run that goes on where one that saves in root has turned back."""
    rollback = abandoned_by(read_rollbacks(root), step, num_rollbacks)
    if rollback is not None:
        raise CheckpointError(
            f"this run goes on from step {step} of a way that was given up: --save {root} went back from step {rollback.from_step} to "
            f"{rollback.to_step}. To go on nevertheless give another --save"
        )


def save(
    runtime: TrainingRuntime,
    state: TrainingState,
    schedules: Schedules | None,
    root: Path,
    config_text: str,
    tokenizer: Mapping[str, bytes] | None = None,
    disk: Disk | None = None,
) -> SaveReport:
    """Save everything; called by all ranks after the same step. config_text: the resolved configuration as YAML.

    tokenizer: contents of its files by name, of which rank 0's are saved. Raises CheckpointError on all ranks.
    """
    boxes, content = what_to_save(runtime, state, schedules)
    extras = Extras(content, config_text, tokenizer or {})
    return save_checkpoint(root, state.step, boxes, extras, runtime.groups.world, retention(runtime.plan.config), disk)


def what_to_save(
    runtime: TrainingRuntime, state: TrainingState, schedules: Schedules | None
) -> tuple[Iterator[TensorBox], dict[str, Any]]:
    """The boxes of live tensors that this rank answers for, and the manifest's `state`; called by all ranks after the same step."""
    runtime.gather.finish()
    return boxes_to_save(runtime), _state_content(runtime, state, schedules)


def retention(config: Config) -> Retention:
    return Retention(config.checkpoint.keep_last, config.checkpoint.save_retain_interval)


def load(runtime: TrainingRuntime, root: Path, flags: CheckpointConfig | None = None) -> Resumed:
    """Load the newest complete checkpoint of root, or --ckpt-step, as the flags of the checkpoint section say; called by all ranks.

    A newest one that proves damaged as it is read is passed over for the one before. A root without any checkpoint is a fresh start, unless
    --exit-on-missing-checkpoint or --ckpt-step. The checkpoint may come from any grid. flags: instead of the configuration's. Raises
    CheckpointError on all ranks.
    """
    flags = flags or runtime.plan.config.checkpoint
    remarks: list[str] = []
    damaged: list[tuple[Path, int]] = []
    while True:
        below = damaged[-1][1] if damaged else None
        folder = _find(root, flags.ckpt_step, below, runtime.groups.world)
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
    own = None if config.optimizer.lr is None else Schedules.of(config)
    if folder is None:
        if flags.exit_on_missing_checkpoint:
            raise CheckpointError(f"--load {root} holds no checkpoint (--exit-on-missing-checkpoint)")
        return Resumed(TrainingState(), own, None, (f"{root} holds no checkpoint: starting from step 0",))
    saved = folder.manifest.state
    with_optimizer = not (flags.no_load_optim or flags.finetune)
    if not (flags.finetune or config.training.skip_train):
        _check_batch(runtime, saved, folder.path)
    if not (flags.finetune or flags.no_load_rng):
        _check_random(config, saved, folder.path)
    if with_optimizer:
        _check_optimizer(config, saved, folder.path)
        own = _schedules(config, own, saved, folder.path)
    _load_tensors(runtime, folder, with_optimizer)
    if with_optimizer:
        _load_plain_state(runtime, saved)
    state = TrainingState() if flags.finetune else _position(saved, read_rollbacks(root))
    return Resumed(state, own, folder.path, folder.remarks)


def _position(saved: dict[str, Any], rollbacks: Sequence[Rollback]) -> TrainingState:
    """A checkpoint's; with the account of the run's last rollback, if that came after the checkpoint."""
    account = Account.from_dict(account_of(saved, rollbacks))
    return TrainingState.from_dict(saved["training"], account, saved.get("spikes"))


def _state_content(runtime: TrainingRuntime, state: TrainingState, schedules: Schedules | None) -> dict[str, Any]:
    config, topology = runtime.plan.config, runtime.plan.topology
    optimizer: dict[str, Any] | None = None
    if not config.checkpoint.no_save_optim:
        optimizer = runtime.optimizer.plain_state() | {"rule": config.optimizer.optimizer}
        optimizer["num_steps"] = _largest(
            runtime, optimizer["num_steps"]
        )  # a rank whose shards are all padding counts no steps
    content = {
        "training": state.to_dict(),
        "account": state.account.to_dict(),
        "spikes": state.spikes,
        "optimizer": optimizer,
        "random": None if config.checkpoint.no_save_rng else {"seed": config.training.seed},
        "schedules": None if schedules is None else schedules.to_dict(),
        "global_batch_size": runtime.plan.batch.full,
        "precision": config.precision.dtype,
        "grid": {
            "tp": topology.tp,
            "cp": topology.cp,
            "pp": topology.pp,
            "dp": topology.dp,
            "chunks": runtime.plan.num_chunks,
        },
    }
    as_json: dict[str, Any] = json.loads(json.dumps(content))
    return as_json


def _largest(runtime: TrainingRuntime, value: int) -> int:
    tensor = torch.tensor([value], dtype=torch.int64, device=runtime.device)
    all_reduce(tensor, runtime.groups.world, "max")
    return int(tensor.item())


def boxes_to_save(runtime: TrainingRuntime) -> Iterator[TensorBox]:
    """What this rank answers for: masters and moments; without the optimizer masters alone, or weights where they are other memory."""
    with_optimizer = not runtime.plan.config.checkpoint.no_save_optim
    if with_optimizer or _masters_are_parameters(runtime):
        for held in runtime.optimizer.state():
            if held.primary and (with_optimizer or held.key == "master"):
                box = tensor_box(held.key, held.piece, held.values)
                if box is not None:
                    yield box
        return
    for is_primary, box in held_weights(runtime.buffers, runtime.groups):
        if is_primary:
            yield box


def _masters_are_parameters(runtime: TrainingRuntime) -> bool:
    """The same on all ranks, those without parameters included."""
    return runtime.parameter_dtype == runtime.main_dtype


def _find(root: Path, step: int | None, below: int | None, world: Group) -> CheckpointFolder | None:
    """Rank 0 looks; all ranks get the same answer."""
    outcome: CheckpointFolder | CheckpointError | None = None
    if world.rank == 0:
        try:
            outcome = find_checkpoint(root, step, below)
        except CheckpointError as error:
            outcome = error
    outcome = broadcast_object(outcome, world)
    if isinstance(outcome, CheckpointError):
        raise outcome
    return outcome


def _check_random(config: Config, saved: dict[str, Any], path: Path) -> None:
    if saved["random"] is None:
        raise CheckpointError(
            f"{path} holds no random state (--no-save-rng); give --no-load-rng to go on with --seed {config.training.seed}"
        )
    seed = saved["random"]["seed"]
    if seed != config.training.seed:
        raise CheckpointError(
            f"--seed {config.training.seed} differs from the seed {seed} of {path}: dropout and the order of the data would change; "
            f"give --seed {seed}, or --no-load-rng if that is wanted"
        )


def _check_batch(runtime: TrainingRuntime, saved: dict[str, Any], path: Path) -> None:
    """A batch that is made of the number of ranks must not change with it: a run may be started again on more or fewer."""
    batch, dp = runtime.plan.batch, runtime.plan.topology.dp
    before = saved.get("global_batch_size")
    if before is None or not batch.is_derived or before == batch.full:
        return
    raise CheckpointError(
        f"--global-batch-size is not given, and micro-batch-size x data-parallel size {dp} would make it {batch.full}, but {path} was "
        f"trained with {before}: give --global-batch-size {before} to go on with the same steps on any number of ranks, or "
        f"--global-batch-size {batch.full} if the change is wanted"
    )


def _check_optimizer(config: Config, saved: dict[str, Any], path: Path) -> None:
    way_out = "give --no-load-optim to go on with a fresh optimizer, or --finetune to start at step 0"
    if saved["optimizer"] is None:
        raise CheckpointError(f"{path} holds no optimizer state (--no-save-optim); {way_out}")
    rule = saved["optimizer"]["rule"]
    if rule != config.optimizer.optimizer:
        raise CheckpointError(
            f"{path} holds the state of --optimizer {rule}, this run uses {config.optimizer.optimizer}; {way_out}"
        )


def _schedules(config: Config, own: Schedules | None, saved: dict[str, Any], path: Path) -> Schedules | None:
    if own is None or saved["schedules"] is None:
        return own
    return schedules_to_resume(own, Schedules.from_dict(saved["schedules"]), config.optimizer, str(path))


def _load_tensors(runtime: TrainingRuntime, folder: CheckpointFolder, with_optimizer: bool) -> None:
    """Fill masters (else weights) and, if asked for, moments; parameters and masters agree afterwards."""
    runtime.gather.finish()
    world = runtime.groups.world
    if not with_optimizer and not folder.manifest.holds("master"):
        load_tensors(folder, (box for _, box in held_weights(runtime.buffers, runtime.groups)), world)
        runtime.optimizer.parameters_to_masters()
        return
    wanted = []
    for held in runtime.optimizer.state():
        if held.key != "master" and not with_optimizer:
            continue
        if held.key != "master":
            padding_of(held.piece, held.values).zero_()  # the vocabulary's: not saved
        box = tensor_box(held.key, held.piece, held.values)
        if box is not None:
            wanted.append(box)
    load_tensors(folder, wanted, world)
    runtime.optimizer.masters_to_parameters()


def _load_plain_state(runtime: TrainingRuntime, saved: dict[str, Any]) -> None:
    plain = dict(saved["optimizer"])
    if saved["precision"] != runtime.plan.config.precision.dtype:
        plain["loss_scaler"] = runtime.optimizer.plain_state()[
            "loss_scaler"
        ]  # another precision's scale means nothing here
    runtime.optimizer.load_plain_state(plain)
