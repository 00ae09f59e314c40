"""Megatron's legacy `torch` checkpoints, iter_N/mp_rank_TT[_PPP]/model_optim_rng.pt, of any tp, pp and virtual pp.

A rank's chunk numbers its `decoder.layers.N` from 0; chunk c of pp_rank r is stage c x pp + r.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megapipe.config.model import ModelConfig
from megapipe.errors import CheckpointError
from megapipe.extras.convert.megatron_optimizer import (
    HEAD,
    MASTER,
    MOMENTS,
    TRY_WEIGHTS_ONLY,
    OptimizerState,
    read_distributed,
    read_plain,
)
from megapipe.extras.convert.megatron_settings import read_config, run_snapshot
from megapipe.extras.convert.pickled import load_pickled
from megapipe.extras.convert.snapshot import LazyTensor, Snapshot, check_nothing_left, unpadded
from megapipe.layers.embedding import WORD_EMBEDDING
from megapipe.layers.model import model_parameters
from megapipe.plan.resolve import resolve_model
from megapipe.sharding.spec import ParamSpec

TRACKER, MODEL_FILE, OPTIMIZER_FILE = "latest_checkpointed_iteration.txt", "model_optim_rng.pt", "distrib_optim.pt"
RANK = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(_\d{3,})?")
LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
# Transformer Engine stores a norm's weights in the linear layer that follows it
FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}
EXTRA_STATE = "_extra_state"  # Transformer Engine's fp8 scales, empty without fp8
WEIGHTS = "weights"


def iteration_folder(root: Path, step: int | None) -> Path:
    """Return the folder of an iteration: of `step`, else the one in the tracker file, else root. Raises
    CheckpointError.
    """
    if step is None and not (root / TRACKER).exists():
        return root
    if step is None:
        text = (root / TRACKER).read_text().strip()
        folder = root / ("release" if text == "release" else f"iter_{int(text):07d}")
    else:
        folder = root / f"iter_{step:07d}"
    if not folder.is_dir():
        raise CheckpointError(f"{root} has no {folder.name}")
    return folder


def looks_legacy(root: Path) -> bool:
    """Return True if there is the folder of some rank."""
    return any(root.glob(f"mp_rank_*/{MODEL_FILE}")) or any(root.glob(f"*/mp_rank_*/{MODEL_FILE}"))


def read(root: Path, step: int | None = None, vocab_size: int | None = None, weights_only: bool = False) -> Snapshot:
    """Read a Megatron run, with optimizer state if there is any, unless weights_only.

    Raises ConfigError, CheckpointError.
    """
    folders = _rank_folders(iteration_folder(root, step))
    contents = {place: load_pickled(path / MODEL_FILE) for place, path in folders.items()}
    first = contents[0, 0]
    if "args" not in first:
        raise CheckpointError(f"{folders[0, 0] / MODEL_FILE} holds no args, so the model is unknown")
    args = vars(first["args"])
    models = {place: _models(folders[place], content) for place, content in contents.items()}
    states: dict[tuple[int, int], OptimizerState] = {}
    if not weights_only and "optimizer" in first:
        states = {place: _optimizer(folders[place], content, models[place]) for place, content in contents.items()}
    stages = Stages(_stages(folders, models, states))
    keys = {MASTER: MASTER if MASTER in stages.chunks[0][0].tensors else WEIGHTS}
    keys |= {key: key for key in MOMENTS} if states else {}
    config = read_config(args, vocab_size)
    tensors = stages.tensors(config.model, int(args["padded_vocab_size"]), keys)
    return run_snapshot(config, tensors, args, first, states.get((0, 0)))


def _rank_folders(folder: Path) -> dict[tuple[int, int], Path]:
    """Return the folders by (pp_rank, tp_rank)."""
    found: dict[tuple[int, int], Path] = {}
    for path in folder.iterdir():
        match = RANK.fullmatch(path.name)
        if match and (path / MODEL_FILE).exists():
            if match[3]:
                raise CheckpointError(f"{path}: a mixture of experts (a third number in the name) cannot be expressed")
            found[int(match[2] or 0), int(match[1])] = path
    if (0, 0) not in found:
        raise CheckpointError(f"{folder} holds no mp_rank_00[_000]/{MODEL_FILE}")
    return found


def _models(path: Path, content: Mapping[str, Any]) -> list[dict[str, Tensor]]:
    """Return the weights of each chunk by name, in the model's order."""
    names = sorted((key for key in content if re.fullmatch(r"model\d+", str(key))), key=lambda name: int(name[5:]))
    models = [content["model"]] if "model" in content else [content[name] for name in names]
    if not models:
        raise CheckpointError(f"{path / MODEL_FILE} holds no model")
    if any("language_model" in model for model in models):
        raise CheckpointError(
            f"{path / MODEL_FILE} was written by a model older than Megatron-Core; load and save it with "
            "--use-mcore-models"
        )
    return [{name: tensor for name, tensor in model.items() if not name.endswith(EXTRA_STATE)} for model in models]


