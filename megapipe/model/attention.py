"""Self-attention of one layer on one tp rank: projections, qk-norm, rotation, core attention. Used by `block`.

linear_qkv's rows come in Megatron's order, one block a query group: [q_0 .. q_{n-1}, k, v] x head_dim. With fewer key/value heads than tp,
neighbours share one: each holds its own query heads and a replica of k and v.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from megapipe.model.context import LayerContext
from megapipe.model.core_attention import explicit_attention, fused_attention
from megapipe.model.parts import Parts
from megapipe.model.recompute import Replay, remaking
from megapipe.model.rotary import rotate_
from megapipe.tensor_parallel.random import DropoutKey, keyed_dropout
from megapipe.tensor_parallel.weight_gradient import Remake


class SelfAttention(nn.Module):
    """x: [s, b, h] (a slice of s under sequence parallelism) -> the same shape."""

    def __init__(self, layer: int, parts: Parts) -> None:
        super().__init__()
        config, tp = parts.config, parts.tp
        assert config.kv_channels is not None and config.num_query_groups is not None
        self.config, self.layer, self.tp = config, layer, tp
        self.recompute_core = "core_attn" in parts.recompute
        self.head_dim = config.kv_channels
        self.groups = max(1, config.num_query_groups // tp.size)
        self.queries = config.num_attention_heads // tp.size // self.groups  # per group, on this rank
        self.scale = config.softmax_scale if config.softmax_scale is not None else self.head_dim**-0.5
        width = config.num_attention_heads * self.head_dim
        local_rows = (
            self.groups * (self.queries + 2) * self.head_dim
        )  # not 1 / tp of the whole where k and v are replicated
        qkv_bias = config.add_bias_linear or config.add_qkv_bias
        rows = width + 2 * config.num_query_groups * self.head_dim
        self.kernel = parts.attention(layer, self.queries, self.scale)
        self.linear_qkv = parts.column(layer, config.hidden_size, rows, bias=qkv_bias, local_out_features=local_rows)
        self.linear_proj = parts.row(layer, width, config.hidden_size, bias=config.add_bias_linear)
        if config.qk_layernorm:
            self.q_layernorm = parts.norm(self.head_dim)
            self.k_layernorm = parts.norm(self.head_dim)

    def forward(self, x: Tensor, context: LayerContext, remake: Remake | None = None) -> Tensor:
        """remake: how linear_qkv makes x again in the backward, instead of keeping it."""
        q, k, v = self._heads(self.linear_qkv(x, *remaking(remake)), context)
        if context.cache is not None:
            k, v = context.cache.extend(self.layer, k, v)
        core: Callable[[Tensor, Tensor, Tensor], Tensor] = partial(self._core, context=context)
        if context.attention is not None:
            core = partial(context.attention, core)
        if not self.recompute_core:
            return self.linear_proj(core(q, k, v))
        return Replay(core).into(self.linear_proj, q, k, v)

    def _heads(self, qkv: Tensor, context: LayerContext) -> tuple[Tensor, Tensor, Tensor]:
        """[s, b, groups (queries + 2) head_dim] -> q [s, b, groups, queries, head_dim], k and v [s, b, groups, 1, head_dim]."""
        normed, groups, queries, head_dim = self.config.qk_layernorm, self.groups, self.queries, self.head_dim
        if context.rotary is not None and not normed:
            qkv = rotate_(qkv, *context.rotary, groups, queries + 1, head_dim)
        q, k, v = qkv.view(*qkv.shape[:2], groups, queries + 2, head_dim).split((queries, 1, 1), dim=3)
        if normed:
            q, k = self.q_layernorm(q), self.k_layernorm(k)
            if context.rotary is not None:
                q = rotate_(q, *context.rotary, groups, queries, head_dim)
                k = rotate_(k, *context.rotary, groups, 1, head_dim)
        return q, k, v

    def _core(self, q: Tensor, k: Tensor, v: Tensor, context: LayerContext) -> Tensor:
        if self.kernel is not None and context.cache is None:
            return self.kernel(q, k, v)
        if not context.explicit:
            return fused_attention(q, k, v, context.mask, self.scale)
        assert context.mask is not None
        dropout = None
        if context.dropout_key is not None and self.config.attention_dropout > 0.0:
            dropout = partial(self._dropout, key=context.dropout_key)
        return explicit_attention(q, k, v, context.mask, self.scale, self.config.attn_logit_softcapping, dropout)

    def _dropout(self, probs: Tensor, key: DropoutKey) -> Tensor:
        return keyed_dropout(probs, self.config.attention_dropout, key, self.layer, "attention_probs", self.tp.rank)
