"""How one of our tensors lies in the tensors of another format. Each layout is a bijection: `split(join(parts)) == parts`, and back.

Weights are [out, in] here; a bias is [out].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from megapipe.config.model import ModelConfig

Shape = tuple[int, ...]


class Layout(Protocol):
    """One whole tensor of ours <-> the parts of theirs."""

    def shapes(self, whole: Shape) -> tuple[Shape, ...]:
        """Shapes of the parts of a whole tensor of this shape."""
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
    """Weights kept as [in, out] (GPT-2's Conv1D); a bias is the same."""

    def shapes(self, whole: Shape) -> tuple[Shape, ...]:
        return (whole[::-1],)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        return parts[0].t()

    def split(self, whole: Tensor) -> tuple[Tensor, ...]:
        return (whole.t(),)


@dataclass(frozen=True)
class Stacked:
    """Equal parts one under the other: [gate; up]."""

    parts: int = 2

    def shapes(self, whole: Shape) -> tuple[Shape, ...]:
        return ((whole[0] // self.parts, *whole[1:]),) * self.parts

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.cat(tuple(parts))

    def split(self, whole: Tensor) -> tuple[Tensor, ...]:
        return whole.chunk(self.parts)


@dataclass(frozen=True)
class SeparateQKV:
    """Our rows are per query group [q_0 .. q_{n-1}, k, v] x head_dim; theirs are q, k and v apart, heads in order."""

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

    apart: SeparateQKV

    def shapes(self, whole: Shape) -> tuple[Shape, ...]:
        return (whole[::-1],)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        whole = parts[0].t()
        sizes = [shape[0] for shape in self.apart.shapes(tuple(whole.shape))]
        return self.apart.join(whole.split(sizes))

    def split(self, whole: Tensor) -> tuple[Tensor, ...]:
        return (torch.cat(self.apart.split(whole)).t(),)


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
