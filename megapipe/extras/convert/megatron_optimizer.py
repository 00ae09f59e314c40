"""Optimizer state in Megatron's legacy files -> tensors by parameter.

Both kinds leave out names. A plain optimizer numbers parameters through its groups (with weight decay, without), each in model order; the
distributed one, written by data-parallel rank 0, lays them end to end in reverse model order, from multiples of 64 elements on. Masters
tell whether the order was understood: cast to the weights' dtype they are the weights, else the file is refused.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megapipe.errors import CheckpointError

MASTER, MOMENTS = "master", ("exp_avg", "exp_avg_sq")
ALIGNMENT = 64
EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"


@dataclass(frozen=True)
class OptimizerState:
    """tensors: per chunk by key and name; masters only where they are other memory than the weights. num_steps: updates made."""

    tensors: list[dict[str, dict[str, Tensor]]]
    num_steps: int
    scaler: Mapping[str, Any] | None


def read_plain(path: Path, optimizer: Mapping[str, Any], chunks: Sequence[Mapping[str, Tensor]]) -> OptimizerState:
    """FP32Optimizer or Float16OptimizerWithFloat16Params. chunks: weights by name, model order. Raises CheckpointError."""
    inner = optimizer.get("optimizer", optimizer)
    masters = optimizer.get("fp32_from_fp16_params")
    found: list[dict[str, dict[str, Tensor]]] = [{} for _ in chunks]
    steps = set()
    groups = inner["param_groups"]
    for number, (group, members) in enumerate(zip(groups, _members(path, groups, chunks), strict=True)):
        if masters is not None and len(masters[number]) != len(members):
            raise CheckpointError(
                f"{path}: group {number} of the optimizer has {len(masters[number])} masters for {len(members)} parameters"
            )
        for place, (index, (chunk, name)) in enumerate(zip(group["params"], members, strict=True)):
            state = inner["state"].get(index)
            if state is None or any(key not in state for key in MOMENTS):
                raise CheckpointError(
                    f"{path}: the optimizer has no {' and '.join(MOMENTS)} of {name}; only Adam's state can be converted"
                )
            tensors = {key: state[key] for key in MOMENTS}
            if masters is not None:
                tensors[MASTER] = masters[number][place]
            for key, tensor in tensors.items():
                found[chunk].setdefault(key, {})[name] = _fitting(path, name, key, tensor.detach(), chunks[chunk][name])
            steps.add(int(state.get("step", group.get("step", 0))))
    return OptimizerState(found, one_step(path, steps), optimizer.get("grad_scaler"))


def read_distributed(
    path: Path, optimizer: Mapping[str, Any], state: Mapping[Any, Any], chunks: Sequence[Mapping[str, Tensor]]
) -> OptimizerState:
    """The distributed optimizer's parameter state, one flat buffer a chunk. path: of that file. Raises CheckpointError."""
    if not state.get("buckets_coalesced"):
        raise CheckpointError(
            f"{path} keeps the distributed optimizer's state by buckets, as cut for its data-parallel size: the format is tied to that "
            "grid. Load and save it once with a Megatron from 2024 on, or convert with --weights-only"
        )
    found: list[dict[str, dict[str, Tensor]]] = []
    for number, weights in enumerate(chunks):
        buffers = state.get(number, {})
        if len(buffers) != 1:
            raise CheckpointError(
                f"{path}: chunk {number} has {len(buffers)} buffers of gradients; one dtype can be converted"
            )
        (buffer,) = buffers.values()
        found.append(_unflatten(path, buffer, weights))
    steps = {int(group["step"]) for group in optimizer["optimizer"]["param_groups"] if group.get("step") is not None}
    return OptimizerState(found, one_step(path, steps), optimizer.get("grad_scaler"))


