"""How tensor parallelism cuts one dimension of a tensor: a rule says which intervals tp_rank holds.

The intervals of a rank, concatenated in order along the cut dimension, are its local tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from megapipe.errors import ConfigError


@dataclass(frozen=True)
class Interval:
    """Rows [start, stop) of the cut dimension of a global tensor, held by every tp_rank in `replicas`; the first of
    them owns them.
    """

    start: int
    stop: int
    replicas: tuple[int, ...]


class Slicing(Protocol):
    """A rule for cutting one dimension of `size` rows over tp ranks."""

    @property
    def dim(self) -> int | None: ...

    def intervals(self, size: int, tp_rank: int, tp: int) -> tuple[Interval, ...]: ...


@dataclass(frozen=True)
class Replicated:
    """No slicing: every tp_rank holds the whole tensor, and there is no dimension that tp cuts."""

    dim: None = None

    def intervals(self, size: int, tp_rank: int, tp: int) -> tuple[Interval, ...]:
        return (Interval(0, size, tuple(range(tp))),)


@dataclass(frozen=True)
class Fused:
    """`parts` equal tensors stacked along `dim`, each cut evenly: rank r holds [part0_r; part1_r; ...] ([gate_r;
    up_r] of SwiGLU).

    One part is the plain cut of a column- or row-parallel weight.
    """

    dim: int = 0
    parts: int = 1

    def intervals(self, size: int, tp_rank: int, tp: int) -> tuple[Interval, ...]:
        part = size // self.parts
        if part * self.parts != size or part % tp:
            raise ConfigError(
                f"{self.parts} part(s) of {part} rows each cannot be cut evenly over tensor parallel size {tp}"
            )
        width = part // tp
        starts = (index * part + tp_rank * width for index in range(self.parts))
        return tuple(Interval(start, start + width, (tp_rank,)) for start in starts)


@dataclass(frozen=True)
class QueryGroups:
    """The fused q|k|v rows in Megatron's order, one block a query group: [q_0 .. q_{n-1}, k, v] x head_dim.

    With at least tp groups each rank holds groups / tp whole blocks. With fewer, tp / groups neighbours share a
    group: each holds its own query heads and a replica of the group's k and v.
    """

    heads: int
    groups: int
    head_dim: int
    dim: int = 0

    def intervals(self, size: int, tp_rank: int, tp: int) -> tuple[Interval, ...]:
        block = (self.heads // self.groups + 2) * self.head_dim
        if self.groups % tp == 0:
            width = self.groups // tp * block
            return (Interval(tp_rank * width, (tp_rank + 1) * width, (tp_rank,)),)
        if tp % self.groups or self.heads % tp:
            raise ConfigError(
                f"{self.groups} query groups of {self.heads} heads cannot be spread over tensor parallel size {tp}: "
                "it must divide the groups, or be a multiple of them that divides the heads"
            )
        sharing = tp // self.groups
        group, member = divmod(tp_rank, sharing)
        replicas = tuple(range(group * sharing, (group + 1) * sharing))
        queries = self.heads // tp * self.head_dim
        query_start = group * block + member * queries
        keys = group * block + self.heads // self.groups * self.head_dim
        values = keys + self.head_dim
        return (
            Interval(query_start, query_start + queries, (tp_rank,)),
            Interval(keys, values, replicas),
            Interval(values, values + self.head_dim, replicas),
        )
