"""Context parallelism: how the queries of a cp rank reach the keys and values of all of them.

    p2p         ring attention (Liu et al. 2023, arXiv:2310.01889): in step t a rank receives the keys and values of the
                rank t places before it, under the computation of the step before. The backward receives them again, and
                sends their gradients back in at least fp32. Steps that a window hides from every rank are left out
    all_gather  keys and values are gathered (Llama 3, arXiv:2407.21783); their gradients are reduced and scattered
    a2a         heads for positions (DeepSpeed-Ulysses, arXiv:2309.14509): each rank has 1/cp of the heads for the whole
                sequence during core attention. Key/value heads of which there are fewer are copied before, and their
                gradients summed
    a2a+p2p     a2a within groups of consecutive ranks, p2p between them

p2p and all_gather compute attention in blocks (`ring_attention`).

Shapes: as in `attention`, with s this rank's tokens. Values may have fewer channels than keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megapipe.comm.collectives import all_to_all
from megapipe.comm.groups import ContextGroups, Group
from megapipe.model.ring_attention import Ring
from megapipe.sharding.sequence import SequencePart


@dataclass(frozen=True, eq=False)
class ContextParallel:
    """How the attention of a layer reaches the keys of other cp ranks. gathers: over `ring`, in place of messages."""

    a2a: Group
    ring: Group
    gathers: bool

    @classmethod
    def of(cls, kind: str, groups: ContextGroups) -> ContextParallel:
        """Return the groups of a --cp-comm-type."""
        alone = Group.alone("cp")
        a2a, ring = {"a2a": (groups.cp, alone), "a2a+p2p": (groups.a2a, groups.p2p)}.get(kind, (alone, groups.cp))
        return cls(a2a, ring, kind == "all_gather")

    @property
    def part(self) -> SequencePart:
        """The part of every sequence for which the rank has queries during core attention."""
        return SequencePart(self.ring.rank, self.ring.size)

    def head_rank(self, tp_rank: int) -> int:
        """Return this rank's place among the ranks that compute core attention of other heads."""
        return tp_rank * self.a2a.size + self.a2a.rank

    def copies(self, groups: int) -> int:
        """Return how many ranks of a2a share a key/value head, of `groups` heads on a tp rank."""
        return max(1, self.a2a.size // groups)

    def heads_for_positions(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q, k and v of 1 / a2a of the heads at the positions of all ranks of a2a, in order."""
        if self.a2a.size == 1:
            return q, k, v
        groups, copies = q.shape[2], self.copies(q.shape[2])
        if copies > 1:
            q = q.unflatten(3, (copies, -1)).flatten(2, 3)
            k, v = (x.expand(-1, -1, -1, copies, -1).reshape(*x.shape[:2], groups * copies, 1, -1) for x in (k, v))
        parts = [x.flatten(3) for x in (q, k, v)]
        exchanged = _Exchange.apply(torch.cat(parts, dim=3), self.a2a, True)
        split = exchanged.split([part.shape[3] for part in parts], dim=3)
        q, k, v = (x.unflatten(3, (heads, -1)) for x, heads in zip(split, (q.shape[3], 1, 1), strict=True))
        return q, k, v

    def positions_for_heads(self, output: Tensor) -> Tensor:
        """Return attention's output of all heads at this rank's positions, [s, b, heads x d]."""
        return output if self.a2a.size == 1 else _Exchange.apply(output, self.a2a, False)

    @property
    def exchange(self) -> Ring:
        """How keys and values come from the other ranks of the ring."""
        return Ring(self.ring, self.gathers)


class _Exchange(Function):
    """Heads for positions: [s, b, g, ...] -> [s ranks, b, g / ranks, ...], or back; each is the other's backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, to_positions: bool) -> Tensor:
        ctx.arguments = group, to_positions
        return _to_positions(x, group) if to_positions else _to_heads(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        group, to_positions = ctx.arguments
        return (_to_heads if to_positions else _to_positions)(grad, group), None, None


def _to_positions(x: Tensor, group: Group) -> Tensor:
    ranks, (seq, batch, heads) = group.size, x.shape[:3]
    sent = x.reshape(seq, batch, ranks, heads // ranks, *x.shape[3:]).movedim(2, 0).contiguous()
    chunks = _all_to_all(sent, group).view(ranks, 2, seq // 2, batch, heads // ranks, *x.shape[3:])
    # each rank sends an earlier chunk and a later one; the later ones are in falling order
    return torch.cat([chunks[:, 0], chunks[:, 1].flip(0)]).view(ranks * seq, batch, heads // ranks, *x.shape[3:])


def _to_heads(x: Tensor, group: Group) -> Tensor:
    ranks, batch = group.size, x.shape[1]
    chunks = x.reshape(2, ranks, x.shape[0] // (2 * ranks), *x.shape[1:])
    sent = torch.stack([chunks[0], chunks[1].flip(0)], dim=1)
    received = _all_to_all(sent.view(ranks, -1, *x.shape[1:]), group).movedim(0, 2)  # [s, b, ranks, heads, ...]
    return received.reshape(received.shape[0], batch, ranks * x.shape[2], *x.shape[3:])


def _all_to_all(x: Tensor, group: Group) -> Tensor:
    """Exchange x [ranks, ...]: slice r goes to rank r."""
    received, rows = torch.empty_like(x), [1] * group.size
    all_to_all(received, x, rows, rows, group)
    return received
