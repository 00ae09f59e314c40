"""Optimizer state that Megatron's distributed optimizer stores by gradient buckets, `dp_reshardable` in `torch_dist`.

Each model-parallel rank (tp first, then pp) has a flat tensor for every bucket of every model chunk. A bucket holds
whole parameters in reverse model order, each from a multiple of 64 elements on. Names are not stored, but the sizes of
the buckets without their last padding are, so the layout follows from the model. Masters verify it: cast to the dtype
of the weights they must equal the weights.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megapipe.config.config import ResolvedModelConfig
from megapipe.errors import CheckpointError
from megapipe.extras.convert.megatron import FUSED_ORDER, LAYER_ORDER, MOMENTS, TRY_WEIGHTS_ONLY, joined, place_in_layer
from megapipe.extras.convert.pickled import StoredTensor, StoredValue
from megapipe.extras.convert.snapshot import LazyTensor
from megapipe.layers.embedding import WORD_EMBEDDING
from megapipe.layers.model import model_parameters
from megapipe.sharding.boxes import Box
from megapipe.sharding.spec import ParamSpec

GROUP = re.compile(
    r"optimizer\.distributed\.dp_group_idx_(\d+)\.gbuf_idx_(\d+)\.dtype_.*\.bucket_idx_(\d+)\."
    r"(param|exp_avg|exp_avg_sq)"
)
KEYS = {"master": "param", **dict(zip(MOMENTS, MOMENTS, strict=True))}  # ours -> theirs
ALIGNMENT = 64  # elements


class Place(NamedTuple):
    """The place of one tp rank's slice of a parameter."""

    bucket: int
    start: int  # elements
    num_elements: int


@dataclass(frozen=True)
class Stage:
    """The buckets of one model chunk on all tp ranks."""

    specs: tuple[ParamSpec, ...]  # of its parameters, in reverse model order; the layout is the same on all tp ranks
    places: Mapping[str, Place]  # by name
    buckets: Sequence[Mapping[tuple[int, str], StoredTensor]]  # of each tp rank, by bucket and kind of state


def state_by_parameter(
    folder: Path,
    model: ResolvedModelConfig,  # with Megatron's padded vocabulary
    args: Mapping[str, Any],
    stored: Mapping[str, StoredTensor],
    weights: Mapping[str, LazyTensor],  # by our names, without vocabulary padding where the result shall have none
) -> dict[str, LazyTensor]:
    """Return the masters and moments by `key/name`, unread. Raises CheckpointError if the buckets do not fit the model.

    Reading a master compares it with its weight, and raises CheckpointError if they differ.
    """
    tp, pp = (int(args.get(f"{name}_model_parallel_size") or 1) for name in ("tensor", "pipeline"))
    ranks: dict[tuple[int, int], dict[tuple[int, str], StoredTensor]] = {}  # by (model-parallel rank, chunk)
    for name, tensor in stored.items():
        if match := GROUP.fullmatch(name):
            ranks.setdefault((int(match[1]), int(match[2])), {})[int(match[3]), match[4]] = tensor
    num_chunks = 1 + max((chunk for _, chunk in ranks), default=-1)
    if len(ranks) != tp * pp * num_chunks:
        found = f"{len(ranks)} groups of gradient buffers, its args say tp {tp} and pp {pp}"
        raise CheckpointError(f"{folder} has {found}; {TRY_WEIGHTS_ONLY}")
    members = [
        [ranks[pp_rank * tp + tp_rank, chunk] for tp_rank in range(tp)]
        for chunk in range(num_chunks)
        for pp_rank in range(pp)
    ]
    is_fused = args.get("transformer_impl") != "local"
    orders = (FUSED_ORDER, LAYER_ORDER) if is_fused else (LAYER_ORDER, FUSED_ORDER)
    for order in orders:
        stages = _stages(model, order, members, tp)
        if stages is None:
            continue
        # the first stage last: its tied embedding also serves as the last stage's copy
        state = {name: tensor for stage in stages[::-1] for name, tensor in _tensors(folder, stage, weights, tp)}
        if all(_agrees(state[f"master/{name}"], weight) for name, weight in weights.items() if len(weight.shape) == 1):
            return state
    raise CheckpointError(
        f"{folder}: the buckets of the distributed optimizer are not the concatenation of this model's parameters; "
        f"save once with --dist-ckpt-optim-fully-reshardable, or {TRY_WEIGHTS_ONLY}"
    )


