"""Attention of a block of queries on a block of keys with its log-sum-exp, and the backward with that of all keys.

q: [queries, b, g, n, d]; k: [keys, b, g, 1, d]; v: [keys, b, g, 1, channels], at most d of them; any strides. Output
[b, g n, queries, channels], log-sum-exp [b, g n, queries] in at least fp32; a query that sees no key of the block has
output 0 and log-sum-exp -inf.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

from megapipe.sharding.sequence import KeyBlock
from megapipe.tensor_parallel.gemms import at_least_fp32

HALF_TYPES = (torch.float16, torch.bfloat16)
LSE_MULTIPLE = 32  # to which CUDA's memory-efficient kernel pads the log-sum-exp
MASK_MULTIPLE = 16  # of elements, to which it wants rows of a mask aligned
Gradients = tuple[Tensor, Tensor, Tensor]  # of q, k and v


class MaskedBlock(NamedTuple):
    """A block of queries and keys.

    mask: [1 or b, 1, queries, keys]; None: what the block says. empty: queries without a key, [1 or b, 1, queries].
    make: returns both where they depend on the documents of a microbatch. They are made for each use, since a mask that
    is kept from the forward to the backward takes memory for each microbatch in flight.
    """

    block: KeyBlock
    mask: Tensor | None = None
    empty: Tensor | None = None
    make: Callable[[], tuple[Tensor, Tensor | None]] | None = None

    def made(self) -> MaskedBlock:
        """Return the block with its mask."""
        return self if self.make is None else MaskedBlock(self.block, *self.make())


class BlockKernel(Protocol):
    """Computes blocks. source: the rank of the ring whose keys they are."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, block: MaskedBlock, source: int) -> tuple[Tensor, Tensor]:
        """Return output and log-sum-exp."""

    def backward(
        self,
        grad: Tensor,  # of the output over all keys, [queries, b, g n, channels]
        q: Tensor,
        k: Tensor,
        v: Tensor,
        output: Tensor,  # over all keys, [queries, b, g n, channels]
        lse: Tensor,  # over all keys, [b, g n, queries]
        block: MaskedBlock,
        source: int,
    ) -> Gradients:
        """Return this block's share of the gradients."""


def prefers_cudnn(q: Tensor, k: Tensor, v: Tensor, scale: float) -> bool:
    """Return True if scaled_dot_product_attention would run cuDNN's kernel for q, k and v, and in their backward."""
    if not q.is_cuda or q.dtype not in HALF_TYPES:
        return False
    with torch.enable_grad():  # for some widths cuDNN has no backward
        q, k, v = (_fold(x, 1).detach().requires_grad_() for x in (q, k, v))
        choice = torch._fused_sdp_choice(q, k, v, None, 0.0, q.shape[2] == k.shape[2], scale=scale, enable_gqa=True)
    return choice == SDPBackend.CUDNN_ATTENTION.value


