"""Core attention in blocks of queries and keys: over a ring of cp ranks, over the slices of a sequence, and with sinks.

Each block (`sharding.sequence`) has its log-sum-exp L, and blocks are merged in at least fp32: L = log sum exp L_j,
o = sum exp(L_j - L) o_j. The backward of each block uses the final o and L. An attention sink is one more block, with
its logit as L and o = 0. Saved are q, k, v, o and L of this rank, as for one fused kernel; keys and values of slices
stay in the microbatch's `SliceKeys`, where the backward adds to their gradients.

Shapes: as in `attention`, with s this rank's tokens. Values may have fewer channels than keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megapipe.model.block_attention import BlockKernel, MaskedBlock
from megapipe.model.context_parallel import Ring
from megapipe.model.microbatch import MicrobatchSlice
from megapipe.model.recompute import KeptAttention
from megapipe.tensor_parallel.gemms import at_least_fp32

CHUNKS = 8  # of the queries, whose gradients are widened one after the other for that of a sink
Blocks = Mapping[int, Sequence[MaskedBlock]]  # by rank of the ring whose keys they are, its own first


@dataclass(frozen=True, eq=False)
class BlockAttention:
    """Attention in blocks of one layer: all it needs besides q, k and v.

    layer: its global index. slice: of the microbatch, if any. kept: keeps the output and its log-sum-exp for a
    recompute.
    """

    layer: int
    blocks: Blocks
    kernel: BlockKernel
    ring: Ring
    slice: MicrobatchSlice | None = None
    kept: KeptAttention | None = None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None) -> Tensor:
        """Return the output over all keys, [s, b, heads x channels]. sink: the logit of each head's attention sink."""
        return _BlockAttention.apply(q, k, v, sink, self)

    @property
    def only_block(self) -> MaskedBlock | None:
        """The one block of a whole sequence on one rank."""
        return self.blocks[0][0].made() if self.ring.group.size == 1 and self.slice is None else None

    def joined(self, k: Tensor, v: Tensor) -> Tensor:
        """Return the keys and values side by side, with those of earlier slices."""
        if self.slice is None:
            return torch.cat([k, v], dim=-1)
        return self.slice.keys.write(self.layer, k, v, self.slice.place)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return output [s, b, heads, channels] and log-sum-exp [b, heads, s] over all keys."""
        merged, block, widths = _Merged(q, v), self.only_block, (k.shape[-1], v.shape[-1])
        if block is not None:
            merged.add(block, *self.kernel.forward(q, k, v, block, 0))
        else:
            for source, keys in self.ring.keys(self.joined(k, v), tuple(self.blocks)):
                for block in self.blocks[source]:
                    rows, (k_seen, v_seen) = (
                        slice(*block.block.queries),
                        keys[slice(*block.block.keys)].split(widths, -1),
                    )
                    merged.add(block, *self.kernel.forward(q[rows], k_seen, v_seen, block.made(), source))
        output, lse = merged.finish(sink)
        return output.permute(2, 0, 1, 3).to(q.dtype, memory_format=torch.contiguous_format).contiguous(), lse

    def gradients(
        self, grad: Tensor, q: Tensor, keys: Tensor, widths: tuple[int, int], result: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of q and, side by side, of keys and values, in at least fp32. keys: as `joined`."""
        into = None if self.slice is None else self.slice.keys.gradients(self.layer, keys)
        grad_q, sums = torch.zeros(q.shape, dtype=lse.dtype, device=q.device), self.ring.sums(keys, lse.dtype, into)
        for source, held in self.ring.keys(keys, tuple(self.blocks)):
            grad_keys = sums.of(source)
            for block in self.blocks[source]:
                rows, seen = slice(*block.block.queries), slice(*block.block.keys)
                k, v = held[seen].split(widths, dim=-1)
                given = grad[rows], q[rows], k, v, result[rows], lse[:, :, rows]
                parts = self.kernel.backward(*given, block.made(), source)
                totals = grad_q[rows], *grad_keys[seen].split(widths, dim=-1)
                for total, part in zip(totals, parts, strict=True):
                    total.add_(part)
            sums.done(source)
        return grad_q, sums.finish()


class _BlockAttention(Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, attention: BlockAttention) -> Tensor:
        compute = partial(attention.attend, q, k, v, sink)
        result, lse = compute() if attention.kept is None else attention.kept.results(compute)
        ctx.attention, ctx.widths = attention, (k.shape[-1], v.shape[-1])
        own = (k, v) if attention.slice is None else ()  # slices share their keys
        ctx.save_for_backward(q, sink, result, lse, *own)
        return result.view(*result.shape[:2], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (q, sink, result, lse, *own), attention = ctx.saved_tensors, ctx.attention
        grad, of_slice, block = grad.reshape(result.shape), attention.slice, attention.only_block
        grad_sink = None
        if sink is not None:  # its value is 0, so that its probability's gradient is -delta alone
            rows = zip(grad.chunk(CHUNKS), result.chunk(CHUNKS), strict=True)
            delta = torch.cat([(g.to(lse.dtype) * r.to(lse.dtype)).sum(-1) for g, r in rows]).permute(1, 2, 0)
            grad_sink = -((sink.to(lse.dtype)[:, None] - lse).exp() * delta).sum((0, 2)).to(sink.dtype)
        if block is not None:
            return *attention.kernel.backward(grad, q, *own, result, lse, block, 0), grad_sink, None
        keys = attention.joined(*own) if of_slice is None else of_slice.keys.of(attention.layer, of_slice.place, len(q))
        grad_q, sums = attention.gradients(grad, q, keys, ctx.widths, result, lse)
        grad_k, grad_v = sums[len(keys) - len(q) :].to(q.dtype, copy=True).split(ctx.widths, dim=-1)
        if of_slice is not None and of_slice.place.start == 0:
            of_slice.keys.free(attention.layer)
        return grad_q.to(q.dtype), grad_k, grad_v, grad_sink, None


class _Merged:
    """The output [b, heads, s, channels] and log-sum-exp [b, heads, s] of the blocks so far, of several ones in at
    least fp32.
    """

    def __init__(self, q: Tensor, v: Tensor) -> None:
        seq, batch, groups, queries, _ = q.shape
        self.shape, self.channels, self.wide = (batch, groups * queries, seq), v.shape[-1], at_least_fp32(q.dtype)
        self.output: Tensor | None = None

    def add(self, block: MaskedBlock, part: Tensor, part_lse: Tensor) -> None:
        """Merge a block's output and log-sum-exp."""
        if self.output is None and part_lse.shape == self.shape:
            self.output, self.lse = part, part_lse
            return
        if self.output is None:
            self.output = part.new_zeros(*self.shape, self.channels, dtype=self.wide)
            self.lse = torch.full(self.shape, -torch.inf, dtype=self.wide, device=part.device)
        self.output, rows = self.output.to(self.wide), slice(*block.block.queries)
        output, lse = self.output[:, :, rows], self.lse[:, :, rows]
        total = torch.logaddexp(lse, part_lse)
        output.mul_((lse - total).exp_().unsqueeze(-1)).add_(part * (part_lse - total).exp_().unsqueeze(-1))
        lse.copy_(total)

    def finish(self, sink: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return both, with the sink as one more block."""
        assert self.output is not None
        if sink is None:
            return self.output, self.lse
        total = torch.logaddexp(self.lse, sink.to(self.lse.dtype)[:, None])
        return self.output * (self.lse - total).exp_().unsqueeze(-1), total
