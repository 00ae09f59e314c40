"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434) of one layer on one tp rank.

    q       = up_q(norm(down_q(x)))       [s, b, n, dn + dr]; without a latent of the queries q = proj_q(x)
    c, r    = down_kv(x)                  [s, b, kv_rank], and the one rotated key of all heads, [s, b, dr]
    k, v    = up_kv(norm(c))              [s, b, n, dn] and [s, b, n, dv]
    output  = proj(softmax(scale [q_n; rotated q_r] [k; rotated r]^T) v)

n heads of this rank, dn channels of a query or key head that are not rotated and dr rotated ones, dv of a value head.
Up projections are column-parallel. Down projections and norms of latents are replicated; under sequence parallelism
each rank has its slice of the sequence, so that their gradients are partial, and r is gathered. Its gradient is a sum
over the heads of all ranks.

Core attention takes values narrower than keys: one block (`block_attention`), whose kernel gets zero channels if it
wants them. Attention that is written out, and kernels of libraries, get v with zeros up to dn + dr.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megapipe.comm.collectives import WithAdjoint
from megapipe.config.config import ResolvedModelConfig
from megapipe.model.attention import CoreAttention, SelfAttention
from megapipe.model.context import LayerContext, rotate_pairs_
from megapipe.model.layer_factory import LayerFactory
from megapipe.model.norm import norm_element
from megapipe.model.recompute import KeptAttention
from megapipe.model.segments import (
    FIRST,
    NOTHING,
    Again,
    Element,
    Elements,
    Operator,
    Remade,
    again_if,
    linear,
    linear_element,
)
from megapipe.tensor_parallel.gemms import at_least_fp32, gathered, summed

SECOND, THIRD = slice(1, 2), slice(2, 3)  # of a branch: keys and values, the shared key; queries are the first


class LatentAttention(SelfAttention):
    """Latent attention: elements from [s, b, h] (a slice of s with sequence parallelism) to the same shape."""

    def __init__(self, layer: int, factory: LayerFactory) -> None:
        nn.Module.__init__(self)
        config, tp = factory.config, factory.tp
        self.config, self.layer = config, layer
        self.softmax_offset = None
        self.tp, self.sequence_parallel = tp, factory.sequence_parallel
        self.recompute = factory.recompute
        self.groups, self.queries = config.num_attention_heads // tp.size, 1
        self.head_dim = config.kv_channels
        self.core = CoreAttention(layer, factory, self.groups, self.queries, config.v_head_dim)
        fused = factory.kernels.fused
        self.heads = LatentHeads(self.groups, config.qk_head_dim, fused(heads_of_latents), fused(latent_gradients))
        heads, hidden, q_rank, kv_rank = (
            config.num_attention_heads,
            config.hidden_size,
            config.q_lora_rank,
            config.kv_lora_rank,
        )
        if q_rank is None:
            self.linear_q_proj = factory.linear("column", layer, hidden, heads * self.head_dim, False)
        else:
            self.linear_q_down_proj = factory.replicated_linear(layer, hidden, q_rank)
            self.q_layernorm = _latent_norm(factory, config, q_rank)
            self.linear_q_up_proj = factory.linear("column", layer, q_rank, heads * self.head_dim, False)
        self.linear_kv_down_proj = factory.replicated_linear(layer, hidden, kv_rank + config.qk_pos_emb_head_dim)
        self.kv_layernorm = _latent_norm(factory, config, kv_rank)
        rows = heads * (config.qk_head_dim + config.v_head_dim)
        self.linear_kv_up_proj = factory.linear("column", layer, kv_rank, rows, False)
        self.linear_proj = factory.linear("row", layer, heads * config.v_head_dim, hidden, config.add_bias_linear)

    def elements(self, norm: Elements = NOTHING) -> Iterator[Element]:
        """Yield the elements of the branch. norm: those before the projections, which may be recomputed."""
        redoes_up, has_latent = "mla_up_proj" in self.recompute, self.config.q_lora_rank is not None
        # without a latent of the queries a range that is run again has the norm's output as an input, and keeps it
        yield from again_if("layernorm" in self.recompute and (has_latent or not redoes_up), norm)
        if has_latent:
            yield Operator("linear_q_down_proj", lambda context, x: (linear(self.linear_q_down_proj, x), x))
            yield Operator("linear_kv_down_proj", lambda context, x: self._latent_and_key(x), SECOND)
        else:
            yield Operator("linear_kv_down_proj", lambda context, x: (x, *self._latent_and_key(x)))
        if redoes_up:
            inner = Elements([*self._heads_of_latents(), self.core_element])
            kept = None if "core_attn" in self.recompute else KeptAttention
            yield Again(inner, kept=kept, give=lambda context, results: replace(context, kept_attention=results))
        else:
            yield from self._heads_of_latents()
            yield from again_if("core_attn" in self.recompute, Elements([self.core_element]))
        yield linear_element("linear_proj", self.linear_proj)

    def _latent_and_key(self, x: Tensor | Remade) -> tuple[Tensor, ...]:
        """Return the latent of keys and values, and the key that all heads share, as views."""
        sizes = self.config.kv_lora_rank, self.config.qk_pos_emb_head_dim
        return linear(self.linear_kv_down_proj, x).split(sizes, dim=-1)

    def _heads_of_latents(self) -> Iterator[Element]:
        """Yield the elements from latents and the shared key to q, k and v."""
        config = self.config
        if config.q_lora_rank is None:
            yield linear_element("linear_q_proj", self.linear_q_proj, FIRST)
        else:
            if config.qk_layernorm:
                yield norm_element("q_layernorm", self.q_layernorm, FIRST)
            yield linear_element("linear_q_up_proj", self.linear_q_up_proj, FIRST)
        if config.qk_layernorm:
            yield norm_element("kv_layernorm", self.kv_layernorm, SECOND)
        else:  # a copy, so that the rest is not kept
            yield Operator("latent", lambda context, latent: latent.contiguous(), SECOND)
        yield linear_element("linear_kv_up_proj", self.linear_kv_up_proj, SECOND)
        if self.tp.size > 1:
            # from a slice of s, with sequence parallelism; the gradient is a sum over tp
            add = partial(summed, group=self.tp, scatter=self.sequence_parallel)
            whole = partial(gathered, group=self.tp) if self.sequence_parallel else lambda key: key.view_as(key)
            yield Operator("shared_key", lambda context, key: WithAdjoint.apply(key, whole, add), THIRD)
        yield Operator("heads", self._heads_of)

    def _heads_of(self, context: LayerContext, q: Tensor, keys_values: Tensor, shared_key: Tensor) -> tuple[Any, ...]:
        """Return q, k and v. Attention in blocks makes gradients that nothing else has."""
        assert context.rotary is not None
        cos, sin, *factors = context.rotary
        factor, owns = factors[0] if factors else None, bool(context.blocks)
        q, k, v = _Heads.apply(q, keys_values, shared_key, cos, sin, factor, self.heads, owns)
        return q.view(k.shape), k, v


