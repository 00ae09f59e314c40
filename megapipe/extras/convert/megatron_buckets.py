"""Optimizer state that Megatron's distributed optimizer stores by gradient buckets, `dp_reshardable` in `torch_dist`.

Each model-parallel rank (tp first, then pp) has a flat tensor for every bucket of every model chunk. A bucket holds
whole parameters in reverse model order, each from a multiple of 64 elements on. With several ranks of ep, experts have
an optimizer of their own, whose ranks are etp first, then ep and pp, and buckets only of chunks with experts. Names are
not stored, but the sizes of the buckets without their last padding are, so the layout follows from the model. Masters
verify it: cast to the dtype of the weights they must equal the weights.
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
from megapipe.extras.convert import megatron
from megapipe.extras.convert.megatron import KEYS, TRY_WEIGHTS_ONLY, Member, members
from megapipe.extras.convert.megatron_args import MegatronGrid
from megapipe.extras.convert.pickled import StoredTensor, StoredValue
from megapipe.extras.convert.snapshot import LazyTensor
from megapipe.layers.embedding import WORD_EMBEDDING
from megapipe.sharding.boxes import Box
from megapipe.sharding.spec import ParamSpec

GROUP = re.compile(
    r"(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_(\d+)\.gbuf_idx_(\d+)\.dtype_.*\.bucket_idx_(\d+)\."
    r"(param|exp_avg|exp_avg_sq)"
)
CONTENT = re.compile(r"(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_0\.(optimizer|grad_scaler)/shard_0_1")


class Place(NamedTuple):
    """The place of one tp rank's slice of a parameter."""

    bucket: int
    start: int  # elements
    num_elements: int


Buckets = Mapping[tuple[int, str], StoredTensor]  # of one chunk on one rank, by bucket and kind of state


@dataclass(frozen=True)
class Stage:
    """The buckets of one model chunk on all ranks of tp, or of ep x etp."""

    members: tuple[Member, ...]  # its parameters, in reverse model order; the layout is the same on all ranks
    places: Mapping[str, Place]  # by name
    buckets: Sequence[Buckets]  # of each rank


@dataclass(frozen=True)
class Cut:
    """How a run is cut, and the order in which it creates parameters."""

    model: ResolvedModelConfig  # with Megatron's padded vocabulary
    grid: MegatronGrid
    is_fused: bool  # by Transformer Engine
    is_grouped: bool  # its experts

    def ranks(self, spec: ParamSpec) -> int:
        """Return the number of ranks that cut a parameter."""
        return self.grid.ep * self.grid.etp if spec.is_expert else self.grid.tp

    def lay_out(self, specs: Sequence[ParamSpec], ranks: Sequence[Buckets]) -> Stage | None:
        """Place the parameters of a chunk in its buckets. None if they do not fill them."""
        own = members(specs, self.grid.ep, self.is_grouped)[::-1]
        sizes = [ranks[0][key].shape[0] for key in sorted(ranks[0]) if key[1] == KEYS["master"]]
        parameters = [(one.name(False), math.prod(one.local_shape(0, self.ranks(one.spec)))) for one in own]
        places = lay_out(parameters, sizes)
        return None if places is None else Stage(tuple(own), places, ranks)


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
    found: dict[int, dict[tuple[int, int], dict[tuple[int, str], StoredTensor]]] = {}
    for name, tensor in stored.items():
        if match := GROUP.fullmatch(name):  # by the place in a chain, then (model-parallel rank, chunk)
            ranks = found.setdefault(int(match[1] or 0), {})
            ranks.setdefault((int(match[2]), int(match[3])), {})[int(match[4]), match[5]] = tensor
    is_fused = args.get("transformer_impl") != "local"
    grid, is_grouped = MegatronGrid.of(args), bool(args.get("moe_grouped_gemm"))
    for cut in (Cut(model, grid, is_fused, is_grouped), Cut(model, grid, not is_fused, is_grouped)):
        stages = _stages(folder, cut, found)
        if stages is None:
            continue
        # the first stage last: its tied embedding also serves as the last stage's copy
        state = {name: tensor for stage in stages[::-1] for name, tensor in _tensors(folder, stage, weights, cut)}
        if all(_agrees(state[f"master/{name}"], weight) for name, weight in weights.items() if len(weight.shape) == 1):
            return state
    raise CheckpointError(
        f"{folder}: the buckets of the distributed optimizer are not the concatenation of this model's parameters; "
        f"save once with --dist-ckpt-optim-fully-reshardable, or {TRY_WEIGHTS_ONLY}"
    )


