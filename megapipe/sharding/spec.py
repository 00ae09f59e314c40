"""`ParamSpec`: shape, slicing, initial values and optimizer flags of one parameter of the model.

Tensor parallelism cuts one dimension by a rule that says which intervals tp_rank holds: joined in order, its tensor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from megapipe.errors import ConfigError


@dataclass(frozen=True)
class Interval:
    """Rows [start, stop) of the cut dimension of a global tensor, on all tp_ranks `replicas`; the first owns them."""

    start: int
    stop: int
    replicas: tuple[int, ...]


@dataclass(frozen=True)
class Replicated:
    """No slicing: every tp_rank holds the whole tensor, and there is no dimension that tp cuts."""

    dim: None = None

    def intervals(self, size: int, tp_rank: int, tp: int) -> tuple[Interval, ...]:
        return (Interval(0, size, tuple(range(tp))),)


@dataclass(frozen=True)
class Fused:
    """`parts` equal tensors stacked along `dim`, each cut evenly: rank r holds [gate_r; up_r] of SwiGLU.

    One part is the plain cut of a column- or row-parallel weight.
    """

    dim: int = 0
    parts: int = 1

    def intervals(self, size: int, tp_rank: int, tp: int) -> tuple[Interval, ...]:
        part = size // self.parts
        if part * self.parts != size or part % tp:
            parts = f"{self.parts} part(s) of {part} rows each"
            raise ConfigError(f"{parts} cannot be cut evenly over tensor parallel size {tp}")
        width = part // tp
        starts = (index * part + tp_rank * width for index in range(self.parts))
        return tuple(Interval(start, start + width, (tp_rank,)) for start in starts)


@dataclass(frozen=True)
class QueryGroups:
    """The fused q|k|v rows in Megatron's order, one block a query group: [q_0 .. q_{n-1}, k, v] x head_dim; gated, with
    the gates of the queries' outputs behind them: [q_0 .. q_{n-1}, gate_0 .. gate_{n-1}, k, v].

    With at least tp groups each rank holds groups / tp whole blocks. With fewer, tp / groups neighbours share a
    group: each holds its own query heads and gates and a replica of the group's k and v.
    """

    heads: int
    groups: int
    head_dim: int
    dim: int = 0
    is_gated: bool = False

    @property
    def heads_of_group(self) -> dict[str, int]:
        """The number of heads of each kind in the block of one group, in their order."""
        queries = self.heads // self.groups
        return {"query": queries, **({"gate": queries} if self.is_gated else {}), "key": 1, "value": 1}

    def intervals(self, size: int, tp_rank: int, tp: int) -> tuple[Interval, ...]:
        block = sum(self.heads_of_group.values()) * self.head_dim
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
        own, found, start = self.heads // tp * self.head_dim, list[Interval](), group * block
        for kind, count in self.heads_of_group.items():
            if kind in ("key", "value"):
                found.append(Interval(start, start + self.head_dim, replicas))
            else:
                found.append(Interval(start + member * own, start + (member + 1) * own, (tp_rank,)))
            start += count * self.head_dim
        return tuple(found)


@dataclass(frozen=True)
class HeadChannels:
    """Channels of `count` heads, head_dim each, cut like the heads; with fewer than tp, neighbours share one."""

    count: int
    head_dim: int
    dim: int = 0

    def intervals(self, size: int, tp_rank: int, tp: int) -> tuple[Interval, ...]:
        if self.count % tp and tp % self.count:
            raise ConfigError(
                f"{self.count} heads cannot be spread over tensor parallel size {tp}: one must divide the other"
            )
        sharing = max(1, tp // self.count)
        width, member = size * sharing // tp, tp_rank // sharing
        replicas = tuple(range(member * sharing, (member + 1) * sharing))
        return (Interval(member * width, (member + 1) * width, replicas),)


@dataclass(frozen=True)
class ExpertRows:
    """The stacked rows of `count` experts, cut over ep x etp ranks: rank ep_rank x etp + etp_rank holds count / ep
    experts, of each of the `parts` tensors stacked in an expert ([gate; up] of SwiGLU) 1 / etp of the rows.

    A whole tensor on one rank is the cut over one rank, whatever etp is.
    """

    count: int
    parts: int = 1
    etp: int = 1
    dim: int = 0

    def intervals(self, size: int, rank: int, ranks: int) -> tuple[Interval, ...]:
        etp = min(self.etp, ranks)
        ep, part = ranks // etp, size // (self.count * self.parts)
        if self.count % ep or part % etp:
            raise ConfigError(f"{self.count} experts of {part} rows cannot be cut over {ep} x {etp} ranks")
        (ep_rank, etp_rank), held, width = divmod(rank, etp), self.count // ep * self.parts, part // etp
        starts = ((ep_rank * held + index) * part + etp_rank * width for index in range(held))
        return tuple(Interval(start, start + width, (rank,)) for start in starts)


Slicing = Replicated | Fused | QueryGroups | HeadChannels | ExpertRows
Owner = int | Literal["embedding", "head"]


@dataclass(frozen=True)
class Init:
    """Initial values: 'normal' with standard deviation `std`, 'zeros' or 'ones'."""

    kind: Literal["normal", "zeros", "ones"]
    std: float = 0.0


@dataclass(frozen=True)
class ParamSpec:
    """One parameter of the model under its global (Megatron) name.

    shape: the global tensor, vocabulary padded. `slicing` says how tp cuts it. `owner` is the layer index that holds
    it, or 'embedding' (first stage) or 'head' (last stage). The ranks that cut a dense parameter are those of tp, the
    ranks that cut experts those of ep x etp: tp_rank and tp stand for either.
    """

    name: str
    shape: tuple[int, ...]
    owner: Owner
    slicing: Slicing = Replicated()
    init: Init = Init("zeros")
    weight_decay: bool = True  # none on 1-D tensors and biases
    partial_gradient: bool = False  # each tp replica computes a part of the gradient; they are summed over the replicas
    tied: bool = False  # also used by the stage with the head, which holds a copy unless it is on the same rank
    decoupled_lr: bool = False  # takes --decoupled-lr (embedding and head)
    true_rows: int | None = None  # rows of dim 0 without vocabulary padding, which is never saved
    # how the weights of a hidden layer's linear are stored, which --optimizer muon updates as whole matrices
    matrix: Literal["outputs x inputs", "inputs x outputs"] | None = None
    trainable: bool = True  # a frozen one (--freeze) has no gradient, no master weights and no moments

    def intervals(self, tp_rank: int, tp: int) -> tuple[Interval, ...]:
        """Return the rows of dimension `slicing.dim` (0 if replicated) in tp_rank's local tensor, in order."""
        return self.slicing.intervals(self.shape[self.slicing.dim or 0], tp_rank, tp)

    def local_shape(self, tp_rank: int, tp: int) -> tuple[int, ...]:
        """Return the shape of this rank's slice; it is the same on every tp_rank."""
        dim = self.slicing.dim or 0
        rows = sum(interval.stop - interval.start for interval in self.intervals(tp_rank, tp))
        return (*self.shape[:dim], rows, *self.shape[dim + 1 :])

    @property
    def is_expert(self) -> bool:
        """True if ep x etp cut the parameter in place of tp, so that other ranks are its replicas."""
        return isinstance(self.slicing, ExpertRows)

    @property
    def num_elements(self) -> int:
        """Elements of the global tensor, vocabulary padding included."""
        return math.prod(self.shape)

    def summed_over_replicas(self, tp_rank: int, tp: int) -> tuple[Interval, ...]:
        """Return the intervals whose gradient must be summed over their replicas before any use."""
        return tuple(i for i in self.intervals(tp_rank, tp) if len(i.replicas) > 1 and self.needs_replica_sum(i))

    def needs_replica_sum(self, interval: Interval) -> bool:
        """Return True if the replicas of this interval each hold only part of its gradient.

        Rows replicated by a cutting rule (shared k and v heads) always do: each replica sees only its own query heads.
        """
        return self.partial_gradient or self.slicing.dim is not None
