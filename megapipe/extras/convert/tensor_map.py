"""Tables of tensor names: under which names, and in which layout, another format stores one of our tensors.

Each layout is a bijection: `split(join(parts)) == parts` and `join(split(whole)) == whole`. Our weights are [out, in],
biases [out].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megapipe.config.config import ResolvedModelConfig
from megapipe.config.model import ModelConfig
from megapipe.errors import ConfigError
from megapipe.layers.model import model_parameters
from megapipe.sharding.spec import ParamSpec

Shape = tuple[int, ...]


class Layout(Protocol):
    """One whole tensor of ours as one or more tensors ("parts") of theirs."""

    def shapes(self, whole: Shape) -> tuple[Shape, ...]:
        """Return the shapes of the parts of a tensor of shape `whole`."""
        ...

    def join(self, parts: Sequence[Tensor]) -> Tensor: ...

    def split(self, whole: Tensor) -> tuple[Tensor, ...]: ...


@dataclass(frozen=True)
class Same:
    """The same tensor under another name."""

    def shapes(self, whole: Shape) -> tuple[Shape, ...]:
        return (whole,)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        return parts[0]

    def split(self, whole: Tensor) -> tuple[Tensor, ...]:
        return (whole,)


@dataclass(frozen=True)
class Transposed:
    """Weights stored as [in, out] (GPT-2's Conv1D); biases are unchanged."""

    def shapes(self, whole: Shape) -> tuple[Shape, ...]:
        return (whole[::-1],)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        return parts[0].t()

    def split(self, whole: Tensor) -> tuple[Tensor, ...]:
        return (whole.t(),)


@dataclass(frozen=True)
class Stacked:
    """Equal parts concatenated along the rows, such as [gate; up]."""

    parts: int = 2

    def shapes(self, whole: Shape) -> tuple[Shape, ...]:
        return ((whole[0] // self.parts, *whole[1:]),) * self.parts

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.cat(tuple(parts))

    def split(self, whole: Tensor) -> tuple[Tensor, ...]:
        return whole.chunk(self.parts)


@dataclass(frozen=True)
class SeparateQKV:
    """Separate q, k and v with heads in order; our rows are [q_0 .. q_{n-1}, k, v] x head_dim for each query group."""

    heads: int
    groups: int
    head_dim: int

    def shapes(self, whole: Shape) -> tuple[Shape, ...]:
        keys = self.groups * self.head_dim, *whole[1:]
        return (self.heads * self.head_dim, *whole[1:]), keys, keys

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.cat([part.reshape(self.groups, -1, *part.shape[1:]) for part in parts], 1).flatten(0, 1)

    def split(self, whole: Tensor) -> tuple[Tensor, ...]:
        queries = self.heads // self.groups * self.head_dim
        grouped = whole.reshape(self.groups, queries + 2 * self.head_dim, *whole.shape[1:])
        return tuple(part.flatten(0, 1) for part in grouped.split((queries, self.head_dim, self.head_dim), 1))


@dataclass(frozen=True)
class FusedQKV:
    """GPT-2's c_attn: [q; k; v] over all heads in one tensor, transposed like all its weights."""

    separate: SeparateQKV

    def shapes(self, whole: Shape) -> tuple[Shape, ...]:
        return (whole[::-1],)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        whole = parts[0].t()
        sizes = [shape[0] for shape in self.separate.shapes(tuple(whole.shape))]
        return self.separate.join(whole.split(sizes))

    def split(self, whole: Tensor) -> tuple[Tensor, ...]:
        return (torch.cat(self.separate.split(whole)).t(),)


MakeLayout = Callable[[ModelConfig], Layout]


def same(model: ModelConfig) -> Layout:
    return Same()


def transposed(model: ModelConfig) -> Layout:
    return Transposed()


def gate_and_up(model: ModelConfig) -> Layout:
    return Stacked(2)


def separate_qkv(model: ModelConfig) -> SeparateQKV:
    return SeparateQKV(model.num_attention_heads, model.query_groups(), model.head_size())


def fused_qkv(model: ModelConfig) -> Layout:
    return FusedQKV(separate_qkv(model))


LAYER = "#"  # placeholder for the layer's number in our names and theirs


@dataclass(frozen=True)
class Row:
    """One row of a table: patterns of our name and of theirs."""

    ours: str
    theirs: tuple[str, ...]
    layout: MakeLayout = same


@dataclass(frozen=True)
class MappedTensor:
    """One of our parameters with its names and layout in the other format."""

    spec: ParamSpec
    theirs: tuple[str, ...]
    layout: Layout


def map_tensors(rows: Sequence[Row], model: ResolvedModelConfig, architecture: str) -> tuple[MappedTensor, ...]:
    """Return every parameter of a model (as `snapshot.unpadded` gives it), in model order.

    Raises ConfigError if the table has no row for a parameter.
    """
    by_ours = {row.ours: row for row in rows}
    mapped = []
    for spec in model_parameters(model, sequence_parallel=False):
        layer = str(spec.owner)
        pattern = spec.name.replace(f".{layer}.", f".{LAYER}.", 1) if isinstance(spec.owner, int) else spec.name
        row = by_ours.get(pattern)
        if row is None:
            raise ConfigError(f"{architecture} has no place for the tensor {spec.name} of shape {list(spec.shape)}")
        mapped.append(MappedTensor(spec, tuple(name.replace(LAYER, layer) for name in row.theirs), row.layout(model)))
    return tuple(mapped)


def _module(
    ours: str, theirs: str | Sequence[str], layout: MakeLayout = same, bias_layout: MakeLayout = same
) -> Iterator[Row]:
    """Yield rows for the weight and the bias of a module."""
    modules = (theirs,) if isinstance(theirs, str) else tuple(theirs)
    for kind, make in (("weight", layout), ("bias", bias_layout)):
        yield Row(f"{ours}.{kind}", tuple(f"{module}.{kind}" for module in modules), make)


OURS, LLAMA, GPT2 = f"decoder.layers.{LAYER}", f"model.layers.{LAYER}", f"transformer.h.{LAYER}"

LLAMA_ROWS = (
    Row("embedding.word_embeddings.weight", ("model.embed_tokens.weight",)),
    *_module(f"{OURS}.input_layernorm", f"{LLAMA}.input_layernorm"),
    *_module(
        f"{OURS}.self_attention.linear_qkv", [f"{LLAMA}.self_attn.{x}_proj" for x in "qkv"], separate_qkv, separate_qkv
    ),
    *_module(f"{OURS}.self_attention.q_layernorm", f"{LLAMA}.self_attn.q_norm"),
    *_module(f"{OURS}.self_attention.k_layernorm", f"{LLAMA}.self_attn.k_norm"),
    *_module(f"{OURS}.self_attention.linear_proj", f"{LLAMA}.self_attn.o_proj"),
    *_module(f"{OURS}.pre_mlp_layernorm", f"{LLAMA}.post_attention_layernorm"),
    *_module(f"{OURS}.mlp.linear_fc1", [f"{LLAMA}.mlp.gate_proj", f"{LLAMA}.mlp.up_proj"], gate_and_up, gate_and_up),
    *_module(f"{OURS}.mlp.linear_fc2", f"{LLAMA}.mlp.down_proj"),
    *_module("decoder.final_layernorm", "model.norm"),
    Row("output_layer.weight", ("lm_head.weight",)),
)

GPT2_ROWS = (
    Row("embedding.word_embeddings.weight", ("transformer.wte.weight",)),
    Row("embedding.position_embeddings.weight", ("transformer.wpe.weight",)),
    *_module(f"{OURS}.input_layernorm", f"{GPT2}.ln_1"),
    *_module(f"{OURS}.self_attention.linear_qkv", f"{GPT2}.attn.c_attn", fused_qkv, fused_qkv),
    *_module(f"{OURS}.self_attention.linear_proj", f"{GPT2}.attn.c_proj", transposed),
    *_module(f"{OURS}.pre_mlp_layernorm", f"{GPT2}.ln_2"),
    *_module(f"{OURS}.mlp.linear_fc1", f"{GPT2}.mlp.c_fc", transposed),
    *_module(f"{OURS}.mlp.linear_fc2", f"{GPT2}.mlp.c_proj", transposed),
    *_module("decoder.final_layernorm", "transformer.ln_f"),
    Row("output_layer.weight", ("lm_head.weight",)),
)
