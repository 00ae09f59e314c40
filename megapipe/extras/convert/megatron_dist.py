"""Megatron's `torch_dist` checkpoints: whole tensors, layers possibly stacked, norms under either of their names.

They are read in each form that Megatron writes, and written as Megatron-Core 0.19 does: layers stacked, norms under
Transformer Engine's names, args among the tensors, optimizer state by parameter (fully reshardable). `fsdp_dtensor`
checkpoints of Megatron-FSDP are read, too.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from megapipe.config.config import ResolvedModelConfig, resolve_model
from megapipe.config.layers import layer_configs
from megapipe.errors import CheckpointError
from megapipe.extras.convert import megatron
from megapipe.extras.convert.megatron import (
    COMMON,
    EXTRA_STATE,
    KEYS,
    MOMENTS,
    TRY_WEIGHTS_ONLY,
    MegatronRun,
    Member,
    OptimizerState,
    members,
)
from megapipe.extras.convert.megatron_args import FREQUENCY, MegatronGrid, read_run_config
from megapipe.extras.convert.pickled import METADATA, StoredTensor, StoredValue, load_pickled, read_folder
from megapipe.extras.convert.snapshot import EXPERT_BIAS, LazyTensor, Snapshot, check_nothing_left, one_step
from megapipe.extras.convert.tables import Settings, unpadded
from megapipe.layers.ends import WORD_EMBEDDING
from megapipe.sharding.boxes import Box
from megapipe.sharding.spec import ExpertRows, ParamSpec
from megapipe.trace.parameters import model_parameters, model_states

if TYPE_CHECKING:
    from megapipe.extras.convert.dcp_files import LazyStack


# --------------------------------------------------------------------------------- optimizer state by gradient buckets

# `dp_reshardable`: each model-parallel rank (tp first, then pp) has a flat tensor for every bucket of every model
# chunk. A bucket holds whole parameters in reverse model order, each from a multiple of 64 elements on. With several
# ranks of ep, experts have an optimizer of their own, whose ranks are etp first, then ep and pp, and buckets only of
# chunks with experts. Names are not stored, but the sizes of the buckets without their last padding are, so the
# layout follows from the model. Masters verify it: cast to the dtype of the weights they must equal the weights.
GROUP = re.compile(
    r"(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_(\d+)\.gbuf_idx_(\d+)\.dtype_.*\.bucket_idx_(\d+)\."
    r"(param|exp_avg|exp_avg_sq)"
)
GROUP_CONTENT = re.compile(
    r"(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_0\.(optimizer|grad_scaler)/shard_0_1"
)


class Place(NamedTuple):
    """The place of one tp rank's slice of a parameter."""

    bucket: int
    start: int  # elements
    num_elements: int


Buckets = Mapping[tuple[int, str], StoredTensor]  # of one chunk on one rank, by bucket and kind of state
Ranks = Mapping[tuple[int, int], Buckets]  # by (model-parallel rank, chunk)
Stored = Mapping[str, StoredTensor]  # by name, as in the files
Others = Mapping[str, StoredValue]
Name = TypeVar("Name")


@dataclass(frozen=True)
class Stage:
    """The buckets of one model chunk on all ranks of tp, or of ep x etp."""

    members: tuple[Member, ...]  # its parameters, in reverse model order; the layout is the same on all ranks
    places: Mapping[Member, Place]
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
        parameters = [(one, math.prod(one.local_shape(0, self.ranks(one.spec)))) for one in own]
        places = lay_out(parameters, sizes)
        return None if places is None else Stage(tuple(own), places, ranks)


