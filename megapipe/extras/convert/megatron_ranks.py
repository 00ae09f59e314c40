"""The tensors of Megatron's ranks -> whole tensors: names, layer numbers of chunks, slices of tp.

A rank's chunk holds `decoder.layers.N` numbered from 0; the chunks of one run follow each other as stages chunk x pp + pp_rank.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from megapipe.config.model import ModelConfig
from megapipe.errors import CheckpointError
from megapipe.extras.convert.snapshot import LazyTensor, unpadded
from megapipe.layers.embedding import WORD_EMBEDDING
from megapipe.layers.model import model_parameters
from megapipe.plan.resolve import resolve_model
from megapipe.sharding.spec import ParamSpec

# Transformer Engine keeps a norm's weights in the linear that follows it
FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}
NOT_WEIGHTS = ("_extra_state",)  # of Transformer Engine: fp8 scales, empty without
LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
HEAD = "output_layer.weight"
WEIGHTS = "weights"


def our_name(theirs: str) -> str:
    """Megatron's name of a parameter, whichever implementation wrote it, as we call it."""
    for fused, plain in FUSED_NORMS.items():
        theirs = theirs.replace(fused, plain)
    return theirs


@dataclass(frozen=True)
class Chunk:
    """One model chunk of one rank. tensors: by key ('weights', 'master', 'exp_avg', ...) and name as in the file, numbered locally."""

    path: Path
    tensors: Mapping[str, Mapping[str, Tensor]]

    def names(self) -> list[str]:
        return [name for name in self.tensors[WEIGHTS] if not name.endswith(NOT_WEIGHTS)]

    def num_layers(self) -> int:
        return len({match[1] for name in self.names() if (match := LAYER.fullmatch(name))})


@dataclass(frozen=True)
class Ranks:
    """chunks[stage][tp_rank], in stage order."""

    chunks: list[list[Chunk]]

    @property
    def tp(self) -> int:
        return len(self.chunks[0])

    def whole(self, model: ModelConfig, padded_vocab_size: int, keys: Mapping[str, str]) -> dict[str, LazyTensor]:
        """All tensors of the model, by our `key/parameter` names; every tensor of the files has a place. keys: ours -> those of the chunks.

        Raises CheckpointError naming the tensor that is missing, too much or of another shape.
        """
        padded = resolve_model(_with_rows(model, padded_vocab_size), self.tp)
        located = self._locate(padded.num_layers)
        true_shapes = {spec.name: spec.shape for spec in model_parameters(unpadded(model), sequence_parallel=False)}
        found: dict[str, LazyTensor] = {}
        for spec in model_parameters(padded, sequence_parallel=False):
            if spec.name not in located:
                raise CheckpointError(
                    f"{self.chunks[0][0].path.parent.parent} lacks the tensor {spec.name}, which its args ask for"
                )
            stage, name = located.pop(spec.name)
            for key, theirs in keys.items():
                parts = [self._part(chunk, theirs, name) for chunk in self.chunks[stage]]
                self._check_shapes(spec, stage, name, parts)
                read = partial(assemble, spec, tuple(parts), true_shapes[spec.name])
                found[f"{key}/{spec.name}"] = LazyTensor(true_shapes[spec.name], parts[0].dtype, read)
        self._check_left(located, model)
        return found

    def _locate(self, num_layers: int) -> dict[str, tuple[int, str]]:
        """Our name -> (stage, name in its chunk)."""
        located: dict[str, tuple[int, str]] = {}
        first = 0
        for stage, members in enumerate(self.chunks):
            for name in members[0].names():
                match = LAYER.fullmatch(name)
                whole = f"decoder.layers.{first + int(match[1])}.{match[2]}" if match else name
                ours = our_name(whole)
                if ours in located and ours != WORD_EMBEDDING:
                    raise CheckpointError(f"{members[0].path} and an earlier chunk both hold {ours}")
                located.setdefault(ours, (stage, name))
            first += members[0].num_layers()
        if first != num_layers:
            raise CheckpointError(
                f"{self.chunks[0][0].path.parent.parent} holds {first} layers, its args say num_layers {num_layers}"
            )
        return located

    def _part(self, chunk: Chunk, key: str, name: str) -> Tensor:
        tensor = chunk.tensors[key].get(name)
        if tensor is None:
            raise CheckpointError(f"{chunk.path} lacks {name} (its {key})")
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            raise CheckpointError(f"{chunk.path}: {name} (its {key}) is no tensor of floating-point numbers")
        return tensor

    def _check_shapes(self, spec: ParamSpec, stage: int, name: str, parts: list[Tensor]) -> None:
        for tp_rank, part in enumerate(parts):
            expected = spec.local_shape(tp_rank, self.tp)
            if tuple(part.shape) != expected:
                path = self.chunks[stage][tp_rank].path
                raise CheckpointError(f"{path}: {name} has shape {list(part.shape)}, its args ask for {list(expected)}")

    def _check_left(self, located: dict[str, tuple[int, str]], model: ModelConfig) -> None:
        """What no parameter of the model has taken: only the head's copy of a tied embedding, if it is one."""
        if not model.untie_embeddings_and_output_weights and HEAD in located:
            stage, name = located.pop(HEAD)
            for copy, first in zip(self.chunks[stage], self.chunks[0], strict=True):
                if not torch.equal(copy.tensors[WEIGHTS][name], first.tensors[WEIGHTS][WORD_EMBEDDING]):
                    raise CheckpointError(
                        f"{copy.path}: {name} differs from the word embedding, to which args say it is tied"
                    )
        if located:
            stage, name = next(iter(located.values()))
            more = f" (and {len(located) - 1} more)" if len(located) > 1 else ""
            raise CheckpointError(
                f"{self.chunks[stage][0].path}: the tensor {name}{more} has no place in the model that its args describe"
            )


def _with_rows(model: ModelConfig, padded_vocab_size: int) -> ModelConfig:
    return replace(model, padded_vocab_size=padded_vocab_size)


def assemble(spec: ParamSpec, parts: tuple[Tensor, ...], shape: tuple[int, ...]) -> Tensor:
    """A whole tensor from the slices of all tp ranks, without vocabulary padding: the first rows up to `shape`."""
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


def cut(spec: ParamSpec, whole: Tensor, tp_rank: int, tp: int) -> Tensor:
    """A tp rank's slice of a whole tensor, vocabulary padding put back as zeros."""
    if whole.shape[0] < spec.shape[0]:
        whole = torch.cat([whole, whole.new_zeros(spec.shape[0] - whole.shape[0], *whole.shape[1:])])
    dim = spec.slicing.dim or 0
    return torch.cat([whole.narrow(dim, i.start, i.stop - i.start) for i in spec.intervals(tp_rank, tp)], dim)
