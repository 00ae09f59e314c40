"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434) of one layer on one tp rank.

    q       = up_q(norm(down_q(x)))       [s, b, n, dn + dr]; without a latent of the queries q = proj_q(x)
    c, r    = down_kv(x)                  [s, b, kv_rank], and the one rotated key of all heads, [s, b, dr]
    k, v    = up_kv(norm(c))              [s, b, n, dn] and [s, b, n, dv]
    output  = proj(softmax(scale [q_n; rotated q_r] [k; rotated r]^T) v)

n heads of this rank, dn channels of a query or key head that are not rotated and dr rotated ones, dv of a value head.
Up projections are column-parallel. Down projections and norms of latents are replicated; under sequence parallelism
each rank has its slice of the sequence, so that their gradients are partial, and r is gathered. Its gradient is a sum
over the heads of all ranks.

Fused kernels want values as wide as keys: v gets zero channels up to dn + dr, which are cut off the output. With
context parallelism it gets them after it is exchanged.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megapipe.comm.collectives import WithAdjoint
from megapipe.config.config import ResolvedModelConfig
from megapipe.model.attention import CoreAttention, SelfAttention, rotated
from megapipe.model.context import rotate_pairs_
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
    Segment,
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
        self.value_dim = self.head_dim if factory.context is None else config.v_head_dim  # of v with its zeros
        self.core = CoreAttention(layer, factory, self.groups, self.queries, config.v_head_dim)
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
        heads = LatentHeads(self.groups, config.qk_head_dim, self.head_dim, config.v_head_dim, self.value_dim)
        yield Segment("heads", heads, lambda context, like: context.rotary)


def _latent_norm(factory: LayerFactory, config: ResolvedModelConfig, size: int) -> nn.Module:
    """Build the norm of a latent, if latents are normalized."""
    return factory.norm(size, config.latent_norm_epsilon) if config.qk_layernorm else nn.Identity()


@dataclass(frozen=True)
class LatentHeads:
    """(q [s, b, n (dn + dr)], keys and values [s, b, n (dn + dv)], shared key [s, b, dr], cos, sin, factor on q or
    None) -> rotated q, k of all heads, both [s, b, n, 1, dn + dr], and v [s, b, n, 1, value_dim], perhaps with zeros
    up to k's width.
    """

    groups: int  # n
    plain: int  # dn
    width: int  # dn + dr
    values: int  # dv
    value_dim: int

    def __call__(
        self,
        q: Tensor,
        keys_values: Tensor,
        shared_key: Tensor,
        cos: Tensor,
        sin: Tensor,
        factor: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        heads = (*q.shape[:2], self.groups, 1)
        if not torch.compiler.is_compiling():
            q, k, v = (x.view(*heads, -1) for x in _Heads.apply(q, keys_values, shared_key, cos, sin, factor, self))
            return q, k, v
        q = q if factor is None else (q * factor.flatten(2)).to(q.dtype)
        q, shared = q.view(*heads, -1), rotated(shared_key.view(*q.shape[:2], 1, 1, -1), cos, sin)
        keys, v = keys_values.view(*heads, -1).split((self.plain, self.values), dim=-1)
        q = torch.cat((q[..., : self.plain], rotated(q[..., self.plain :], cos, sin)), dim=-1)
        k = torch.cat((keys, shared.expand(*heads, -1)), dim=-1)
        return q, k, F.pad(v, (0, self.value_dim - self.values)).contiguous()


class _Heads(Function):
    """`LatentHeads` with q rotated in place. Saves nothing but rotary tables."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        keys_values: Tensor,
        shared_key: Tensor,
        cos: Tensor,
        sin: Tensor,
        factor: Tensor | None,
        sizes: LatentHeads,
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.tables, ctx.factor, ctx.sizes = (cos, sin), factor, sizes  # constants shared by all layers, not activations
        ctx.mark_dirty(q)
        plain, heads = sizes.plain, (*q.shape[:2], sizes.groups, 1)
        rotate_pairs_(q.view(*heads, sizes.width)[..., plain:], cos, sin)
        if factor is not None:
            q.mul_(factor.flatten(2))
        shared = shared_key.clone().view(*q.shape[:2], 1, 1, -1)
        rotate_pairs_(shared, cos, sin)
        from_latent = keys_values.view(*heads, plain + sizes.values)
        k, v = torch.empty_like(q).view(*heads, sizes.width), q.new_zeros(*heads, sizes.value_dim)
        k[..., :plain] = from_latent[..., :plain]
        k[..., plain:] = shared
        v[..., : sizes.values] = from_latent[..., plain:]
        return q, k.view_as(q), v.flatten(2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_q: Tensor, grad_k: Tensor, grad_v: Tensor) -> tuple[Tensor | None, ...]:
        (cos, sin), sizes = ctx.tables, ctx.sizes
        plain, heads = sizes.plain, (*grad_q.shape[:2], sizes.groups, 1)
        # a copy, since hooks and other consumers may hold the gradient
        grad_q = grad_q.clone(memory_format=torch.contiguous_format)
        rotate_pairs_(grad_q.view(*heads, sizes.width)[..., plain:], cos, -sin)
        if ctx.factor is not None:
            grad_q.mul_(ctx.factor.flatten(2))
        grad_k, grad_v = grad_k.reshape(*heads, sizes.width), grad_v.reshape(*heads, sizes.value_dim)
        grad_both = torch.cat((grad_k[..., :plain], grad_v[..., : sizes.values]), dim=-1).flatten(2)
        shared = grad_k[..., plain:].sum((2, 3), dtype=at_least_fp32(grad_k.dtype), keepdim=True)
        rotate_pairs_(shared, cos, -sin)
        return grad_q, grad_both, shared.flatten(2).to(grad_k.dtype), None, None, None, None