def _latent_norm(factory: LayerFactory, config: ResolvedModelConfig, size: int) -> nn.Module:
    """Build the norm of a latent, if latents are normalized."""
    return factory.norm(size, config.latent_norm_epsilon) if config.qk_layernorm else nn.Identity()


@dataclass(frozen=True, eq=False)
class LatentHeads:
    """(q [s, b, n (dn + dr)], keys and values [s, b, n (dn + dv)], shared key [s, b, dr], cos, sin) -> rotated q and k
    of all heads, both [s, b, n, 1, dn + dr], and v [s, b, n, 1, dv]. q is overwritten.

    forward, backward: `heads_of_latents` and `latent_gradients`, compiled on CUDA.
    """

    groups: int  # n
    plain: int  # dn
    forward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the dn channels of each head of x [s, b, n ...], and those behind, as views [s, b, n, 1, ...]."""
        heads = x.view(*x.shape[:2], self.groups, 1, -1)
        return heads[..., : self.plain], heads[..., self.plain :]


def heads_of_latents(
    q: Tensor, shared_key: Tensor, keys: Tensor, values: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return q rotated, k and v. q: its channels to rotate, [s, b, n, 1, dr]. shared_key: [s, b, 1, 1, dr]. keys,
    values: [s, b, n, 1, dn] and [s, b, n, 1, dv].
    """
    q, shared_key = (x.clone(memory_format=torch.contiguous_format) for x in (q, shared_key))
    for each in (q, shared_key):
        rotate_pairs_(each, cos, sin)
    k = torch.cat((keys, shared_key.expand(*keys.shape[:-1], -1)), dim=-1)
    return q, k, values.clone(memory_format=torch.contiguous_format)


def latent_gradients(
    q: Tensor, shared_key: Tensor, keys: Tensor, values: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q before its rotation, of the shared key, and of keys and values side by side. Arguments
    are gradients, as in `heads_of_latents`; shared_key: that of all heads, [s, b, n, 1, dr].
    """
    q, sin = q.clone(memory_format=torch.contiguous_format), -sin
    total = shared_key.sum((2, 3), dtype=at_least_fp32(q.dtype), keepdim=True)
    for each in (q, total):
        rotate_pairs_(each, cos, sin)
    return q, total.to(q.dtype), torch.cat((keys, values), dim=-1)


class _Heads(Function):
    """`LatentHeads`, with the rotated channels of q written back. Saves nothing but rotary tables.

    factor: on q, [s, b, 1, 1, 1]. owns: the gradient of q is not in use elsewhere, so that its rotated channels are
    written back, too.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        keys_values: Tensor,
        shared_key: Tensor,
        cos: Tensor,
        sin: Tensor,
        factor: Tensor | None,
        heads: LatentHeads,
        owns: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        # constants shared by all layers, not activations
        ctx.tables, ctx.factor, ctx.heads, ctx.owns = (cos, sin), factor, heads, owns
        ctx.mark_dirty(q)
        _, rotated = heads.split(q)
        shared = shared_key.unflatten(-1, (1, 1, -1))
        turned, k, v = heads.forward(rotated, shared, *heads.split(keys_values), cos, sin)
        rotated.copy_(turned)
        if factor is not None:
            q.mul_(factor.flatten(2))
        return q, k, v

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_q: Tensor, grad_k: Tensor, grad_v: Tensor) -> tuple[Tensor | None, ...]:
        heads: LatentHeads = ctx.heads
        grad_q = grad_q.contiguous() if ctx.owns else grad_q.clone(memory_format=torch.contiguous_format)
        _, rotated = heads.split(grad_q)
        keys, shared = grad_k[..., : heads.plain], grad_k[..., heads.plain :]
        turned, grad_shared, grad_both = heads.backward(rotated, shared, keys, grad_v, *ctx.tables)
        rotated.copy_(turned)
        if ctx.factor is not None:
            grad_q.mul_(ctx.factor.flatten(2))
        return grad_q, grad_both.flatten(2), grad_shared.flatten(2), *(None,) * 5