def _stages(folder: Path, cut: Cut, found: Mapping[int, Mapping[tuple[int, int], Buckets]]) -> list[Stage] | None:
    """Cut the model into stages with as many layers as fill the buckets of each. None if no cut fills them.

    found: the buckets by place in a chain of optimizers, then (model-parallel rank, chunk). Raises CheckpointError if
    some are missing.
    """
    model, grid, ranks = cut.model, cut.grid, found.get(0, {})
    specs = megatron.ordered_parameters(model, grid.etp, cut.is_fused)
    num_chunks = 1 + max((chunk for _, chunk in ranks), default=-1)
    if len(ranks) != grid.tp * grid.pp * num_chunks:
        groups = f"{len(ranks)} groups of gradient buffers, its args say tp {grid.tp} and pp {grid.pp}"
        raise CheckpointError(f"{folder} has {groups}; {TRY_WEIGHTS_ONLY}")
    is_chain = len(found) > 1
    places = [(chunk, pp_rank) for chunk in range(num_chunks) for pp_rank in range(grid.pp)]
    stages, experts, first = list[Stage](), list[list[ParamSpec]](), 0
    for number, (chunk, pp_rank) in enumerate(places):
        is_last = number == len(places) - 1
        start = [spec for spec in specs if spec.owner == "embedding"] if number == 0 else []
        end = [spec for spec in specs if spec.owner == "head"] if is_last else []
        if is_last and number > 0 and not model.untie_embeddings_and_output_weights:
            end.append(next(spec for spec in specs if spec.name == WORD_EMBEDDING))  # the last stage's copy
        members = [ranks[pp_rank * grid.tp + tp_rank, chunk] for tp_rank in range(grid.tp)]
        for stop in [model.num_layers] if is_last else range(first, model.num_layers + 1):
            own = [*start, *(spec for spec in specs if spec.owner in range(first, stop)), *end]
            dense = [spec for spec in own if not (is_chain and spec.is_expert)]
            if (stage := cut.lay_out(dense, members)) is not None:
                stages.append(stage)
                experts.append([spec for spec in own if spec.is_expert])
                first = stop
                break
        else:
            return None
    return _with_experts(folder, cut, stages, dict(zip(places, experts, strict=True)), found[1]) if is_chain else stages


def _with_experts(
    folder: Path,
    cut: Cut,
    stages: list[Stage],
    experts: Mapping[tuple[int, int], Sequence[ParamSpec]],  # by (chunk, pp_rank)
    ranks: Mapping[tuple[int, int], Buckets],
) -> list[Stage] | None:
    """Return the stages, and those of the experts' optimizer. None if they do not fill its buckets."""
    found, grid = list(stages), cut.grid
    size = grid.ep * grid.etp
    for pp_rank in range(grid.pp):
        chunks = [specs for (_, rank), specs in sorted(experts.items()) if rank == pp_rank and specs]
        for number, specs in enumerate(chunks):
            names = [(pp_rank * size + rank, number) for rank in range(size)]
            if any(name not in ranks for name in names):
                groups = f"{len(ranks)} groups of gradient buffers of experts"
                raise CheckpointError(
                    f"{folder} has {groups}, its args say ep {grid.ep} and etp {grid.etp}; {TRY_WEIGHTS_ONLY}"
                )
            stage = cut.lay_out(specs, [ranks[name] for name in names])
            if stage is None:
                return None
            found.append(stage)
    return found


def lay_out(parameters: Sequence[tuple[str, int]], sizes: Sequence[int]) -> dict[str, Place] | None:
    """Place parameters, of (name, elements), in buckets of the given sizes. None if they do not fill them exactly."""
    places, left = {}, list(parameters)
    for bucket, size in enumerate(sizes):
        end = 0
        while left and megatron.aligned(end) + left[0][1] <= size:
            name, num_elements = left.pop(0)
            places[name] = Place(bucket, megatron.aligned(end), num_elements)
            end = megatron.aligned(end) + num_elements
        if size not in (end, megatron.aligned(end)):  # aligned where the next parameter has a separate bucket
            return None
    return None if left else places


def _tensors(
    folder: Path, stage: Stage, weights: Mapping[str, LazyTensor], cut: Cut
) -> Iterator[tuple[str, LazyTensor]]:
    for spec in dict.fromkeys(one.spec for one in stage.members):
        for key, theirs in KEYS.items():
            check = weights[spec.name] if key == "master" else None
            shape, dtype = weights[spec.name].shape, next(iter(stage.buckets[0].values())).dtype
            yield (
                f"{key}/{spec.name}",
                LazyTensor(shape, dtype, partial(_read, folder, spec, stage, theirs, cut, shape[0], check)),
            )


def _read(
    folder: Path, spec: ParamSpec, stage: Stage, theirs: str, cut: Cut, num_rows: int, weight: LazyTensor | None
) -> Tensor:
    own = sorted((one for one in stage.members if one.spec is spec), key=lambda one: one.expert or 0)
    size = cut.ranks(spec)
    slices = []
    for rank, buckets in enumerate(stage.buckets[:size]):  # in one optimizer, ranks of tp beyond etp hold copies
        parts = []
        for one in own:
            place = stage.places[one.name(False)]
            flat = buckets[place.bucket, theirs].read(Box((place.start,), (place.num_elements,)))
            parts.append(flat.view(one.local_shape(rank, size)))
        slices.append(megatron.local_slice(spec, parts, rank) if spec.is_expert else parts[0])
    whole = megatron.joined(spec, slices, num_rows)
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


def contents(others: Mapping[str, StoredValue]) -> list[dict[str, Any]]:
    """Return the groups, and the loss scale if any, of each optimizer of a chain, from the first of its ranks."""
    chain: dict[int, dict[str, Any]] = {}
    for name, value in others.items():
        if match := CONTENT.fullmatch(name):
            chain.setdefault(int(match[1] or 0), {})[match[2]] = value.read()[0]
    return [chain[number] for number in sorted(chain)]
