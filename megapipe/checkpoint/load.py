"""`load_tensors`: fill this rank's boxes from a checkpoint of any grid, reading and checking only what intersects them."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from megapipe.checkpoint.folder import CheckpointFolder
from megapipe.checkpoint.shard_file import DTYPES
from megapipe.checkpoint.shard_reader import ShardReader, Wanted
from megapipe.checkpoint.tensor_box import TensorBox
from megapipe.comm.collectives import gather_objects
from megapipe.comm.groups import Group
from megapipe.errors import CheckpointError, DamageError


def load_tensors(
    folder: CheckpointFolder, wanted: Iterable[TensorBox], group: Group, *, may_round: bool = False
) -> int:
    """Fill `values` of every wanted box; called by all ranks of the group, each with its own. Returns the bytes filled on this rank.

    dtypes may widen (fp32 into fp64, bf16 into fp32); they narrow only where may_round says so.
    Raises CheckpointError on every rank if any rank fails, naming tensor or file: a tensor that is not there, of another shape, of a
    wider dtype; DamageError where nothing but damaged or truncated files is wrong.
    """
    filled, failure = 0, None
    try:
        filled = _load(folder, list(wanted), may_round)
    except CheckpointError as error:
        failure = f"rank {group.global_rank}: {error}", isinstance(error, DamageError)
    failures = [other for other in gather_objects(failure, group) if other is not None]
    if failures:
        kind = DamageError if all(is_damage for _, is_damage in failures) else CheckpointError
        raise kind(failures[0][0] + (f" (and {len(failures) - 1} other ranks failed)" if len(failures) > 1 else ""))
    return filled


def _load(folder: CheckpointFolder, wanted: list[TensorBox], may_round: bool) -> int:
    by_name: dict[str, list[TensorBox]] = {}
    for target in wanted:
        by_name.setdefault(target.name, []).append(target)
    for name, targets in by_name.items():
        _check(folder, name, targets, may_round)
    with ShardReader(folder.path, folder.manifest.block_bytes) as reader:
        copied = reader.copy_all(_in_file_order(folder, by_name))
    for name, targets in by_name.items():
        missing = sum(target.box.num_elements for target in targets) - copied.get(name, 0)
        if missing:
            shape = folder.manifest.tensors[name].shape
            raise CheckpointError(
                f"{folder.path}: {name} of shape {list(shape)} ({math.prod(shape)} elements) lacks {missing}"
            )
    return sum(target.values.numel() * target.values.dtype.itemsize for target in wanted)


def _in_file_order(folder: CheckpointFolder, wanted: dict[str, list[TensorBox]]) -> list[Wanted]:
    found = []
    for name, targets in wanted.items():
        saved = folder.manifest.tensors[name]
        for box in saved.boxes:
            sharing = [target for target in targets if target.box.intersect(box.box)]
            if sharing:
                found.append(Wanted(name, saved.dtype, box, sharing))
    return sorted(found, key=lambda one: (one.saved.file, one.saved.start))


def _check(folder: CheckpointFolder, name: str, targets: list[TensorBox], may_round: bool) -> None:
    """Everything that can be known before bytes are read."""
    saved = folder.manifest.tensors.get(name)
    if saved is None:
        raise CheckpointError(f"{folder.path} holds no tensor {name}")
    for target in targets:
        if target.shape != saved.shape:
            raise CheckpointError(
                f"{folder.path}: {name} has shape {list(saved.shape)}, this model's has {list(target.shape)}"
            )
        if not may_round and torch.promote_types(DTYPES[saved.dtype], target.values.dtype) != target.values.dtype:
            raise CheckpointError(
                f"{folder.path}: {name} was saved as {DTYPES[saved.dtype]}, which {target.values.dtype} does not hold exactly".replace(
                    "torch.", ""
                )
            )
