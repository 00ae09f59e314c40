"""Megatron's legacy `torch` checkpoints, iter_N/mp_rank_TT[_PPP]/model_optim_rng.pt.

They are read from any tp, pp and virtual pp, and not written: `megatron_dist` is. A rank's chunk numbers its
`decoder.layers.N` from 0; chunk c of pp_rank r is stage c x pp + r.

Optimizer state has no names. A plain optimizer numbers parameters through its groups (with weight decay, without), each
in model order; the distributed optimizer, written by data-parallel rank 0, concatenates them in reverse model order,
each from a multiple of 64 elements on. Masters verify that the order was understood: cast to the weights' dtype they
must equal the weights, otherwise the file is rejected.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megapipe.config.config import resolve_model
from megapipe.errors import CheckpointError
from megapipe.extras.convert import megatron
from megapipe.extras.convert.megatron import (
    EXTRA_STATE,
    HEAD,
    KEYS,
    MOMENTS,
    TRY_WEIGHTS_ONLY,
    Member,
    OptimizerState,
)
from megapipe.extras.convert.megatron_args import MegatronGrid, read_run_config
from megapipe.extras.convert.pickled import load_pickled
from megapipe.extras.convert.snapshot import EXPERT_BIAS, LazyTensor, Snapshot, check_nothing_left, one_step
from megapipe.extras.convert.tables import Settings, unpadded
from megapipe.layers.ends import WORD_EMBEDDING
from megapipe.sharding.spec import ExpertRows, ParamSpec
from megapipe.trace.parameters import model_parameters, model_states

MODEL_FILE, OPTIMIZER_FILE = "model_optim_rng.pt", "distrib_optim.pt"
RANK = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")
LAYER = re.compile(r"decoder\.layers\.(\d+)\.")

Weights = Mapping[str, Tensor]  # of one model chunk, by name in model order
Located = Mapping[str, tuple[int, str]]  # our name of a tensor -> its stage, and its name in the chunks there


def is_legacy(root: Path) -> bool:
    """Return True if there is the folder of some rank."""
    return any(root.glob(f"mp_rank_*/{MODEL_FILE}")) or any(root.glob(f"*/mp_rank_*/{MODEL_FILE}"))


# ---------------------------------------------------------------------------------------------------- reading


@dataclass(frozen=True)
class Chunk:
    """One model chunk of one rank."""

    path: Path
    tensors: Mapping[str, Weights]  # by key ('weights', 'master', 'exp_avg', ...), then by name as in the file

    def tensor(self, key: str, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return a tensor. Raises CheckpointError if it is missing or of another kind or shape."""
        tensor = self.tensors[key].get(name)
        if tensor is None:
            raise CheckpointError(f"{self.path} lacks {name} (its {key})")
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            raise CheckpointError(f"{self.path}: {name} (its {key}) is not a floating-point tensor")
        found = list(tensor.shape)
        if found != list(shape):
            raise CheckpointError(f"{self.path}: {name} has shape {found}, its args require {list(shape)}")
        return tensor

    @cached_property
    def expert_names(self) -> dict[str, list[str]]:
        """The names of its experts' tensors, in the order of the experts, by our name of all of them."""
        found: dict[str, dict[int, str]] = {}
        for name in self.tensors["weights"]:
            if (place := megatron.expert_tensor(name)) is not None:
                found.setdefault(place[0], {})[place[1]] = name
        return {ours: [numbered[number] for number in sorted(numbered)] for ours, numbered in found.items()}