def state_by_parameter(
    folder: Path,
    model: ResolvedModelConfig,  # with Megatron's padded vocabulary
    args: Settings,
    stored: Stored,
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
        with suppress(CheckpointError):  # a master that differs from its weight
            for name in (name for name, weight in weights.items() if len(weight.shape) == 1):
                state[f"master/{name}"].detach()
            return state
    raise CheckpointError(
        f"{folder}: the buckets of the distributed optimizer are not the concatenation of this model's parameters; "
        f"save once with --dist-ckpt-optim-fully-reshardable, or {TRY_WEIGHTS_ONLY}"
    )


def _stages(folder: Path, cut: Cut, found: Mapping[int, Ranks]) -> list[Stage] | None:
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
    folder: Path, cut: Cut, stages: list[Stage], experts: Mapping[tuple[int, int], Sequence[ParamSpec]], ranks: Ranks
) -> list[Stage] | None:
    """Return the stages, and those of the experts' optimizer. None if they do not fill its buckets.

    experts: by (chunk, pp_rank).
    """
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


def lay_out(parameters: Sequence[tuple[Name, int]], sizes: Sequence[int]) -> dict[Name, Place] | None:
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
            reader = partial(_read, folder, spec, stage, theirs, cut, shape[0], check)
            yield f"{key}/{spec.name}", LazyTensor(shape, dtype, reader)


def _read(
    folder: Path, spec: ParamSpec, stage: Stage, theirs: str, cut: Cut, num_rows: int, weight: LazyTensor | None
) -> Tensor:
    own = sorted((one for one in stage.members if one.spec is spec), key=lambda one: one.expert or 0)
    size = cut.ranks(spec)
    slices = []
    for rank, buckets in enumerate(stage.buckets[:size]):  # in one optimizer, ranks of tp beyond etp hold copies
        parts = []
        for one in own:
            place = stage.places[one]
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


def contents(others: Others) -> list[dict[str, Any]]:
    """Return the groups, and the loss scale if any, of each optimizer of a chain, from the first of its ranks."""
    chain: dict[int, dict[str, Any]] = {}
    for name, value in others.items():
        if match := GROUP_CONTENT.fullmatch(name):
            chain.setdefault(int(match[1] or 0), {})[match[2]] = value.read()[0]
    return [chain[number] for number in sorted(chain)]


# ------------------------------------------------------------------------------------------------------ the checkpoint

CHAINED = re.compile(r"^chained_\d+\.")
COMMON_VALUE = "common_state/shard_0_1"
OPTIMIZER = "optimizer.state."
MASTERS = ("fp32_param", "param")  # of a plain, of a distributed optimizer
FULLY_RESHARDABLE = "fully_reshardable"
RESHARDABLE = (FULLY_RESHARDABLE, "fully_sharded_model_space", None)
BACKEND, BACKEND_VERSION = "metadata.json", {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
CONTENT = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}  # of the state dict, by Megatron


# Megatron-FSDP's `fsdp_dtensor`: a tensor for each parameter, cut over dp. The two halves of a gated linear_fc1 and the
# experts of a layer have tensors of their own; settings and args are values beside them. Masters are the weights.
OF_FSDP = re.compile(r"(?:model|optimizer\.state)\.(?:module\.)+(.*?)(_[wv])?(?:\.(exp_avg|exp_avg_sq))?")
FSDP_STEP = re.compile(r"optimizer\.param_to_group_meta\..*\.step")
FSDP_ARGS, FSDP_SCHEDULER = "args", "opt_param_scheduler."


def is_distributed(root: Path) -> bool:
    """Return True for a folder of torch_dist, or one of its iterations."""
    return (root / METADATA).exists() or any(root.glob(f"*/{METADATA}"))


