"""Megatron's legacy `torch` checkpoints, iter_N/mp_rank_TT[_PPP]/model_optim_rng.pt.

Their weights are read from any tp, pp and virtual pp, and nothing is written: `megatron_dist` is. A rank's chunk
numbers its `decoder.layers.N` from 0; chunk c of pp_rank r is stage c x pp + r. Optimizer state, which has no names
there and is cut for its grid, is not read: Megatron itself converts it to `torch_dist`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megapipe.config.config import resolve_model
from megapipe.errors import CheckpointError
from megapipe.extras.convert import megatron
from megapipe.extras.convert.megatron import EXTRA_STATE, HEAD, TRY_WEIGHTS_ONLY, Member
from megapipe.extras.convert.megatron_args import MegatronGrid, read_config
from megapipe.extras.convert.pickled import load_pickled
from megapipe.extras.convert.snapshot import LazyTensor, Snapshot, check_nothing_left
from megapipe.extras.convert.tables import unpadded
from megapipe.layers.ends import WORD_EMBEDDING
from megapipe.sharding.spec import ExpertRows, ParamSpec
from megapipe.trace.parameters import model_parameters, model_states

MODEL_FILE = "model_optim_rng.pt"
RANK = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")
LAYER = re.compile(r"decoder\.layers\.(\d+)\.")

Located = Mapping[str, tuple[int, str]]  # our name of a tensor -> its stage, and its name in the chunks there


def is_legacy(root: Path) -> bool:
    """Return True if there is the folder of some rank."""
    return any(root.glob(f"mp_rank_*/{MODEL_FILE}")) or any(root.glob(f"*/mp_rank_*/{MODEL_FILE}"))


@dataclass(frozen=True)
class Chunk:
    """One model chunk of one rank."""

    path: Path
    weights: Mapping[str, Tensor]  # by name, as in the file

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return a tensor. Raises CheckpointError if it is missing or of another kind or shape."""
        tensor = self.weights.get(name)
        if tensor is None:
            raise CheckpointError(f"{self.path} lacks {name}")
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            raise CheckpointError(f"{self.path}: {name} is not a floating-point tensor")
        found = list(tensor.shape)
        if found != list(shape):
            raise CheckpointError(f"{self.path}: {name} has shape {found}, its args require {list(shape)}")
        return tensor

    @cached_property
    def expert_names(self) -> dict[str, list[str]]:
        """The names of its experts' tensors, in the order of the experts, by our name of all of them."""
        found: dict[str, dict[int, str]] = {}
        for name in self.weights:
            if (place := megatron.expert_tensor(name)) is not None:
                found.setdefault(place[0], {})[place[1]] = name
        return {ours: [numbered[number] for number in sorted(numbered)] for ours, numbered in found.items()}


def read(root: Path, step: int | None = None, vocab_size: int | None = None, weights_only: bool = False) -> Snapshot:
    """Read the weights of a Megatron model, without its vocabulary padding.

    weights_only: leave out the optimizer state; without it a checkpoint that holds any is refused. Raises ConfigError,
    CheckpointError naming a tensor that is missing, unexpected or of another shape.
    """
    folder = megatron.iteration_folder(root, step)
    stages, expert_stages, first = _load_stages(folder)
    if "optimizer" in first and not weights_only:
        raise CheckpointError(
            f"{folder} holds optimizer state in format `torch`, which is not converted; convert it in Megatron with "
            f"--ckpt-convert-format torch_dist --ckpt-convert-save DIR, or {TRY_WEIGHTS_ONLY}"
        )
    args = vars(first["args"])
    config = read_config(args, vocab_size)
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
        if spec.is_expert:
            tensors[f"master/{spec.name}"] = _of_experts(expert_stages[stage], spec, name)
            continue
        ranks = enumerate(stages[stage])
        parts = tuple(chunk.tensor(name, spec.local_shape(tp_rank, tp)) for tp_rank, chunk in ranks)
        reader = partial(megatron.joined, spec, parts, shape[0])
        tensors[f"master/{spec.name}"] = LazyTensor(shape, parts[0].dtype, reader)
    if not config.model.untie_embeddings_and_output_weights and HEAD in located:
        stage, name = located.pop(HEAD)
        for copy, original in zip(stages[stage], stages[0], strict=True):
            if not torch.equal(copy.weights[name], original.weights[WORD_EMBEDDING]):
                raise CheckpointError(f"{copy.path}: {name} differs from the word embedding, but args tie them")
    if located:
        stage, _ = next(iter(located.values()))
        names = [name for _, name in located.values()]
        check_nothing_left(stages[stage][0].path, names, "the model that its args describe")
    return megatron.run_snapshot(config, tensors, args, first, None)


def _as_stored(spec: ParamSpec, stages: Sequence[Sequence[Chunk]], located: Located, tp: int) -> ParamSpec:
    """Return a parameter as it is cut there: Megatron's own linears to latents are cut, Transformer Engine's not."""
    cut = megatron.with_cut_latents(spec)
    if cut is spec or spec.name not in located:
        return spec
    stage, name = located[spec.name]
    found = stages[stage][0].weights.get(name)
    return cut if isinstance(found, Tensor) and found.shape[:1] == (spec.shape[0] // tp,) else spec


def _of_experts(chunks: Sequence[Chunk], spec: ParamSpec, name: str) -> LazyTensor:
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
        parts.append([chunk.tensor(own, shape) for own in names])

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


def _load_stages(folder: Path) -> tuple[list[list[Chunk]], list[list[Chunk]], dict[Any, Any]]:
    """Return all chunks by stage and tp_rank, and by stage and the rank of ep x etp, which is ep_rank x etp + etp_rank;
    and the content of the first rank's file.
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
    for (pp_rank, tp_rank, ep_rank), path in sorted(files.items()):
        content = first if (pp_rank, tp_rank, ep_rank) == (0, 0, 0) else load_pickled(path)
        models = _models(path, content)
        for number, weights in enumerate(models[:num_chunks]):
            stage, chunk = number * pp + pp_rank, Chunk(path, weights)
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
    return stages, expert_stages, first


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
        weights = ranks[0].weights
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