def read(
    root: Path,
    step: int | None = None,
    vocab_size: int | None = None,
    weights_only: bool = False,
    drop_padding: bool = False,
) -> Snapshot:
    """Read a Megatron run, with optimizer state if there is any, unless weights_only.

    A run with optimizer state keeps its vocabulary padding unless drop_padding.
    Raises ConfigError, CheckpointError naming a tensor that is missing, unexpected or of another shape.
    """
    folder = megatron.iteration_folder(root, step)
    stages, expert_stages, first, state = _load_stages(folder, weights_only)
    args = vars(first["args"])
    keys = {"master": "master" if "master" in stages[0][0].tensors else "weights"}  # ours -> those of the chunks
    keys |= {key: key for key in MOMENTS} if state is not None else {}
    config, remarks = read_run_config(args, vocab_size, state is not None and not drop_padding)
    tp, etp = len(stages[0]), MegatronGrid.of(args).etp
    padded = resolve_model(dataclasses.replace(config.model, padded_vocab_size=int(args["padded_vocab_size"])), tp)
    located = _locate(folder, stages, padded.num_layers)
    shapes = {spec.name: spec.shape for spec in model_parameters(unpadded(config.model), sequence_parallel=False)}
    states = model_states(padded)  # buffers, which optimizers do not have
    shapes |= {spec.name: spec.shape for spec in states}
    tensors: dict[str, LazyTensor] = {}
    specs = model_parameters(padded, sequence_parallel=False, etp=etp)
    for spec in (*(_as_stored(spec, stages, located, tp) for spec in specs), *states):
        if spec.name not in located:
            raise CheckpointError(f"{folder} lacks the tensor {spec.name}, which its args require")
        stage, name = located.pop(spec.name)
        shape = shapes[spec.name]
        for key, theirs in {"master": "weights"}.items() if spec in states else keys.items():
            if spec.is_expert:
                tensors[f"{key}/{spec.name}"] = _of_experts(expert_stages[stage], theirs, spec, name)
                continue
            ranks = enumerate(stages[stage])
            parts = tuple(chunk.tensor(theirs, name, spec.local_shape(tp_rank, tp)) for tp_rank, chunk in ranks)
            reader = partial(megatron.joined, spec, parts, shape[0])
            tensors[f"{key}/{spec.name}"] = LazyTensor(shape, parts[0].dtype, reader)
    if not config.model.untie_embeddings_and_output_weights and HEAD in located:
        stage, name = located.pop(HEAD)
        for copy, original in zip(stages[stage], stages[0], strict=True):
            if not torch.equal(copy.tensors["weights"][name], original.tensors["weights"][WORD_EMBEDDING]):
                raise CheckpointError(f"{copy.path}: {name} differs from the word embedding, but args tie them")
    if located:
        stage, _ = next(iter(located.values()))
        names = [name for _, name in located.values()]
        check_nothing_left(stages[stage][0].path, names, "the model that its args describe")
    return megatron.run_snapshot(config, tensors, args, first, state, remarks)