@dataclass(frozen=True)
class FusedBlocks:
    """torch's fused kernels: flash attention on CPUs; on CUDA memory-efficient, but in half types without a mask
    cuDNN's where torch prefers it, else flash attention, which `torch.nn.attention.activate_flash_attention_impl`
    replaces.

    All but cuDNN's want values as wide as keys, so narrower ones get channels of zeros while the kernel runs. cuDNN's
    takes keys of 192 channels and values of 128 on Hopper and Blackwell (`check_cudnn_tensor_shapes` of torch's
    sdp_utils.cpp), but not both of 192. Kernels without a mask share keys between the queries of a group themselves.
    """

    scale: float
    prefers_cudnn: bool = False

    def forward(self, q: Tensor, k: Tensor, v: Tensor, block: MaskedBlock, source: int) -> tuple[Tensor, Tensor]:
        (queries, batch), channels, aten = q.shape[:2], v.shape[-1], torch.ops.aten
        causal, mask, native = block.block.kind == "causal", block.mask, _shares_keys(q, block)
        size = channels if native and self.prefers_cudnn else q.shape[-1]
        q, k, v = _folded(q, k, _widened(v, size), _folded_dim(q, block), not native)
        if not q.is_cuda:
            output, lse = aten._scaled_dot_product_flash_attention_for_cpu(
                q, k, v, 0.0, causal, attn_mask=mask, scale=self.scale
            )
        elif native and self.prefers_cudnn:
            output, lse = aten._scaled_dot_product_cudnn_attention(
                q, k, v, None, True, 0.0, causal, False, scale=self.scale
            )[:2]
        elif native:
            output, lse = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=self.scale)[:2]
        else:
            bias = None if mask is None else _aligned(mask).expand(q.shape[0], q.shape[1], -1, -1)
            output, lse = aten._scaled_dot_product_efficient_attention(
                q, k, v, bias, True, 0.0, causal, scale=self.scale
            )[:2]
            lse = lse[:, :, :queries]
        output, lse = output.reshape(batch, -1, queries, size)[..., :channels], lse.reshape(batch, -1, queries)
        if block.empty is not None:
            # the kernel's own result of such a row is not one: CPUs return a log-sum-exp of 0
            output = output.masked_fill(block.empty.unsqueeze(-1), 0.0)
            lse = lse.masked_fill(block.empty, -torch.inf)
        return output, lse

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        output: Tensor,
        lse: Tensor,
        block: MaskedBlock,
        source: int,
    ) -> Gradients:
        shape, (queries, batch, groups, per_group, _), aten = q.shape, q.shape, torch.ops.aten
        fold, channels = _folded_dim(q, block), v.shape[-1]
        split = (queries, batch, groups, per_group, -1)
        causal, mask, native = block.block.kind == "causal", block.mask, _shares_keys(q, block)
        size = channels if native and self.prefers_cudnn else shape[-1]
        grad, output = (_fold(_widened(x.view(split), size), fold) for x in (grad, output))
        q, k, v = _folded(q, k, _widened(v, size), fold, not native)
        lse = lse.reshape(q.shape[:3])
        if native:  # these kernels read it as contiguous, and here it may be that of some of the queries
            lse = lse.contiguous()
        if not q.is_cuda:
            grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad, q, k, v, output, lse, 0.0, causal, attn_mask=mask, scale=self.scale
            )
        elif native and self.prefers_cudnn:
            unused = torch.empty((), dtype=torch.int64, device=q.device)  # of dropout
            grads = aten._scaled_dot_product_cudnn_attention_backward(
                *(grad, q, k, v, output, lse.unsqueeze(-1), unused, unused, None, None, None, queries, k.shape[2]),
                *(0.0, causal),
                scale=self.scale,
            )
        elif native:
            unused = torch.empty(2, dtype=torch.uint64, device=q.device)  # of dropout
            grads = aten._scaled_dot_product_flash_attention_backward(
                *(grad, q, k, v, output, lse, None, None, queries, k.shape[2], 0.0, causal, unused, unused[:0]),
                scale=self.scale,
            )
        else:
            bias = None if mask is None else _aligned(mask).expand(q.shape[0], q.shape[1], -1, -1)
            padded, unused = F.pad(lse, (0, -queries % LSE_MULTIPLE)), torch.zeros((), dtype=torch.int64)
            grads = aten._scaled_dot_product_efficient_attention_backward(
                *(grad, q, k, v, bias, output, padded, unused, unused, 0.0, (True, True, True, False), causal),
                scale=self.scale,
            )
        grad_q, grad_k, grad_v = _unfolded(grads, shape)
        return grad_q, grad_k, grad_v[..., :channels]


