"""Optimizer state in Megatron's legacy files -> tensors by parameter.

Neither kind of file stores names. A plain optimizer numbers parameters through its groups (with weight decay,
without), each in model order; the distributed optimizer, written by data-parallel rank 0, concatenates them in
reverse model order, each from a multiple of 64 elements on. Masters verify that the order was understood: cast to the
weights' dtype they must equal the weights, otherwise the file is rejected.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megapipe.errors import CheckpointError
from megapipe.extras.convert.megatron import HEAD, MASTER, MOMENTS, TRY_WEIGHTS_ONLY, OptimizerState
from megapipe.extras.convert.snapshot import one_step
from megapipe.layers.embedding import WORD_EMBEDDING

ALIGNMENT = 64  # elements

Weights = Mapping[str, Tensor]  # of one model chunk, by name in model order
ByKey = dict[str, dict[str, Tensor]]  # key -> name -> tensor


def read_plain(path: Path, optimizer: Mapping[str, Any], chunks: Sequence[Weights]) -> OptimizerState:
    """Read the state of FP32Optimizer or Float16OptimizerWithFloat16Params. Raises CheckpointError."""
    inner = optimizer.get("optimizer", optimizer)
    masters = optimizer.get("fp32_from_fp16_params")
    found: list[ByKey] = [{} for _ in chunks]
    steps = set()
    groups = inner["param_groups"]
    for number, (group, members) in enumerate(zip(groups, _members(path, groups, chunks), strict=True)):
        if masters is not None and len(masters[number]) != len(members):
            counts = f"{len(masters[number])} masters for {len(members)} parameters"
            raise CheckpointError(f"{path}: group {number} of the optimizer has {counts}")
        for place, (index, (chunk, name)) in enumerate(zip(group["params"], members, strict=True)):
            state, weight = inner["state"].get(index), chunks[chunk][name]
            if state is None or any(key not in state for key in MOMENTS):
                wanted = " and ".join(MOMENTS)
                raise CheckpointError(f"{path}: the optimizer has no {wanted} of {name}; only Adam's can be converted")
            tensors = {key: state[key].detach() for key in MOMENTS}
            if masters is not None:
                tensors[MASTER] = masters[number][place].detach()
            for key, tensor in tensors.items():
                if tensor.shape != weight.shape:
                    shapes = f"has shape {list(tensor.shape)}, the weight {list(weight.shape)}"
                    raise CheckpointError(f"{path}: the optimizer's {key} of {name} {shapes}")
                if key == MASTER and not torch.equal(tensor.to(weight.dtype), weight):
                    raise CheckpointError(
                        f"{path}: the optimizer's master of {name} differs from the weight: the parameters are in an "
                        "unknown order"
                    )
                found[chunk].setdefault(key, {})[name] = tensor
            steps.add(int(state.get("step", group.get("step", 0))))
    return OptimizerState(found, one_step(path, steps), optimizer.get("grad_scaler"))


def _members(
    path: Path, groups: Sequence[Mapping[str, Any]], chunks: Sequence[Weights]
) -> Iterator[list[tuple[int, str]]]:
    """Yield the (chunk, name) of each group's parameters in order.

    A group has one weight decay (only matrices decay) and one learning rate (embedding and head may have their own).
    """
    left = [(chunk, name) for chunk, weights in enumerate(chunks) for name in weights]
    has_decoupled = any(group.get("is_decoupled_lr", False) for group in groups)

    def kind(chunk: int, name: str) -> tuple[bool, bool]:
        decays = chunks[chunk][name].dim() > 1 and not name.endswith("bias")
        return decays, has_decoupled and name in (WORD_EMBEDDING, HEAD)

    for number, group in enumerate(groups):
        wanted = bool(group.get("wd_mult", 1.0)), bool(group.get("is_decoupled_lr", False))
        members = [(chunk, name) for chunk, name in left if kind(chunk, name) == wanted]
        if len(members) != len(group["params"]):
            raise CheckpointError(
                f"{path}: group {number} of the optimizer (wd_mult {group.get('wd_mult')}) has {len(group['params'])} "
                f"parameters, but {len(members)} of the model belong there: the groups do not follow the rule that "
                f"only matrices decay; {TRY_WEIGHTS_ONLY}"
            )
        left = [place for place in left if place not in members]
        yield members


def read_distributed(
    path: Path, optimizer: Mapping[str, Any], state: Mapping[Any, Any], chunks: Sequence[Weights]
) -> OptimizerState:
    """Read the distributed optimizer's parameter state, one flat buffer per chunk. Raises CheckpointError."""
    if not state.get("buckets_coalesced"):
        raise CheckpointError(
            f"{path} stores the distributed optimizer's state by buckets, as cut for its data-parallel size: it is "
            f"tied to that grid. Load and save it once with a Megatron from 2024 or later, or {TRY_WEIGHTS_ONLY}"
        )
    found: list[ByKey] = []
    for number, weights in enumerate(chunks):
        buffers = list(state.get(number, {}).values())
        if len(buffers) != 1:
            rule = "only one dtype can be converted"
            raise CheckpointError(f"{path}: chunk {number} has {len(buffers)} gradient buffers; {rule}")
        found.append(_unflatten(path, buffers[0], weights))
    steps = {int(group["step"]) for group in optimizer["optimizer"]["param_groups"] if group.get("step") is not None}
    return OptimizerState(found, one_step(path, steps), optimizer.get("grad_scaler"))


def _unflatten(path: Path, buffer: Mapping[str, Any], weights: Weights) -> ByKey:
    """Cut a flat buffer into parameters, by the bucket layout whose masters equal the weights."""
    total = int(buffer["param"].numel())
    names = list(weights)[::-1]
    # parameters in separate buckets: none, the tied embedding, or all (buckets without a gap after them)
    for separate in ((), (WORD_EMBEDDING, HEAD), tuple(names)):
        starts: dict[str, int] = {}
        # parameters are aligned relative to the start of their bucket; padding at its end is not in the file
        position, bucket_start = 0, 0
        for name in names:
            if name in separate:
                bucket_start = position
            starts[name] = bucket_start + -(-(position - bucket_start) // ALIGNMENT) * ALIGNMENT
            position = starts[name] + weights[name].numel()
            if name in separate:
                bucket_start = position
        if not names or position != total:
            continue
        found = {
            ours: {
                name: buffer[theirs][start : start + weights[name].numel()].view(weights[name].shape)
                for name, start in starts.items()
            }
            for ours, theirs in ((MASTER, "param"), *zip(MOMENTS, MOMENTS, strict=True))
        }
        if all(torch.equal(master.to(weights[name].dtype), weights[name]) for name, master in found[MASTER].items()):
            return found
    raise CheckpointError(
        f"{path}: the flat buffer of {total} elements is not the concatenation of this model's parameters: it depends "
        "on the buckets of the run that wrote it (their size, the data-parallel size), so the format is tied to that "
        f"grid; {TRY_WEIGHTS_ONLY}"
    )