def _as_stored(spec: ParamSpec, stages: Sequence[Sequence[Chunk]], located: Located, tp: int) -> ParamSpec:
    """Return a parameter as it is cut there: Megatron's own linears to latents are cut, Transformer Engine's not."""
    cut = megatron.with_cut_latents(spec)
    if cut is spec or spec.name not in located:
        return spec
    stage, name = located[spec.name]
    found = stages[stage][0].tensors["weights"].get(name)
    return cut if isinstance(found, Tensor) and found.shape[:1] == (spec.shape[0] // tp,) else spec


def _of_experts(chunks: Sequence[Chunk], key: str, spec: ParamSpec, name: str) -> LazyTensor:
    """Return a tensor of all experts, unread. chunks: of each rank of ep x etp. name: ours, as in the chunks.

    Raises CheckpointError.
    """
    assert isinstance(spec.slicing, ExpertRows)
    wanted, parts = spec.slicing.count // (len(chunks) // spec.slicing.etp), list[list[Tensor]]()
    for rank, chunk in enumerate(chunks):
        names = chunk.expert_names.get(name, [])
        if len(names) != wanted:
            raise CheckpointError(f"{chunk.path} holds {len(names)} experts in {name}, its args require {wanted}")
        shape = Member(spec, 0).local_shape(rank, len(chunks))
        parts.append([chunk.tensor(key, own, shape) for own in names])

    def read() -> Tensor:
        slices = [megatron.local_slice(spec, own, rank) for rank, own in enumerate(parts)]
        return megatron.joined(spec, slices, spec.shape[0])

    return LazyTensor(spec.shape, parts[0][0].dtype, read)


def _find_ranks(folder: Path) -> tuple[dict[tuple[int, int, int], Path], dict[Any, Any]]:
    """Return the files of all ranks by (pp_rank, tp_rank, ep_rank), and the content of the first."""
    found = sorted((path.name, path / MODEL_FILE) for path in folder.iterdir() if (path / MODEL_FILE).exists())
    matches = {path: match for name, path in found if (match := RANK.fullmatch(name))}
    if not matches:
        raise CheckpointError(f"{folder} holds no mp_rank_00[_000[_000]]/{MODEL_FILE}")
    start = next(iter(matches))
    first = load_pickled(start)
    if "args" not in first:
        raise CheckpointError(f"{start} holds no args, so the model is unknown")
    grid = MegatronGrid.of(vars(first["args"]))
    # the numbers of pp_rank and ep_rank are only there if there are several of them
    has_experts_alone = grid.ep > 1 and grid.pp == 1
    files: dict[tuple[int, int, int], Path] = {}
    for path, match in matches.items():
        tp_rank, second, third = (int(number or 0) for number in match.groups())
        files[(0, tp_rank, second) if has_experts_alone else (second, tp_rank, third)] = path
    if (0, 0, 0) not in files:
        raise CheckpointError(f"{folder} lacks the file of its first rank, mp_rank_00[_000[_000]]/{MODEL_FILE}")
    return files, first


def _load_stages(
    folder: Path, weights_only: bool
) -> tuple[list[list[Chunk]], list[list[Chunk]], dict[Any, Any], OptimizerState | None]:
    """Return all chunks by stage and tp_rank, and by stage and the rank of ep x etp, which is ep_rank x etp + etp_rank;
    the content of the first rank's file, and its optimizer state if any.
    """
    files, first = _find_ranks(folder)
    tp, pp = 1 + max(tp for _, tp, _ in files), 1 + max(pp for pp, _, _ in files)
    grid = MegatronGrid.of(vars(first["args"]))
    ep, etp = grid.ep, grid.etp
    if tp % etp:
        raise CheckpointError(
            f"{folder}: expert_tensor_parallel_size {etp} does not divide tp {tp}, so the names of files do not say "
            "which slices of the experts they hold; save it as torch_dist"
        )
    num_chunks = len(_models(files[0, 0, 0], first))
    stages: list[list[Chunk]] = [[] for _ in range(pp * num_chunks)]
    of_experts: list[dict[int, Chunk]] = [{} for _ in stages]  # the ranks of tp that share a slice hold the same
    states: list[OptimizerState] = []
    for (pp_rank, tp_rank, ep_rank), path in sorted(files.items()):
        content = first if (pp_rank, tp_rank, ep_rank) == (0, 0, 0) else load_pickled(path)
        models = _models(path, content)
        if not weights_only and "optimizer" in first:
            states.append(_read_optimizer(path, content, models, ep))
        for number, weights in enumerate(models[:num_chunks]):
            optimized = states[-1].tensors[number] if states else {}
            stage, chunk = number * pp + pp_rank, Chunk(path, {"weights": weights, **optimized})
            if len(stages[stage]) == tp_rank:  # the ranks of ep hold the same but for experts
                stages[stage].append(chunk)
            of_experts[stage].setdefault(ep_rank * etp + tp_rank % etp, chunk)
    counts = [len(members) for members in stages]
    if any(count != tp for count in counts):
        raise CheckpointError(f"{folder} holds {counts} tensor-parallel ranks of its stages, expected {tp} of each")
    if any(sorted(members) != list(range(ep * etp)) for members in of_experts):
        lacks = [len(members) for members in of_experts]
        raise CheckpointError(
            f"{folder} holds {lacks} slices of the experts of its stages, expected {ep * etp} of each"
        )
    expert_stages = [[members[rank] for rank in sorted(members)] for members in of_experts]
    return stages, expert_stages, first, states[0] if states else None


def _models(path: Path, content: Mapping[str, Any]) -> list[dict[str, Tensor]]:
    """Return the weights of each chunk by name, in the model's order."""
    names = sorted((key for key in content if re.fullmatch(r"model\d+", str(key))), key=lambda name: int(name[5:]))
    models = [content["model"]] if "model" in content else [content[name] for name in names]
    if not models:
        raise CheckpointError(f"{path} holds no model")
    if any("language_model" in model for model in models):
        way_out = "load and save it with --use-mcore-models"
        raise CheckpointError(f"{path} was written by a model older than Megatron-Core; {way_out}")
    return [{name: tensor for name, tensor in model.items() if not name.endswith(EXTRA_STATE)} for model in models]


def _locate(folder: Path, stages: list[list[Chunk]], num_layers: int) -> dict[str, tuple[int, str]]:
    """Return the stage, and the name in its chunks, of each tensor by our name."""
    located: dict[str, tuple[int, str]] = {}
    first = 0  # layers of the stages before
    for stage, ranks in enumerate(stages):
        weights = ranks[0].tensors["weights"]
        for name in weights:
            expert = megatron.expert_tensor(name)
            local = name if expert is None else expert[0]
            ours = megatron.renamed(local, first)
            if ours in located and ours != WORD_EMBEDDING and located[ours] != (stage, local):
                raise CheckpointError(f"{ranks[0].path} and an earlier chunk both hold {ours}")
            located.setdefault(ours, (stage, local))
        first += len({match[1] for name in weights if (match := LAYER.match(name))})
    if first != num_layers:
        raise CheckpointError(f"{folder} holds {first} layers, its args say num_layers {num_layers}")
    return located


# -------------------------------------------------------------------------------------------- optimizer state


def _read_optimizer(path: Path, content: Mapping[str, Any], models: Sequence[Weights], ep: int) -> OptimizerState:
    """Read the state of one rank: with several ranks of ep a chain of two optimizers, of which the second has the
    experts' parameters.
    """
    optimizer, flat = content.get("optimizer"), path.with_name(OPTIMIZER_FILE)
    trained = [{name: t for name, t in model.items() if not name.endswith(EXPERT_BIAS)} for model in models]
    chain = optimizer if isinstance(optimizer, list) else [optimizer]
    kinds = [trained]
    if len(chain) == 2 and ep > 1:
        kinds = [
            [
                {name: t for name, t in model.items() if (megatron.expert_tensor(name) is not None) == kind}
                for model in trained
            ]
            for kind in (False, True)
        ]
    elif len(chain) != 1 or not isinstance(chain[0], dict):
        raise CheckpointError(f"{path}: a chain of {len(chain)} optimizers cannot be converted; {TRY_WEIGHTS_ONLY}")
    flats = None
    if flat.exists():
        flats = load_pickled(flat, len(kinds)) if len(kinds) > 1 else [load_pickled(flat)]
    states = []
    for number, (one, chunks) in enumerate(zip(chain, kinds, strict=True)):
        if flats is not None:
            if flats[number] is not None:  # a rank that is not the first of its copies lacks it
                states.append(read_distributed(flat, one, flats[number], chunks))
        elif "param_groups" not in one and "state" not in one.get("optimizer", {}):
            lacks = f"without its {OPTIMIZER_FILE}; {TRY_WEIGHTS_ONLY}"
            raise CheckpointError(f"{path.parent} holds the groups of a distributed optimizer {lacks}")
        elif any(chunks) or any(group["params"] for group in one.get("optimizer", one)["param_groups"]):
            states.append(read_plain(path, one, chunks))
    tensors: list[dict[str, dict[str, Tensor]]] = [{} for _ in models]
    for state in states:
        for found, more in zip(tensors, state.tensors, strict=True):
            for key, named in more.items():
                found.setdefault(key, {}).update(named)
    steps = {state.num_steps for state in states}
    return OptimizerState(tensors, one_step(path, steps or {0}), states[0].scaler if states else None)


def read_plain(path: Path, optimizer: Mapping[str, Any], chunks: Sequence[Weights]) -> OptimizerState:
    """Read the state of FP32Optimizer or Float16OptimizerWithFloat16Params. Raises CheckpointError."""
    inner = optimizer.get("optimizer", optimizer)
    masters = optimizer.get("fp32_from_fp16_params")
    found: list[dict[str, dict[str, Tensor]]] = [{} for _ in chunks]
    steps = set()
    groups = inner["param_groups"]
    for number, (group, own) in enumerate(zip(groups, _members(path, groups, chunks), strict=True)):
        if masters is not None and len(masters[number]) != len(own):
            counts = f"{len(masters[number])} masters for {len(own)} parameters"
            raise CheckpointError(f"{path}: group {number} of the optimizer has {counts}")
        for place, (index, (chunk, name)) in enumerate(zip(group["params"], own, strict=True)):
            state, weight = inner["state"].get(index), chunks[chunk][name]
            if state is None or any(key not in state for key in MOMENTS):
                wanted = " and ".join(MOMENTS)
                raise CheckpointError(f"{path}: the optimizer has no {wanted} of {name}; only Adam's can be converted")
            tensors = {key: state[key].detach() for key in MOMENTS}
            if masters is not None:
                tensors["master"] = masters[number][place].detach()
            for key, tensor in tensors.items():
                if tensor.shape != weight.shape:
                    shapes = f"has shape {list(tensor.shape)}, the weight {list(weight.shape)}"
                    raise CheckpointError(f"{path}: the optimizer's {key} of {name} {shapes}")
                found[chunk].setdefault(key, {})[name] = tensor
            if masters is not None and not torch.equal(tensors["master"].to(weight.dtype), weight):
                differs = f"master of {name} differs from the weight: the parameters are in an unknown order"
                raise CheckpointError(f"{path}: the optimizer's {differs}")
            steps.add(int(state.get("step", group.get("step", 0))))
    return OptimizerState(found, one_step(path, steps), optimizer.get("grad_scaler"))


def _members(path: Path, groups: Sequence[Settings], chunks: Sequence[Weights]) -> Iterator[list[tuple[int, str]]]:
    """Yield the (chunk, name) of each group's parameters in order.

    A group has one weight decay (only matrices decay) and one learning rate (embedding and head may have their own).
    """
    left = [(chunk, name) for chunk, weights in enumerate(chunks) for name in weights]
    has_decoupled = any(group.get("is_decoupled_lr", False) for group in groups)

    def kind(chunk: int, name: str) -> tuple[bool, bool]:
        decays = megatron.is_decayed(name, chunks[chunk][name].shape)
        return decays, has_decoupled and name in (WORD_EMBEDDING, HEAD)

    for number, group in enumerate(groups):
        wanted = bool(group.get("wd_mult", 1.0)), bool(group.get("is_decoupled_lr", False))
        own = [(chunk, name) for chunk, name in left if kind(chunk, name) == wanted]
        if len(own) != len(group["params"]):
            raise CheckpointError(
                f"{path}: group {number} of the optimizer (wd_mult {group.get('wd_mult')}) has {len(group['params'])} "
                f"parameters, but {len(own)} of the model belong there: the groups do not follow the rule that "
                f"only matrices decay; {TRY_WEIGHTS_ONLY}"
            )
        left = [place for place in left if place not in own]
        yield own


def read_distributed(
    path: Path, optimizer: Settings, state: Mapping[Any, Any], chunks: Sequence[Weights]
) -> OptimizerState:
    """Read the distributed optimizer's parameter state, one flat buffer per chunk. Raises CheckpointError."""
    if not state.get("buckets_coalesced"):
        raise CheckpointError(
            f"{path} stores the distributed optimizer's state by buckets, as cut for its data-parallel size: it is "
            f"tied to that grid. Load and save it once with a Megatron from 2024 or later, or {TRY_WEIGHTS_ONLY}"
        )
    found: list[dict[str, dict[str, Tensor]]] = []
    used = 0
    for number, weights in enumerate(chunks):
        if not weights:  # a chunk without experts has no buffer of theirs
            found.append({})
            continue
        buffers = list(state.get(used, {}).values())
        used += 1
        if len(buffers) != 1:
            rule = "only one dtype can be converted"
            raise CheckpointError(f"{path}: chunk {number} has {len(buffers)} gradient buffers; {rule}")
        found.append(_unflatten(path, buffers[0], weights))
    steps = megatron.steps_of(optimizer["optimizer"]["param_groups"])
    return OptimizerState(found, one_step(path, steps), optimizer.get("grad_scaler"))


def _unflatten(path: Path, buffer: Mapping[str, Any], weights: Weights) -> dict[str, dict[str, Tensor]]:
    """Cut a flat buffer into parameters by key and name, by the bucket layout whose masters equal the weights."""
    total = int(buffer["param"].numel())
    names = list(weights)[::-1]
    # parameters in separate buckets: none, the tied embedding, or all (buckets without a gap after them)
    for separate in ((), (WORD_EMBEDDING, HEAD), tuple(names)):
        starts: dict[str, int] = {}
        end = 0
        # parameters are aligned relative to the start of their bucket; padding at its end is not in the file
        bucket_of = {name: name if name in separate else None for name in names}
        for _, bucket in groupby(names, bucket_of.__getitem__):
            start = end
            for name in bucket:
                starts[name] = start + megatron.aligned(end - start)
                end = starts[name] + weights[name].numel()
        if not names or end != total:
            continue
        found = {
            ours: {
                name: buffer[theirs][start : start + weights[name].numel()].view(weights[name].shape)
                for name, start in starts.items()
            }
            for ours, theirs in KEYS.items()
        }
        if all(torch.equal(master.to(weights[name].dtype), weights[name]) for name, master in found["master"].items()):
            return found
    raise CheckpointError(
        f"{path}: the flat buffer of {total} elements is not the concatenation of this model's parameters: it depends "
        "on the buckets of the run that wrote it (their size, the data-parallel size), so the format is tied to that "
        f"grid; {TRY_WEIGHTS_ONLY}"
    )
