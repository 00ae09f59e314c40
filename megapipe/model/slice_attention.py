"""Core attention of one slice of a sequence: its queries, and the keys and values of all slices up to its own.

Computed in blocks, as with context parallelism (`context_parallel`): the slice's own keys, then those before it, each
with its log-sum-exp, merged in at least fp32. Saved are q, the output and its log-sum-exp; keys and values stay in the
microbatch's `SliceKeys`, where the backward adds to their gradients.

Shapes: as in `attention`, with s the slice's tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megapipe.model.block_attention import BlockKernel
from megapipe.model.context import MaskedBlocks
from megapipe.model.context_parallel import merge
from megapipe.model.microbatch import MicrobatchSlice
from megapipe.tensor_parallel.gemms import at_least_fp32


class SliceAttention(Function):
    """Attention of a slice, [s, b, heads x d]. blocks: with keys counted from position 0. layer: its global index."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        own: MicrobatchSlice,
        layer: int,
        blocks: MaskedBlocks,
        kernel: BlockKernel,
    ) -> Tensor:
        seq, batch, groups, queries, _ = q.shape
        shape, wide = (batch, groups * queries, seq), at_least_fp32(q.dtype)
        keys = own.keys.write(layer, k, v, own.place)
        if len(blocks) == 1:
            seen_k, seen_v = keys[:, slice(*blocks[0].block.keys)]
            output, lse = kernel.forward(q, seen_k, seen_v, blocks[0], 0)
        else:
            output = q.new_zeros(*shape, v.shape[-1], dtype=wide)
            lse = torch.full(shape, -torch.inf, dtype=wide, device=q.device)
            for block in blocks:
                seen_k, seen_v = keys[:, slice(*block.block.keys)]
                merge(output, lse, *kernel.forward(q, seen_k, seen_v, block, 0))
        result = output.permute(2, 0, 1, 3).to(q.dtype, memory_format=torch.contiguous_format).contiguous()
        ctx.save_for_backward(q, result, lse)
        ctx.own, ctx.layer, ctx.blocks, ctx.kernel = own, layer, blocks, kernel
        return result.view(seq, batch, -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, result, lse = ctx.saved_tensors
        own, layer, place = ctx.own, ctx.layer, ctx.own.place
        keys, sums = own.keys.of(layer, place)
        grad, grad_q = grad.reshape(result.shape), None
        for block in ctx.blocks:
            seen = slice(*block.block.keys)
            of_q, of_k, of_v = ctx.kernel.backward(grad, q, *keys[:, seen], result, lse, block, 0)
            sums[0, seen] += of_k
            sums[1, seen] += of_v
            grad_q = of_q if grad_q is None else grad_q.to(sums.dtype).add_(of_q)
        assert grad_q is not None
        grad_k, grad_v = sums[:, place.start :].to(q.dtype, copy=True)
        if place.start == 0:
            own.keys.free(layer)
        return grad_q.to(q.dtype), grad_k, grad_v, None, None, None, None
