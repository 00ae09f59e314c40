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

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megapipe.comm.collectives import WithAdjoint, Work, all_gather, all_to_all, reduce_scatter, shift
from megapipe.comm.groups import ContextGroups, Group
from megapipe.model.partial_results import PartialSums, Passes
from megapipe.sharding.sequence import SequencePart
from megapipe.tensor_parallel.gemms import at_least_fp32

Widths = tuple[int, int]  # channels of a key and of a value


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
        to_positions, to_heads = self._exchanges
        exchanged = WithAdjoint.apply(torch.cat(parts, dim=3), to_positions, to_heads)
        split = exchanged.split([part.shape[3] for part in parts], dim=3)
        q, k, v = (x.unflatten(3, (heads, -1)) for x, heads in zip(split, (q.shape[3], 1, 1), strict=True))
        return q, k, v

    def positions_for_heads(self, output: Tensor) -> Tensor:
        """Return attention's output of all heads at this rank's positions, [s, b, heads x d]."""
        to_positions, to_heads = self._exchanges
        return output if self.a2a.size == 1 else WithAdjoint.apply(output, to_heads, to_positions)

    @property
    def _exchanges(self) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
        """Heads for positions: [s, b, g, ...] -> [s ranks, b, g / ranks, ...], and back."""
        return partial(_to_positions, group=self.a2a), partial(_to_heads, group=self.a2a)

    @property
    def exchange(self) -> Ring:
        """How keys and values come from the other ranks of the ring."""
        return Ring(self.ring, self.gathers)


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


@dataclass(frozen=True, eq=False)
class Ring:
    """The exchange of keys and values, [s, b, g, 1, channels of both]. gathers: all at once, in place of messages."""

    group: Group
    gathers: bool = False

    def keys(self, own: Tensor, sources: Sequence[int]) -> Iterator[tuple[int, Tensor]]:
        """Yield each source with its keys and values; those of the next one come while the caller computes.

        sources: ranks whose keys some rank needs, its own first.
        """
        if self.gathers and self.group.size > 1:
            everyone = own.new_empty(self.group.size, *own.shape)
            work = all_gather(everyone.view(-1, *own.shape[1:]), own, self.group, async_op=True)
            yield sources[0], own
            work.wait()
            for source in sources[1:]:
                yield source, everyone[source]
            return
        following = self._receive(own, sources[1:])
        yield sources[0], own
        for number, source in enumerate(sources[1:], 1):
            assert following is not None
            received, work = following
            work.wait()
            following = self._receive(own, sources[number + 1 :])
            yield source, received

    def _receive(self, own: Tensor, sources: Sequence[int]) -> tuple[Tensor, Work] | None:
        return self.shift(own, self.group.rank - sources[0]) if sources else None

    def shift(self, tensor: Tensor, step: int) -> tuple[Tensor, Work]:
        """Start to send a tensor to the rank `step` places on, and to receive one from the rank as far before."""
        received = torch.empty_like(tensor)
        return received, shift(received, tensor, step, self.group, async_op=True)

    def sums(
        self, keys: Tensor, widths: Widths, passes: Passes, into: Tensor | None, adds: bool
    ) -> _GatheredSums | _RingSums:
        """Return what sums the gradients of keys and values over the ring. widths: channels of keys and of values.

        into: this rank's are added to these, in at least fp32; None: they are returned in the dtype of keys. adds:
        False if a rank has no more than one block for a key of another rank; one block's gradients travel in the dtype
        of keys, as its kernel gives them, sums in at least fp32.
        """
        if self.gathers:
            return _GatheredSums(self, keys, widths, passes, into)
        return _RingSums(self, keys, widths, passes, into, at_least_fp32(keys.dtype) if adds else keys.dtype)


class _RingSums:
    """Gradients of keys and values that go back to their rank one by one, each under the computation of the next."""

    def __init__(
        self, ring: Ring, keys: Tensor, widths: Widths, passes: Passes, into: Tensor | None, dtype: torch.dtype
    ) -> None:
        self.ring, self.keys, self.widths, self.passes, self.into = ring, keys, widths, passes, into
        self.dtype = dtype  # of messages
        self.own = PartialSums(len(keys), passes)
        self.others: PartialSums | None = None  # of the source at hand
        self.following: tuple[Tensor, Tensor, Work] | None = None  # sent, received

    def add(self, source: int, rows: tuple[int, int], grad_k: Tensor, grad_v: Tensor) -> None:
        """Add the gradients of a block's keys and values."""
        if source == self.ring.group.rank:
            self.own.add(rows, grad_k, grad_v)
            return
        self.others = self.others or PartialSums(len(self.keys), self.passes)
        self.others.add(rows, grad_k, grad_v)

    def done(self, source: int) -> None:
        """Send the gradients of a source."""
        if source == self.ring.group.rank:
            return
        self._receive()
        sent = torch.empty_like(self.keys, dtype=self.dtype)
        sent = sent.zero_() if self.others is None else self.others.write(sent)
        self.others, self.following = None, (sent, *self.ring.shift(sent, source - self.ring.group.rank))

    def finish(self) -> Tensor:
        """Return the sum of this rank's."""
        self._receive()
        if self.into is not None:
            return self.own.write(self.into, adds=True)
        return self.own.finish(self.keys.dtype)

    def _receive(self) -> None:
        if self.following is not None:
            _, received, work = self.following
            work.wait()
            self.own.add((0, len(self.keys)), *received.split(self.widths, -1))
            self.following = None


class _GatheredSums:
    """Gradients of the gathered keys and values, reduced and scattered at the end."""

    def __init__(self, ring: Ring, keys: Tensor, widths: Widths, passes: Passes, into: Tensor | None) -> None:
        self.ring, self.keys, self.into = ring, keys, into
        self.everyone = keys.new_empty(ring.group.size, *keys.shape, dtype=at_least_fp32(keys.dtype))
        self.parts = {source: PartialSums(len(keys), passes) for source in range(ring.group.size)}

    def add(self, source: int, rows: tuple[int, int], grad_k: Tensor, grad_v: Tensor) -> None:
        self.parts[source].add(rows, grad_k, grad_v)

    def done(self, source: int) -> None:
        """Write the sums of a source."""
        self.parts.pop(source).write(self.everyone[source])

    def finish(self) -> Tensor:
        for source, unseen in self.parts.items():
            unseen.write(self.everyone[source])
        own = torch.empty_like(self.everyone[0])
        reduce_scatter(own, self.everyone.view(-1, *own.shape[1:]), self.ring.group)
        return own.to(self.keys.dtype) if self.into is None else self.into.add_(own)


ALONE = Ring(Group.alone("cp"))