def read(
    root: Path,
    step: int | None = None,
    vocab_size: int | None = None,
    weights_only: bool = False,
    drop_padding: bool = False,
) -> Snapshot:
    """Read a Megatron run, with any optimizer state unless weights_only. Raises ConfigError, CheckpointError.

    A run with optimizer state keeps its vocabulary padding unless drop_padding.
    """
    folder = megatron.iteration_folder(root, step)
    stored, others = read_folder(folder)
    common = _common(folder, others)
    args = vars(common["args"])
    if FSDP_ARGS in others:
        stored = _of_fsdp(folder, stored, args, weights_only)
    has_buckets = any(GROUP.fullmatch(name) for name in stored)
    optimizer = None if weights_only else _optimizer(folder, common, stored, others, has_buckets)
    config, remarks = read_run_config(args, vocab_size, optimizer is not None and not drop_padding)
    # by names with Megatron's own norms; older versions name the optimizer of a chain
    plain = {megatron.renamed(CHAINED.sub("", name)): entry for name, entry in stored.items()}
    prefixes = {"master": ""}  # of their names, by our key
    if optimizer is not None and not has_buckets:
        masters = (f"{OPTIMIZER}{name}." for name in MASTERS)
        prefixes["master"] = next((prefix for prefix in masters if prefix + WORD_EMBEDDING in plain), "")
        prefixes |= {key: f"{OPTIMIZER}{key}." for key in MOMENTS}
    tensors: dict[str, LazyTensor] = {}
    used: set[str] = set()
    model = unpadded(config.model)
    states = model_states(model)  # stored as buffers, which optimizers do not have
    for spec in (*model_parameters(model, sequence_parallel=False), *states):
        name = megatron.stacked_name(spec.name)
        sources = {"master": ""} if spec in states else prefixes
        for key, prefix in (*sources.items(), (None, "")):  # the weights are there in any case
            entry, layer = plain.get(prefix + name), None
            if entry is None and isinstance(spec.owner, int):  # all layers in one stack
                layer = spec.owner
                entry = plain.get(prefix + name.replace(f"layers.{layer}.", "layers.", 1))
            if entry is None:
                raise CheckpointError(f"{folder} lacks the tensor {prefix}{name}, which its args require")
            used.add(entry.name)
            if key is not None:
                tensors[f"{key}/{spec.name}"] = _lazy(folder, entry, layer, spec)
    used |= {name for name in stored if GROUP.fullmatch(name)}
    skipped = () if optimizer is not None else ("optimizer.", "chained_")
    left = sorted(name for name in stored.keys() - used if not name.startswith(skipped) and EXTRA_STATE not in name)
    check_nothing_left(folder, left, "the model that its args describe")
    if optimizer is not None and has_buckets:
        whole = dataclasses.replace(config.model, padded_vocab_size=int(args["padded_vocab_size"]))
        buffers = {f"master/{state.name}": tensors[f"master/{state.name}"] for state in states}
        weights = {name.removeprefix("master/"): tensor for name, tensor in tensors.items() if name not in buffers}
        tensors = state_by_parameter(folder, resolve_model(whole, 1), args, stored, weights)
        tensors |= buffers
    return megatron.run_snapshot(config, tensors, args, common, optimizer, remarks)


def _common(folder: Path, others: Others) -> Settings:
    """Return everything but tensors: of `common.pt`, since Megatron-Core 0.19 a value among the tensors."""
    inside = others.get(COMMON_VALUE)
    common: Any
    if inside is None and FSDP_ARGS in others:
        place = f"{folder}: {FSDP_ARGS}"
        common = {name: others[name].read(with_stand_ins=True) for name in ("args", "iteration") if name in others}
        steps = {value.read() for name, value in others.items() if FSDP_STEP.fullmatch(name)}
        common["optimizer"] = {"param_groups": [{"step": step} for step in sorted(steps)]}
        rates = {name.removeprefix(FSDP_SCHEDULER): name for name in others if name.startswith(FSDP_SCHEDULER)}
        common["opt_param_scheduler"] = {name: others[stored].read() for name, stored in rates.items()}
    elif inside is None and not (folder / COMMON).exists():
        way_out = "save weights of other programs as a Hugging Face model and convert that"
        raise CheckpointError(f"{folder} holds no args of Megatron, so the model is unknown; {way_out}")
    elif inside is None:
        common, place = load_pickled(folder / COMMON), f"{folder / COMMON}"
    else:
        content, place = inside.read(with_stand_ins=True), f"{inside.path}: {COMMON_VALUE}"
        common = content[0] if isinstance(content, list) and content else None
    if not isinstance(common, Mapping) or not isinstance(common.get("args"), argparse.Namespace):
        raise CheckpointError(f"{place} holds no args, so the model is unknown")
    return common