def _members(
    path: Path, groups: Sequence[Mapping[str, Any]], chunks: Sequence[Mapping[str, Tensor]]
) -> Iterator[list[tuple[int, str]]]:
    """The (chunk, name) of each group's parameters in order."""
    left = [(chunk, name) for chunk, weights in enumerate(chunks) for name in weights]
    has_decoupled = any(group.get("is_decoupled_lr", False) for group in groups)
    for number, group in enumerate(groups):
        kind = bool(group.get("wd_mult", 1.0)), bool(group.get("is_decoupled_lr", False))
        members = [(chunk, name) for chunk, name in left if _kind(name, chunks[chunk][name], has_decoupled) == kind]
        if len(members) != len(group["params"]):
            raise CheckpointError(
                f"{path}: group {number} of the optimizer (wd_mult {group.get('wd_mult')}) has {len(group['params'])} parameters, of the "
                f"model {len(members)} belong there: the groups follow another rule than decay of matrices; convert with --weights-only"
            )
        left = [place for place in left if place not in members]
        yield members


def _kind(name: str, weight: Tensor, has_decoupled: bool) -> tuple[bool, bool]:
    """(takes weight decay, takes the decoupled learning rate): what a group is made by."""
    return weight.dim() > 1 and not name.endswith("bias"), has_decoupled and name in (EMBEDDING, HEAD)


def _unflatten(path: Path, buffer: Mapping[str, Any], weights: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    total = int(buffer["param"].numel())
    for starts in _orders(weights):
        ends = [start + weights[name].numel() for name, start in starts.items()]
        if not ends or max(ends) != total:
            continue
        words = {MASTER: "param"} | {key: key for key in MOMENTS}
        views = {ours: _views(buffer[theirs], weights, starts) for ours, theirs in words.items()}
        if all(torch.equal(master.to(weights[name].dtype), weights[name]) for name, master in views[MASTER].items()):
            return views
    raise CheckpointError(
        f"{path}: the flat buffer of {total} elements is not this model's parameters end to end: it depends on the buckets of the run "
        "that wrote it (their size, the data-parallel size): the format is tied to that grid; convert with --weights-only"
    )


def _views(buffer: Tensor, weights: Mapping[str, Tensor], starts: Mapping[str, int]) -> dict[str, Tensor]:
    return {
        name: buffer[start : start + weights[name].numel()].view(weights[name].shape) for name, start in starts.items()
    }


def _orders(weights: Mapping[str, Tensor]) -> Iterator[dict[str, int]]:
    """Where each parameter starts: in one bucket, with the tied embedding in a bucket of its own, and in buckets that no gap follows."""
    names = list(weights)[::-1]
    for apart in ((), (EMBEDDING, HEAD), tuple(names)):
        yield _starts(weights, names, apart)


def _starts(weights: Mapping[str, Tensor], names: Iterable[str], apart: tuple[str, ...]) -> dict[str, int]:
    starts: dict[str, int] = {}
    position, origin = 0, 0  # a new bucket is aligned as it is, and what padding ends the one before is not in the file
    for name in names:
        if name in apart:
            origin = position
        start = origin + math.ceil((position - origin) / ALIGNMENT) * ALIGNMENT
        starts[name] = start
        position = start + weights[name].numel()
        if name in apart:
            origin = position
    return starts


def _fitting(path: Path, name: str, key: str, tensor: Tensor, weight: Tensor) -> Tensor:
    if tensor.shape != weight.shape:
        raise CheckpointError(
            f"{path}: the optimizer's {key} of {name} has shape {list(tensor.shape)}, the weight {list(weight.shape)}"
        )
    if key == MASTER and not torch.equal(tensor.to(weight.dtype), weight):
        raise CheckpointError(
            f"{path}: the optimizer's master of {name} is not its weight: the order of its parameters is another one"
        )
    return tensor


def one_step(path: Path, steps: set[int]) -> int:
    """The number of updates, if all parameters have made the same. Raises CheckpointError."""
    if len(steps) != 1:
        raise CheckpointError(
            f"{path}: the optimizer's parameters have made different numbers of updates: {sorted(steps)}"
        )
    return steps.pop()
