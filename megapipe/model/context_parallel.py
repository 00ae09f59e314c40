"""Core attention with context parallelism: the queries of a cp rank and the keys and values of all of them.

    p2p         ring attention (Liu et al. 2023, arXiv:2310.01889): in step t a rank receives the keys and values of the
                rank t places before it, under the computation of the step before. The backward receives them again, and
                sends their gradients back in at least fp32. Steps that a window hides from every rank are left out
    all_gather  keys and values are gathered (Llama 3, arXiv:2407.21783); their gradients are reduced and scattered
    a2a         heads for positions (DeepSpeed-Ulysses, arXiv:2309.14509): each rank has 1/cp of the heads for the whole
                sequence during core attention. Key/value heads of which there are fewer are copied before, and their
                gradients summed
    a2a+p2p     a2a within groups of consecutive ranks, p2p between them

A ring computes attention in blocks (`sharding.sequence`), each with its log-sum-exp L, merged in at least fp32:
L = log sum exp L_j, o = sum exp(L_j - L) o_j. The backward of each block uses the final o and L. An attention sink is
one more block, with its logit as L and o = 0. Saved are q, k, v, o and L of this rank, as without context parallelism.

Shapes: as in `attention`, with s this rank's tokens. Values may have fewer channels than keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megapipe.comm.collectives import Work, all_gather, all_to_all, reduce_scatter
from megapipe.comm.groups import ContextGroups, Group
from megapipe.model.block_attention import BlockKernel, MaskedBlock
from megapipe.model.recompute import KeptAttention
from megapipe.sharding.sequence import SequencePart
from megapipe.tensor_parallel.gemms import at_least_fp32


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

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        blocks: Mapping[int, Sequence[MaskedBlock]],
        kernel: BlockKernel,
        sink: Tensor | None = None,
        kept: KeptAttention | None = None,
    ) -> Tensor:
        """Return attention's output over the keys of the ring.

        blocks: by rank of the ring, its own first. sink: the logit of each head's attention sink. kept: keeps the
        output and its log-sum-exp for a recompute.
        """
        ring = _Ring(self.ring, self.gathers, tuple(blocks))
        return _RingAttention.apply(q, k, v, sink, ring, blocks, kernel, kept)


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


class _RingAttention(Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sink: Tensor | None,
        ring: _Ring,
        blocks: Mapping[int, Sequence[MaskedBlock]],
        kernel: BlockKernel,
        kept: KeptAttention | None,
    ) -> Tensor:
        compute = partial(_ring_attention, q, k, v, sink, ring, blocks, kernel)
        result, lse = compute() if kept is None else kept.results(compute)
        ctx.save_for_backward(q, k, v, sink, result, lse)
        ctx.ring, ctx.blocks, ctx.kernel = ring, blocks, kernel
        return result.view(*result.shape[:2], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, sink, result, lse = ctx.saved_tensors
        grad, wide, widths = grad.reshape(result.shape), at_least_fp32(q.dtype), (k.shape[-1], v.shape[-1])
        own = torch.cat([k, v], dim=-1)
        grad_q, sums = torch.zeros(q.shape, dtype=wide, device=q.device), ctx.ring.sums(own, wide)
        for source, keys in ctx.ring.keys(own):
            grad_keys = sums.of(source)
            for block in ctx.blocks[source]:
                rows, seen = slice(*block.block.queries), slice(*block.block.keys)
                grads = ctx.kernel.backward(
                    grad[rows], q[rows], *keys[seen].split(widths, dim=-1), result[rows], lse[:, :, rows], block, source
                )
                totals = grad_q[rows], *grad_keys[seen].split(widths, dim=-1)
                for total, part in zip(totals, grads, strict=True):
                    total.add_(part)
            sums.done(source)
        grad_k, grad_v = sums.finish().to(k.dtype).split(widths, dim=-1)
        grad_sink = None
        if sink is not None:  # its value is 0, so that its probability's gradient is -delta alone
            delta = (grad.to(wide) * result.to(wide)).sum(-1).permute(1, 2, 0)
            grad_sink = -((sink.to(wide)[:, None] - lse).exp() * delta).sum((0, 2)).to(sink.dtype)
        return grad_q.to(q.dtype), grad_k, grad_v, grad_sink, None, None, None, None


def _ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    ring: _Ring,
    blocks: Mapping[int, Sequence[MaskedBlock]],
    kernel: BlockKernel,
) -> tuple[Tensor, Tensor]:
    """Return output [s, b, heads, d] and log-sum-exp [b, heads, s] over the keys of the ring."""
    seq, batch, groups, queries, _ = q.shape
    shape, wide = (batch, groups * queries, seq), at_least_fp32(q.dtype)
    output = q.new_zeros(*shape, v.shape[-1], dtype=wide)
    lse = torch.full(shape, -torch.inf, dtype=wide, device=q.device)
    if sink is not None:
        lse.copy_(sink[:, None])
    for source, keys in ring.keys(torch.cat([k, v], dim=-1)):
        for block in blocks[source]:
            rows, seen = slice(*block.block.queries), slice(*block.block.keys)
            keys_seen, values_seen = keys[seen].split((k.shape[-1], v.shape[-1]), dim=-1)
            part, part_lse = kernel.forward(q[rows], keys_seen, values_seen, block, source)
            merge(output[:, :, rows], lse[:, :, rows], part, part_lse)
    return output.permute(2, 0, 1, 3).to(q.dtype, memory_format=torch.contiguous_format).contiguous(), lse


def merge(output: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Add a block's output [b, heads, queries, d] and log-sum-exp [b, heads, queries] to those of the blocks so far."""
    total = torch.logaddexp(lse, part_lse)
    output.mul_((lse - total).exp_().unsqueeze(-1)).add_(part * (part_lse - total).exp_().unsqueeze(-1))
    lse.copy_(total)