def _of_fsdp(folder: Path, stored: Stored, args: Settings, weights_only: bool) -> dict[str, StoredTensor]:
    """Return the tensors of Megatron-FSDP as those of `torch_dist`: halves of gated linears joined, experts stacked.

    Raises CheckpointError for a run whose layers have no numbers of their own, or whose loss scale is not stored.
    """
    if (pp := MegatronGrid.of(args).pp) > 1:
        raise CheckpointError(f"{folder} is of pp {pp}, where fsdp_dtensor has the same names for layers of all stages")
    if args.get("fp16") and not args.get("loss_scale") and not weights_only:
        raise CheckpointError(f"{folder}: fsdp_dtensor does not store the loss scale of fp16; {TRY_WEIGHTS_ONLY}")
    parts: dict[str, dict[tuple[int | None, bool], StoredTensor]] = {}  # by expert, and if it is the second half
    for name, tensor in stored.items():
        match = OF_FSDP.fullmatch(name)
        is_known = match and (match[3] or name.startswith("model."))  # not the steps of other optimizers
        own, half, moment = match.groups() if match and is_known else (name, None, None)
        ours, expert = megatron.expert_tensor(own) or (own, None)
        prefix = f"{OPTIMIZER}{moment}." if moment else ""
        parts.setdefault(prefix + megatron.stacked_name(ours), {})[expert, half == "_v"] = tensor
    return {name: _joined(folder, name, own) for name, own in parts.items()}