def _optimizer(path: Path, content: Mapping[str, Any], models: list[dict[str, Tensor]]) -> OptimizerState:
    optimizer = content.get("optimizer")
    if not isinstance(optimizer, dict):
        raise CheckpointError(
            f"{path / MODEL_FILE}: the optimizer is a chain of several, which cannot be converted; {TRY_WEIGHTS_ONLY}"
        )
    if (path / OPTIMIZER_FILE).exists():
        return read_distributed(path / OPTIMIZER_FILE, optimizer, load_pickled(path / OPTIMIZER_FILE), models)
    if "param_groups" not in optimizer and "state" not in optimizer.get("optimizer", {}):
        raise CheckpointError(
            f"{path} holds the groups of a distributed optimizer without its {OPTIMIZER_FILE}; {TRY_WEIGHTS_ONLY}"
        )
    return read_plain(path / MODEL_FILE, optimizer, models)


@dataclass(frozen=True)
class Chunk:
    """One model chunk of one rank.

    tensors: by key ('weights', 'master', 'exp_avg', ...) and name as in the file, with the chunk's own layer numbers.
    """

    path: Path
    tensors: Mapping[str, Mapping[str, Tensor]]

    def num_layers(self) -> int:
        return len({match[1] for name in self.tensors[WEIGHTS] if (match := LAYER.fullmatch(name))})


def _stages(
    folders: Mapping[tuple[int, int], Path],
    models: Mapping[tuple[int, int], list[dict[str, Tensor]]],
    states: Mapping[tuple[int, int], OptimizerState],
) -> list[list[Chunk]]:
    """Return the chunks of all ranks by stage and tp_rank."""
    tp, pp = 1 + max(tp for _, tp in folders), 1 + max(pp for pp, _ in folders)
    num_chunks = len(models[0, 0])
    stages: list[list[Chunk]] = [[] for _ in range(pp * num_chunks)]
    for place in sorted(folders):
        for number, weights in enumerate(models[place][:num_chunks]):
            tensors: dict[str, Mapping[str, Tensor]] = {WEIGHTS: weights}
            tensors |= states[place].tensors[number] if place in states else {}
            stages[number * pp + place[0]].append(Chunk(folders[place] / MODEL_FILE, tensors))
    if any(len(members) != tp for members in stages):
        counts = [len(members) for members in stages]
        raise CheckpointError(
            f"{folders[0, 0].parent} holds {counts} tensor-parallel ranks of its stages, expected {tp} of each"
        )
    return stages