def _stages(
    model: ResolvedModelConfig,
    order: Sequence[str],
    members: Sequence[Sequence[Mapping[tuple[int, str], StoredTensor]]],
    tp: int,
) -> list[Stage] | None:
    """Cut the model into stages with as many layers as fill the buckets of each. None if no cut fills them."""
    specs = list(model_parameters(model, sequence_parallel=False))
    layers: list[list[ParamSpec]] = [[] for _ in range(model.num_layers)]
    for spec in specs:
        if isinstance(spec.owner, int):
            layers[spec.owner].append(spec)
    for layer in layers:
        layer.sort(key=partial(place_in_layer, order))
    stages, first = [], 0
    for number, ranks in enumerate(members):
        is_last = number == len(members) - 1
        start = [spec for spec in specs if spec.owner == "embedding"] if number == 0 else []
        end = [spec for spec in specs if spec.owner == "head"] if is_last else []
        if is_last and number > 0 and not model.untie_embeddings_and_output_weights:
            end.append(next(spec for spec in specs if spec.name == WORD_EMBEDDING))  # the last stage's copy
        sizes = [ranks[0][key].shape[0] for key in sorted(ranks[0]) if key[1] == KEYS["master"]]
        for stop in [len(layers)] if is_last else range(first, len(layers) + 1):
            own = [*start, *(spec for layer in layers[first:stop] for spec in layer), *end][::-1]
            places = lay_out([(spec.name, math.prod(spec.local_shape(0, tp))) for spec in own], sizes)
            if places is not None:
                stages.append(Stage(tuple(own), places, ranks))
                first = stop
                break
        else:
            return None
    return stages


def lay_out(parameters: Sequence[tuple[str, int]], sizes: Sequence[int]) -> dict[str, Place] | None:
    """Place parameters, of (name, elements), in buckets of the given sizes. None if they do not fill them exactly."""
    places, left = {}, list(parameters)
    for bucket, size in enumerate(sizes):
        end = 0
        while left and _aligned(end) + left[0][1] <= size:
            name, num_elements = left.pop(0)
            places[name] = Place(bucket, _aligned(end), num_elements)
            end = _aligned(end) + num_elements
        if size not in (end, _aligned(end)):  # aligned where the next parameter has a separate bucket
            return None
    return None if left else places


def _aligned(position: int) -> int:
    return -(-position // ALIGNMENT) * ALIGNMENT


def _tensors(
    folder: Path, stage: Stage, weights: Mapping[str, LazyTensor], tp: int
) -> Iterator[tuple[str, LazyTensor]]:
    for spec in stage.specs:
        for key, theirs in KEYS.items():
            place = stage.places[spec.name]
            flats = [buckets[place.bucket, theirs] for buckets in stage.buckets]
            check = weights[spec.name] if key == "master" else None
            shape = weights[spec.name].shape
            yield (
                f"{key}/{spec.name}",
                LazyTensor(shape, flats[0].dtype, partial(_read, folder, spec, place, flats, tp, shape[0], check)),
            )


def _read(
    folder: Path,
    spec: ParamSpec,
    place: Place,
    flats: Sequence[StoredTensor],
    tp: int,
    num_rows: int,
    weight: LazyTensor | None,
) -> Tensor:
    parts = [
        flat.read(Box((place.start,), (place.num_elements,))).view(spec.local_shape(rank, tp))
        for rank, flat in enumerate(flats)
    ]
    whole = joined(spec, parts, num_rows)
    if weight is not None and not torch.equal(whole.to(weight.dtype), weight.detach()):
        raise CheckpointError(
            f"{folder}: the optimizer's master of {spec.name} differs from the weight: the parameters are in an "
            f"unknown order; save once with --dist-ckpt-optim-fully-reshardable, or {TRY_WEIGHTS_ONLY}"
        )
    return whole


def _agrees(master: LazyTensor, weight: LazyTensor) -> bool:
    try:
        master.detach()
    except CheckpointError:
        return False
    return True


def content(others: Mapping[str, StoredValue], name: str) -> Any:
    """Return the object that the first model-parallel rank stored, or None."""
    value = others.get(f"optimizer.distributed.dp_group_idx_0.{name}/shard_0_1")
    return None if value is None else value.read()[0]