@dataclass(frozen=True, eq=False)
class _Ring:
    """The exchange of keys and values, [s, b, g, 1, channels of both].

    sources: ranks whose keys some rank needs, its own first.
    """

    group: Group
    gathers: bool
    sources: tuple[int, ...]

    def keys(self, own: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield each source with its keys and values; those of the next one come while the caller computes."""
        if self.gathers:
            everyone = own.new_empty(self.group.size, *own.shape)
            work = all_gather(everyone.view(-1, *own.shape[1:]), own, self.group, async_op=True)
            yield self.sources[0], own
            work.wait()
            for source in self.sources[1:]:
                yield source, everyone[source]
            return
        following = self._receive(own, 1)
        yield self.sources[0], own
        for number, source in enumerate(self.sources[1:], 1):
            assert following is not None
            received, work = following
            work.wait()
            following = self._receive(own, number + 1)
            yield source, received

    def _receive(self, own: Tensor, number: int) -> tuple[Tensor, Work] | None:
        if number >= len(self.sources):
            return None
        step = self.group.rank - self.sources[number]
        return self.shift(own, step)

    def shift(self, tensor: Tensor, step: int) -> tuple[Tensor, Work]:
        """Start to send a tensor to the rank `step` places on, and to receive one from the rank as far before."""
        ranks, received = self.group.size, torch.empty_like(tensor)
        sends, receives = [0] * ranks, [0] * ranks
        sends[(self.group.rank + step) % ranks] = receives[(self.group.rank - step) % ranks] = tensor.shape[0]
        return received, all_to_all(received, tensor, receives, sends, self.group, async_op=True)

    def sums(self, keys: Tensor, dtype: torch.dtype) -> _GatheredSums | _RingSums:
        """Return what sums the gradients of this rank's keys and values over the ring."""
        return (_GatheredSums if self.gathers else _RingSums)(self, keys.shape, dtype, keys.device)


class _RingSums:
    """Gradients of keys and values that go back to their rank one by one, each under the computation of the next."""

    def __init__(self, ring: _Ring, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.ring = ring
        self.make = lambda: torch.zeros(shape, dtype=dtype, device=device)
        self.own = self.current = self.make()
        self.following: tuple[Tensor, Work] | None = None

    def of(self, source: int) -> Tensor:
        """Return the tensor in which to sum the gradients of a source's keys and values."""
        if source != self.ring.group.rank:
            self.current = self.make()
        return self.current

    def done(self, source: int) -> None:
        """Send the gradients of a source."""
        if source != self.ring.group.rank:
            self._add()
            self.following = self.ring.shift(self.current, source - self.ring.group.rank)

    def finish(self) -> Tensor:
        """Return the sum of this rank's."""
        self._add()
        return self.own

    def _add(self) -> None:
        if self.following is not None:
            received, work = self.following
            work.wait()
            self.own += received
            self.following = None


class _GatheredSums:
    """Gradients of the gathered keys and values, reduced and scattered at the end."""

    def __init__(self, ring: _Ring, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.group = ring.group
        self.everyone = torch.zeros(ring.group.size, *shape, dtype=dtype, device=device)

    def of(self, source: int) -> Tensor:
        return self.everyone[source]

    def done(self, source: int) -> None:
        """Keep them until all are there."""

    def finish(self) -> Tensor:
        own = torch.empty_like(self.everyone[0])
        reduce_scatter(own, self.everyone.view(-1, *own.shape[1:]), self.group)
        return own
