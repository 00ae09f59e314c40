"""`load_tensors`: fill this rank's boxes from a checkpoint of any grid, reading only what intersects them."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from megapipe.checkpoint.folder import CheckpointFolder
from megapipe.checkpoint.shard import DTYPES, ReadRequest, ShardReader
from megapipe.checkpoint.tensor_box import TensorBox
from megapipe.comm.collectives import gather_objects
from megapipe.comm.groups import Group
from megapipe.errors import CheckpointError, DamageError


def load_tensors(
    folder: CheckpointFolder, wanted: Iterable[TensorBox], group: Group, *, may_round: bool = False
) -> int:
    """Fill `values` of each box; called by all ranks of the group. Returns the bytes filled on this rank.

    may_round: allow narrower dtypes; widening (bf16 into fp32, fp32 into fp64) is always allowed. Raises
    CheckpointError on every rank if any rank fails, naming a tensor that is missing or has another shape or a wider
    dtype, or the file; DamageError if nothing but damaged or truncated files is wrong.
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
    requests = []
    for name, targets in by_name.items():
        _check(folder, name, targets, may_round)
        saved = folder.manifest.tensors[name]
        for box in saved.boxes:
            sharing = [target for target in targets if target.box.intersect(box.box)]
            if sharing:
                requests.append(ReadRequest(name, saved.dtype, box, sharing))
    requests.sort(key=lambda request: (request.saved.file, request.saved.start))  # sequential reads
    with ShardReader(folder.path, folder.manifest.block_bytes) as reader:
        copied = reader.copy_all(requests)
    for name, targets in by_name.items():
        missing = sum(target.box.num_elements for target in targets) - copied.get(name, 0)
        if missing:
            shape = folder.manifest.tensors[name].shape
            raise CheckpointError(
                f"{folder.path}: {name} of shape {list(shape)} ({math.prod(shape)} elements) lacks {missing}"
            )
    return sum(target.num_bytes for target in wanted)


def _check(folder: CheckpointFolder, name: str, targets: list[TensorBox], may_round: bool) -> None:
    """Check everything that can be checked before reading."""
    saved = folder.manifest.tensors.get(name)
    if saved is None:
        raise CheckpointError(f"{folder.path} holds no tensor {name}")
    for target in targets:
        if target.shape != saved.shape:
            raise CheckpointError(
                f"{folder.path}: {name} has shape {list(saved.shape)}, but this model's has {list(target.shape)}"
            )
        dtype, wanted = DTYPES[saved.dtype], target.values.dtype
        if not may_round and torch.promote_types(dtype, wanted) != wanted:
            message = f"{name} was saved as {dtype}, which {wanted} cannot represent exactly"
            raise CheckpointError(f"{folder.path}: {message.replace('torch.', '')}")
