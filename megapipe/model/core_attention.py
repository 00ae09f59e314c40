"""softmax(scale q k^T) v over the keys each query sees.

`fused_attention` is torch's scaled_dot_product_attention; it keeps q, k, v (views into the tensor they come from), its output and the
log-sum-exp, [b, heads, s] fp32. `explicit_attention` writes it out, for soft-capped logits, dropout of the probabilities (keyed, so that
every schedule and grid draws the same) and --attention-softmax-in-fp32; it is not fused and keeps the probabilities, b heads s^2.

Legend: s sequence, b batch, g key/value heads, n query heads per key/value head, d head_dim; all of this rank. q: [s, b, g, n, d],
k and v: [keys, b, g, 1, d], any strides; keys is s, or more with a cache. Both return [s, b, g n d].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megapipe.model.norm import at_least_fp32


def fused_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """mask: additive, [1 or b, 1, s, keys] in q's dtype; None: causal (a single query then sees all keys)."""
    seq, batch, groups, queries, _ = q.shape
    # CUDA's flash kernels share k and v between heads themselves; elsewhere a stride of 0 says the same
    native_gqa = q.is_cuda and mask is None and q.dtype in (torch.float16, torch.bfloat16)
    if not native_gqa:
        k, v = (x.expand(-1, batch, groups, queries, -1) for x in (k, v))
    # query groups become part of the batch, which shares k and v without a copy, unless each sequence has a mask of its own
    fold = 1 if queries > 1 and (mask is None or mask.shape[0] == 1) else 2
    q, k, v = (x.flatten(fold, fold + 1).permute(1, 2, 0, 3) for x in (q, k, v))  # [b g, n, s, d] or [b, g n, s, d]
    is_causal = mask is None and seq > 1
    output = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=native_gqa
    )
    # the kernels give their output q's order of strides, [s, b, heads, d]: no copy
    return output.permute(2, 0, 1, 3).reshape(seq, batch, -1)


def explicit_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    scale: float,
    cap: float | None,
    dropout: Callable[[Tensor], Tensor] | None,
) -> Tensor:
    """Not fused. Logits come from a GEMM in q's dtype; cap, mask and softmax are computed in at least fp32.

    mask: additive, [1 or b, 1, s, keys]. cap: logits become cap * tanh(logits / cap). dropout: applied to the probabilities
    [b, g n, s, keys].
    """
    seq, batch, groups, queries, head_dim = q.shape
    num_keys = k.shape[0]
    q = q.permute(1, 2, 3, 0, 4).reshape(batch * groups, queries * seq, head_dim)  # a copy where queries > 1
    k, v = (x.flatten(1, 3).transpose(0, 1) for x in (k, v))  # [b g, keys, d]
    # the scale belongs into the GEMM: unscaled logits overflow fp16
    logits = torch.baddbmm(q.new_zeros(1, 1, 1), q, k.transpose(1, 2), beta=0, alpha=scale)
    logits = logits.view(batch, groups * queries, seq, num_keys)
    probs = _MaskedSoftmax.apply(logits, mask, cap).to(v.dtype)
    if dropout is not None:
        probs = dropout(probs)
    output = torch.bmm(probs.view(batch * groups, queries * seq, num_keys), v)
    return output.view(batch, groups, queries, seq, head_dim).permute(3, 0, 1, 2, 4).reshape(seq, batch, -1)


class _MaskedSoftmax(torch.autograd.Function):
    """softmax(cap tanh(logits / cap) + mask) in at least fp32. Keeps the probabilities and, with a cap, the tanh."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, mask: Tensor, cap: float | None) -> Tensor:
        ctx.dtype = logits.dtype
        logits, squashed = logits.to(at_least_fp32(logits.dtype)), None
        if cap is not None:
            squashed = torch.div(logits, cap).tanh_()
            logits = squashed * cap
        probs = torch.softmax(logits + mask, dim=-1)
        ctx.save_for_backward(probs, squashed)
        return probs

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        probs, squashed = ctx.saved_tensors
        grad = torch._softmax_backward_data(grad, probs, -1, probs.dtype)
        if squashed is not None:
            grad = grad.addcmul_(grad * squashed, squashed, value=-1)
        return grad.to(ctx.dtype), None, None


def soft_cap(x: Tensor, cap: float | None) -> Tensor:
    """cap * tanh(x / cap), keeping x. The result is a tensor of its own: the cross entropy after it writes its gradient into it."""
    return x if cap is None else _SoftCap.apply(x, cap)


class _SoftCap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cap: float) -> Tensor:
        ctx.cap = cap
        ctx.save_for_backward(x)
        return torch.div(x, cap).tanh_().mul_(cap)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        squashed = torch.div(x, ctx.cap).tanh_()
        return grad * squashed.square_().neg_().add_(1), None