@dataclass(frozen=True)
class Stages:
    """The chunks of a run: chunks[stage][tp_rank]."""

    chunks: list[list[Chunk]]

    def tensors(self, model: ModelConfig, padded_vocab_size: int, keys: Mapping[str, str]) -> dict[str, LazyTensor]:
        """Return all whole tensors of the model under our `key/parameter` names. keys: ours -> those of the chunks.

        Raises CheckpointError naming a tensor that is missing, unexpected or of another shape.
        """
        tp = len(self.chunks[0])
        padded = resolve_model(replace(model, padded_vocab_size=padded_vocab_size), tp)
        located = self._locate(padded.num_layers)
        shapes = {spec.name: spec.shape for spec in model_parameters(unpadded(model), sequence_parallel=False)}
        found: dict[str, LazyTensor] = {}
        for spec in model_parameters(padded, sequence_parallel=False):
            if spec.name not in located:
                raise CheckpointError(f"{self._folder} lacks the tensor {spec.name}, which its args require")
            stage, name = located.pop(spec.name)
            shape = shapes[spec.name]
            for key, theirs in keys.items():
                parts = tuple(_part(chunk, theirs, name) for chunk in self.chunks[stage])
                for tp_rank, part in enumerate(parts):
                    expected = spec.local_shape(tp_rank, tp)
                    if tuple(part.shape) != expected:
                        raise CheckpointError(
                            f"{self.chunks[stage][tp_rank].path}: {name} has shape {list(part.shape)}, "
                            f"its args require {list(expected)}"
                        )
                found[f"{key}/{spec.name}"] = LazyTensor(shape, parts[0].dtype, partial(assemble, spec, parts, shape))
        self._check_left(located, model)
        return found

    @property
    def _folder(self) -> Path:
        return self.chunks[0][0].path.parent.parent

    def _locate(self, num_layers: int) -> dict[str, tuple[int, str]]:
        """Return the stage, and the name in its chunks, of each tensor by our name."""
        located: dict[str, tuple[int, str]] = {}
        first = 0  # layers of the stages before
        for stage, members in enumerate(self.chunks):
            for name in members[0].tensors[WEIGHTS]:
                match = LAYER.fullmatch(name)
                ours = f"decoder.layers.{first + int(match[1])}.{match[2]}" if match else name
                for fused, plain in FUSED_NORMS.items():
                    ours = ours.replace(fused, plain)
                if ours in located and ours != WORD_EMBEDDING:
                    raise CheckpointError(f"{members[0].path} and an earlier chunk both hold {ours}")
                located.setdefault(ours, (stage, name))
            first += members[0].num_layers()
        if first != num_layers:
            raise CheckpointError(f"{self._folder} holds {first} layers, its args say num_layers {num_layers}")
        return located

    def _check_left(self, located: dict[str, tuple[int, str]], model: ModelConfig) -> None:
        """Check that the only tensor without a parameter is the head's copy of a tied embedding."""
        if not model.untie_embeddings_and_output_weights and HEAD in located:
            stage, name = located.pop(HEAD)
            for copy, first in zip(self.chunks[stage], self.chunks[0], strict=True):
                if not torch.equal(copy.tensors[WEIGHTS][name], first.tensors[WEIGHTS][WORD_EMBEDDING]):
                    raise CheckpointError(f"{copy.path}: {name} differs from the word embedding, but args tie them")
        if located:
            stage, _ = next(iter(located.values()))
            names = [name for _, name in located.values()]
            check_nothing_left(self.chunks[stage][0].path, names, "the model that its args describe")


def _part(chunk: Chunk, key: str, name: str) -> Tensor:
    tensor = chunk.tensors[key].get(name)
    if tensor is None:
        raise CheckpointError(f"{chunk.path} lacks {name} (its {key})")
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        raise CheckpointError(f"{chunk.path}: {name} (its {key}) is not a floating-point tensor")
    return tensor


def assemble(spec: ParamSpec, parts: tuple[Tensor, ...], shape: tuple[int, ...]) -> Tensor:
    """Return a whole tensor from the slices of all tp ranks, without vocabulary padding (rows beyond `shape`)."""
    whole = torch.empty(spec.shape, dtype=parts[0].dtype)
    dim = spec.slicing.dim or 0
    for tp_rank, part in enumerate(parts):
        position = 0
        for interval in spec.intervals(tp_rank, len(parts)):
            width = interval.stop - interval.start
            if interval.replicas[0] == tp_rank:
                whole.narrow(dim, interval.start, width).copy_(part.narrow(dim, position, width))
            position += width
    return whole[: shape[0]].clone() if shape != spec.shape else whole
