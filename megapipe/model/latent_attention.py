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

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megapipe.config.config import ResolvedModelConfig
from megapipe.model.attention import SelfAttention
from megapipe.model.context import LayerContext, rotate_pairs_
from megapipe.model.core_attention import CoreAttention
from megapipe.model.layer_factory import LayerFactory
from megapipe.tensor_parallel.gemms import at_least_fp32, gathered, summed
from megapipe.tensor_parallel.gradients import InputRecompute


class LatentAttention(SelfAttention):
    """Latent attention: [s, b, h] (a slice of s with sequence parallelism) -> the same shape."""

    def __init__(self, layer: int, factory: LayerFactory) -> None:
        nn.Module.__init__(self)
        config, tp = factory.config, factory.tp
        self.config, self.layer = config, layer
        self.softmax_offset = None
        self.tp, self.sequence_parallel = tp, factory.sequence_parallel
        self.recompute_core = "core_attn" in factory.recompute
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

    def forward(self, x: Tensor, context: LayerContext, recompute: InputRecompute | None = None) -> Tensor:
        """recompute: how the linears of x recompute it in the backward, instead of saving it."""
        config = self.config
        if config.q_lora_rank is None:
            q = self.linear_q_proj(x, recompute)
        else:
            q = self.linear_q_up_proj(self.q_layernorm(self.linear_q_down_proj(x, recompute)))
        latent, shared_key = self.linear_kv_down_proj(x, recompute).split(
            (config.kv_lora_rank, config.qk_pos_emb_head_dim), dim=-1
        )
        latent = self.kv_layernorm(latent).contiguous()  # without a norm a copy, so that the rest is not kept
        assert context.rotary is not None
        q, k, v = _Heads.apply(q, self.linear_kv_up_proj(latent), shared_key, *context.rotary, self)
        q, k, v = (x.view(*x.shape[:2], self.groups, 1, -1) for x in (q, k, v))
        return self.attend(q, k, v, context)


def _latent_norm(factory: LayerFactory, config: ResolvedModelConfig, size: int) -> nn.Module:
    """Build the norm of a latent, if latents are normalized."""
    return factory.norm(size, config.latent_norm_epsilon) if config.qk_layernorm else nn.Identity()


class _Heads(Function):
    """Rotated q in place, k of all heads, and v, perhaps with zeros up to k's width. Saves nothing but rotary tables.

    q: [s, b, n (dn + dr)]; keys_values: [s, b, n (dn + dv)]; shared_key: [s, b, dr], a slice of s with sequence
    parallelism. Returns q and k, [s, b, n (dn + dr)], and v, [s, b, n value_dim].
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, keys_values: Tensor, shared_key: Tensor, cos: Tensor, sin: Tensor, owner: LatentAttention
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.tables, ctx.owner = (cos, sin), owner  # constants shared by all layers, not activations
        ctx.mark_dirty(q)
        config, width = owner.config, owner.head_dim
        plain, heads = config.qk_head_dim, (*q.shape[:2], owner.groups, 1)
        rotate_pairs_(q.view(*heads, width)[..., plain:], cos, sin)
        shared = gathered(shared_key, owner.tp) if owner.sequence_parallel else shared_key.clone()
        shared = shared.view(*q.shape[:2], 1, 1, -1)
        rotate_pairs_(shared, cos, sin)
        from_latent = keys_values.view(*heads, plain + config.v_head_dim)
        k, v = torch.empty_like(q).view(*heads, width), q.new_zeros(*heads, owner.value_dim)
        k[..., :plain] = from_latent[..., :plain]
        k[..., plain:] = shared
        v[..., : config.v_head_dim] = from_latent[..., plain:]
        return q, k.view_as(q), v.flatten(2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_q: Tensor, grad_k: Tensor, grad_v: Tensor) -> tuple[Tensor | None, ...]:
        (cos, sin), owner = ctx.tables, ctx.owner
        config, width = owner.config, owner.head_dim
        plain, heads = config.qk_head_dim, (*grad_q.shape[:2], owner.groups, 1)
        # a copy, since hooks and other consumers may hold the gradient
        grad_q = grad_q.clone(memory_format=torch.contiguous_format)
        rotate_pairs_(grad_q.view(*heads, width)[..., plain:], cos, -sin)
        grad_k, grad_v = grad_k.reshape(*heads, width), grad_v.reshape(*heads, owner.value_dim)
        grad_both = torch.cat((grad_k[..., :plain], grad_v[..., : config.v_head_dim]), dim=-1).flatten(2)
        shared = grad_k[..., plain:].sum((2, 3), dtype=at_least_fp32(grad_k.dtype), keepdim=True)
        rotate_pairs_(shared, cos, -sin)
        shared = shared.flatten(2).to(grad_k.dtype)
        if owner.tp.size > 1:
            shared = summed(shared, owner.tp, owner.sequence_parallel)
        return grad_q, grad_both, shared, None, None, None
