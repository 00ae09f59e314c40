"""Core attention in blocks of queries and keys: over a ring of cp ranks, over the slices of a sequence, and with sinks.

Each block (`sharding.sequence`) has its log-sum-exp L, and blocks are merged in at least fp32 (`partial_results`):
L = log sum exp L_j, o = sum exp(L_j - L) o_j. The backward of each block uses the final o and L. An attention sink is
one more block, with its logit as L and o = 0. Saved are q, k, v, o and L of this rank, as for one fused kernel; keys
and values of slices stay in the microbatch's `SliceKeys`, where the backward adds to their gradients.

Shapes: as in `attention`, with s this rank's tokens. Values may have fewer channels than keys.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megapipe.model.block_attention import BlockKernel, MaskedBlock
from megapipe.model.context_parallel import Ring
from megapipe.model.microbatch import MicrobatchSlice
from megapipe.model.partial_results import PartialOutputs, PartialSums, Passes
from megapipe.model.recompute import KeptAttention

CHUNKS = 8  # of the queries, whose gradients are widened one after the other for that of a sink
Blocks = Mapping[int, Sequence[MaskedBlock]]  # by rank of the ring whose keys they are, its own first


@dataclass(frozen=True, eq=False)
class BlockAttention:
    """Attention in blocks of one layer: all it needs besides q, k and v.

    layer: its global index. adds_key_gradients: as in `Visibility`. slice: of the microbatch, if any. kept: keeps the
    output and its log-sum-exp for a recompute. passes: merge and add the results of blocks.
    """

    layer: int
    blocks: Blocks
    kernel: BlockKernel
    ring: Ring
    adds_key_gradients: bool
    slice: MicrobatchSlice | None = None
    kept: KeptAttention | None = None
    passes: Passes = field(default_factory=Passes)

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
        merged, block, widths = PartialOutputs(len(q), self.passes), self.only_block, (k.shape[-1], v.shape[-1])

        def add(block: MaskedBlock, *results: Tensor) -> None:
            merged.add(block.block.queries, *(each.movedim(2, 0) for each in results))

        if block is not None:
            add(block, *self.kernel.forward(q, k, v, block, 0))
        else:
            for source, keys in self.ring.keys(self.joined(k, v), tuple(self.blocks)):
                for block in self.blocks[source]:
                    rows, (k_seen, v_seen) = (
                        slice(*block.block.queries),
                        keys[slice(*block.block.keys)].split(widths, -1),
                    )
                    add(block, *self.kernel.forward(q[rows], k_seen, v_seen, block.made(), source))
        return merged.finish(q.dtype, sink)

    def gradients(
        self, grad: Tensor, q: Tensor, keys: Tensor, widths: tuple[int, int], result: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of q and, side by side, of keys and values; those of slices in at least fp32.

        keys: as `joined`.
        """
        into = None if self.slice is None else self.slice.keys.gradients(self.layer, keys)
        sums = self.ring.sums(keys, widths, self.passes, into, self.adds_key_gradients)
        grad_q = PartialSums(len(q), self.passes)
        for source, held in self.ring.keys(keys, tuple(self.blocks)):
            for block in self.blocks[source]:
                rows, seen = slice(*block.block.queries), slice(*block.block.keys)
                k, v = held[seen].split(widths, dim=-1)
                given = grad[rows], q[rows], k, v, result[rows], lse[:, :, rows]
                of_q, *of_keys = self.kernel.backward(*given, block.made(), source)
                grad_q.add(block.block.queries, of_q)
                sums.add(source, block.block.keys, *of_keys)
            sums.done(source)
        return grad_q.finish(q.dtype), sums.finish()


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
        if of_slice is not None:
            sums = sums[len(keys) - len(q) :].to(q.dtype, copy=True)
            if of_slice.place.start == 0:
                of_slice.keys.free(attention.layer)
        return grad_q, *sums.split(ctx.widths, dim=-1), grad_sink, None