def _joined(folder: Path, name: str, parts: Mapping[tuple[int | None, bool], StoredTensor]) -> StoredTensor:
    """Return one tensor, unread, of the halves of a gated linear, of the experts of a layer, or of both."""
    first = next(iter(parts.values()))
    if len(parts) == 1 and (None, False) in parts:
        return dataclasses.replace(first, name=name)
    rows, *others = first.shape
    boxes = []
    for (expert, is_second), tensor in parts.items():
        for box, value in tensor.boxes:
            offset = box.offset[0] + is_second * rows, *box.offset[1:]
            place = Box(offset, box.shape) if expert is None else Box((expert, *offset), (1, *box.shape))
            boxes.append((place, value))
    experts = len({expert for expert, _ in parts})
    shape = (rows * len(parts) // experts, *others)
    return StoredTensor(folder, name, shape if (None, False) in parts else (experts, *shape), first.dtype, tuple(boxes))


def _lazy(folder: Path, entry: StoredTensor, layer: int | None, spec: ParamSpec) -> LazyTensor:
    """Return one of our tensors, unread. layer: its place in a stack of all layers."""
    shape = found = entry.shape if layer is None else entry.shape[1:]
    slicing = spec.slicing
    wanted = megatron.stacked_shape(spec, spec.shape, slicing.count) if isinstance(slicing, ExpertRows) else spec.shape
    if spec.true_rows is not None:  # a vocabulary may have padding, which is dropped
        found = (min(wanted[0], shape[0]), *shape[1:])
    if found != wanted:
        raise CheckpointError(f"{folder}: {entry.name} has shape {list(shape)}, its args require {list(wanted)}")
    box = Box((0,) * len(wanted), wanted)
    if layer is not None:
        box = Box((layer, *box.offset), (1, *box.shape))

    def read() -> Tensor:
        values = entry.read(box).view(wanted)
        return megatron.from_stack(spec, values) if spec.is_expert else values

    return LazyTensor(spec.shape, entry.dtype, read)


def _optimizer(
    folder: Path, common: Settings, stored: Stored, others: Others, has_buckets: bool
) -> OptimizerState | None:
    """Return the optimizer's state, or None if the checkpoint has no optimizer state.

    With several ranks of ep it is a chain of two optimizers, of which the second has the experts' parameters. Raises
    CheckpointError for a kind of state that cannot be read.
    """
    names = [CHAINED.sub("", name) for name in (*stored, *others)]
    if not any(name.startswith("optimizer.") for name in names):
        return None
    if has_buckets:
        chain = contents(others)
    else:
        kind = (common.get("content_metadata") or {}).get("distrib_optim_sharding_type")
        if kind not in RESHARDABLE or not any(name.startswith(OPTIMIZER) for name in names):
            raise CheckpointError(
                f"{folder}: the distributed optimizer's state is stored as {kind or 'separate objects'}, which "
                "cannot be read; load it in Megatron and save once with --dist-ckpt-optim-fully-reshardable, or "
                f"{TRY_WEIGHTS_ONLY}"
            )
        content: Any = common.get("optimizer")
        is_chain = isinstance(content, Mapping) and 0 in content
        chain = [content[number] for number in sorted(content)] if is_chain else [content]
    ep = MegatronGrid.of(vars(common["args"])).ep
    if len(chain) > 1 + (ep > 1) or not all(isinstance(content, Mapping) and content for content in chain):
        raise CheckpointError(f"{folder}: a chain of {len(chain)} optimizers cannot be converted; {TRY_WEIGHTS_ONLY}")
    steps: set[int] = set()
    for content in chain:
        inner = content.get("optimizer", content)
        common_step = inner.get("state", {}).get("common_step")
        steps |= megatron.steps_of(inner["param_groups"]) if common_step is None else {int(common_step)}
    return OptimizerState(one_step(folder, steps), chain[0].get("grad_scaler"))


def write(
    snapshot: Snapshot,
    root: Path,
    grid: MegatronGrid,
    transformer_engine: bool = True,
    distributed_optimizer: bool = False,
) -> Path:
    """Write a run in a new directory atomically, to --load in Megatron with any tp and pp. Returns its folder.

    Its optimizer state is written if Megatron can continue it (`has_writable_optimizer`), for its distributed optimizer
    or for the plain one; else weights to --finetune. One tensor is in memory at a time.

    grid: recorded in the args; the vocabulary is padded for its tp, and with several ranks of ep experts have an
    optimizer of their own. Raises ConfigError for a model that Megatron's args cannot express, CheckpointError if root
    exists.
    """
    from megapipe.extras.convert.dcp_files import save_state_dict  # its import takes as long as all others together

    run = megatron.prepare(snapshot, grid, transformer_engine, distributed_optimizer)
    common = megatron.common_content(run) | {"content_metadata": dict(CONTENT)}
    sources: dict[str, Mapping[str, LazyTensor]] = {"": run.weights}  # by the prefix of their names
    if run.continues:
        kinds = dict(zip(MOMENTS, MOMENTS, strict=True))
        if distributed_optimizer:
            kinds["param"] = "master"
            common["content_metadata"] |= {
                "distrib_optim_sharding_type": FULLY_RESHARDABLE,
                "distrib_optim_fully_reshardable_mem_efficient": False,
            }
        elif snapshot.config.precision.dtype != "fp32":
            kinds["fp32_param"] = "master"
        chain = []  # the state of each optimizer other than tensors
        for of_experts in run.optimizers:
            inner: dict[str, Any] = {"param_groups": megatron.param_groups(snapshot, of_experts)}
            if distributed_optimizer:
                kind = {"param_state_sharding_type": FULLY_RESHARDABLE}
                chain.append(megatron.optimizer_content(snapshot, inner) | kind)
                continue
            steps = torch.tensor(float(snapshot.state["optimizer"]["num_steps"]))
            inner = {"state": {"common_step": steps}, **inner}
            is_fp32 = snapshot.config.precision.dtype == "fp32"
            chain.append(inner if is_fp32 else megatron.optimizer_content(snapshot, inner))
        common["optimizer"] = chain[0] if len(chain) == 1 else dict(enumerate(chain))
        for theirs, ours in kinds.items():
            sources[f"{OPTIMIZER}{theirs}."] = {
                name: run.snapshot.tensors[f"{ours}/{name}"].to(torch.float32)
                for name in run.weights
                if not name.endswith(EXPERT_BIAS)
            }
    content: dict[str, Any] = {COMMON_VALUE: [common], **_extra_states(run)}
    for prefix, tensors in sources.items():
        content |= {prefix + name: entry for name, entry in _stacked(run, tensors).items()}
    with megatron.new_iteration(root, snapshot.step) as (disk, folder):
        save_state_dict(content, folder)
        disk.write_file(folder / BACKEND, json.dumps(BACKEND_VERSION).encode())
    return root / folder.name


def _is_stacked(run: MegatronRun) -> bool:
    """Return True if Megatron stacks the tensors of all layers: unless a list says which have experts."""
    return not isinstance(run.args[FREQUENCY], list)


def _extra_states(run: MegatronRun) -> dict[str, Any]:
    """Return the extra states that Megatron asks for, empty as without fp8, by name and place among the layers."""
    layers, number, states = layer_configs(run.model), run.model.num_layers, dict[str, Any]()
    for layer, config in enumerate(layers):
        modules = megatron.extra_state_modules(config, run.transformer_engine)
        shards: dict[str, list[tuple[int, int]]] = {f"{module}.{EXTRA_STATE}": [] for module in modules}
        if config.num_experts is not None:
            numbers = [(expert, config.num_experts) for expert in range(config.num_experts)]
            shards |= {f"mlp.experts.experts.linear_fc{one}.{EXTRA_STATE}": numbers for one in (1, 2)}
        for module, places in shards.items():
            own = [(layer, number)] if _is_stacked(run) else []
            prefix = "decoder.layers." + ("" if own else f"{layer}.")
            for place in [[*own, one] for one in places] or [own or [(0, 1)]]:
                at, of = (".".join(str(pair[side]) for pair in place) for side in (0, 1))
                states[f"{prefix}{module}/shard_{at}_{of}"] = [None]
    return states | ({f"decoder.final_layernorm.{EXTRA_STATE}/shard_0_1": [None]} if run.transformer_engine else {})


def _stacked(run: MegatronRun, tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor | LazyStack]:
    """Return tensors by Megatron's names, those of layers stacked in the order of the layers unless layers differ.

    The model has a padded vocabulary, for which rows of zeros are added.
    """
    from megapipe.extras.convert.dcp_files import LazyStack

    model, layers = run.model, layer_configs(run.model)
    found: dict[str, LazyTensor] = {}
    stacks: dict[str, list[LazyTensor]] = {}
    for spec in (*model_parameters(model, sequence_parallel=False), *model_states(model)):
        if spec.name not in tensors:  # states are not among an optimizer's
            continue
        tensor, layer = tensors[spec.name], layers[spec.owner] if isinstance(spec.owner, int) else None
        name = megatron.stacked_name(megatron.their_name(spec.name, layer, run.transformer_engine))
        if isinstance(spec.slicing, ExpertRows):
            count = spec.slicing.count
            shape = megatron.stacked_shape(spec, spec.shape, count)
            tensor = tensor.map(partial(megatron.to_stack, spec, count=count), shape)
        if layer is not None and _is_stacked(run):
            stacks.setdefault(name.replace(f"layers.{spec.owner}.", "layers.", 1), []).append(tensor)
        elif layer is not None or tensor.shape == spec.shape:
            found[name] = tensor
        else:
            found[name] = tensor.map(partial(megatron.with_padding, num_rows=spec.shape[0]), spec.shape)
    return found | {name: LazyStack(rows) for name, rows in stacks.items()}