@dataclass(frozen=True)
class WrittenBlocks:
    """GEMMs and softmax in at least fp32, for what fused kernels lack. The backward computes the probabilities again.
    Operations are in place wherever a matrix of queries and keys is not needed any more.

    kept: (source, (b, g n), device) -> mask of the probabilities that dropout keeps, [b, g n, s, s of the source].
    factor: of the kept ones.
    """

    scale: float
    cap: float | None = None
    kept: Callable[[int, tuple[int, int], torch.device], Tensor] | None = None
    factor: float = 1.0

    def forward(self, q: Tensor, k: Tensor, v: Tensor, block: MaskedBlock, source: int) -> tuple[Tensor, Tensor]:
        batch, queries = q.shape[1], q.shape[0]
        q, k, v = _folded(q, k, v, 2)
        logits, _ = self._logits(q, k, block)
        lse = torch.logsumexp(logits, dim=-1)
        probs = logits.sub_(lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1)).exp_()
        output = self._dropped(probs, block, source).to(v.dtype) @ v
        return output.view(batch, -1, queries, v.shape[-1]), lse

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        output: Tensor,
        lse: Tensor,
        block: MaskedBlock,
        source: int,
    ) -> Gradients:
        shape = q.shape
        q, k, v = _folded(q, k, v, 2)
        grad, output = (x.permute(1, 2, 0, 3) for x in (grad, output))
        logits, squashed = self._logits(q, k, block)
        wide = logits.dtype
        probs = logits.sub_(lse.unsqueeze(-1)).exp_()
        grad_v = self._dropped(probs, block, source).to(v.dtype).transpose(2, 3) @ grad
        delta = (grad.to(wide) * output.to(wide)).sum(-1, keepdim=True)
        grad_logits = self._dropped((grad @ v.transpose(2, 3)).to(wide), block, source).sub_(delta).mul_(probs)
        if squashed is not None:
            grad_logits.mul_(squashed.square_().neg_().add_(1))
        grad_logits = grad_logits.to(q.dtype).mul_(self.scale)
        return _unfolded((grad_logits @ k, grad_logits.transpose(2, 3) @ q, grad_v), shape)

    def _logits(self, q: Tensor, k: Tensor, block: MaskedBlock) -> tuple[Tensor, Tensor | None]:
        """Return the logits in at least fp32, and with a soft-cap their tanh."""
        logits, squashed = ((q * self.scale) @ k.transpose(2, 3)).to(at_least_fp32(q.dtype)), None
        if self.cap is not None:
            squashed = logits.div_(self.cap).tanh_()
            logits = squashed * self.cap
        if block.mask is not None:
            logits += block.mask
        elif block.block.kind == "causal":
            visible = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).tril_()
            logits.masked_fill_(~visible, -torch.inf)
        return logits, squashed

    def _dropped(self, x: Tensor, block: MaskedBlock, source: int) -> Tensor:
        if self.kept is None:
            return x
        kept = self.kept(source, (x.shape[0], x.shape[1]), x.device)
        return (x * kept[:, :, slice(*block.block.queries), slice(*block.block.keys)]).mul_(self.factor)


def _shares_keys(q: Tensor, block: MaskedBlock) -> bool:
    """Return True for CUDA's kernels that take k and v of fewer heads than q."""
    return q.is_cuda and block.mask is None and q.dtype in HALF_TYPES


def _folded_dim(q: Tensor, block: MaskedBlock) -> int:
    """Return 1 to fold query groups into the batch, which shares k and v without a copy, unless each sequence has its
    own mask; else 2, to fold the heads of a group.
    """
    return 1 if q.shape[3] > 1 and (block.mask is None or block.mask.shape[0] == 1) else 2


def _folded(q: Tensor, k: Tensor, v: Tensor, dim: int, expands: bool = True) -> Gradients:
    """Return q, k and v as [b, heads, s, d]. expands: k and v to the heads of q."""
    heads = q.shape[3] if expands else -1
    q, k, v = (_fold(x.expand(-1, -1, -1, heads, -1), dim) for x in (q, k, v))
    return q, k, v


def _fold(x: Tensor, dim: int) -> Tensor:
    return x.flatten(dim, dim + 1).permute(1, 2, 0, 3)


def _widened(x: Tensor, size: int) -> Tensor:
    """Return x with zeros up to so many channels."""
    return x if x.shape[-1] == size else F.pad(x, (0, size - x.shape[-1]))


def _unfolded(grads: Any, q_shape: torch.Size) -> Gradients:
    """Return the gradients of folded q, k and v, those of k and v summed over the heads that share k."""
    _, batch, groups, _, _ = q_shape
    grad_q, grad_k, grad_v = (x.reshape(batch, groups, -1, x.shape[2], x.shape[-1]) for x in grads[:3])
    grad_k, grad_v = (x.sum(2, keepdim=True) if x.shape[2] > 1 else x for x in (grad_k, grad_v))
    grad_q, grad_k, grad_v = (x.permute(3, 0, 1, 2, 4) for x in (grad_q, grad_k, grad_v))
    return grad_q, grad_k, grad_v


def _aligned(mask: Tensor) -> Tensor:
    """Return a mask whose rows begin at multiples that CUDA's kernel accepts."""
    return F.pad(mask, (0, -mask.shape[-1] % MASK_MULTIPLE))[..., : mask.shape[-1]]
