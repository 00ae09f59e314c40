"""Self-attention of one layer on one tp rank: projections, qk-norm, rotation, core attention softmax(scale q k^T) v.

linear_qkv's rows are in Megatron's order, one block per query group: [q_0 .. q_{n-1}, k, v] x head_dim. With fewer
key/value heads than tp ranks, neighbouring ranks share one: each holds its own query heads and a replica of k and v.

Shapes: s sequence, b batch, g key/value heads, n query heads per key/value head, d head_dim, all of this rank.
q: [s, b, g, n, d]; k, v: [s, b, g, 1, d]. Result: [s, b, h] (a slice of s with sequence parallelism).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megapipe.model.context import LayerContext, rotate_
from megapipe.model.core_attention import CoreAttention
from megapipe.model.layer_factory import LayerFactory
from megapipe.model.recompute import RecomputedSegment
from megapipe.tensor_parallel.gradients import InputRecompute


class SelfAttention(nn.Module):
    """Self-attention: [s, b, h] (a slice of s with sequence parallelism) -> the same shape."""

    def __init__(self, layer: int, factory: LayerFactory) -> None:
        super().__init__()
        config, tp = factory.config, factory.tp
        self.config, self.layer = config, layer
        self.recompute_core = "core_attn" in factory.recompute
        self.head_dim = config.kv_channels
        self.groups = max(1, config.num_query_groups // tp.size)
        self.queries = config.num_attention_heads // tp.size // self.groups  # per group, on this rank
        self.core = CoreAttention(layer, factory, self.groups, self.queries, self.head_dim)
        width = config.num_attention_heads * self.head_dim
        rows = width + 2 * config.num_query_groups * self.head_dim
        local_rows = self.groups * (self.queries + 2) * self.head_dim  # > rows / tp where k and v are replicated
        qkv_bias = config.add_bias_linear or config.add_qkv_bias
        self.linear_qkv = factory.linear("column", layer, config.hidden_size, rows, qkv_bias, local_rows)
        self.linear_proj = factory.linear("row", layer, width, config.hidden_size, config.add_bias_linear)
        if config.qk_layernorm:
            self.q_layernorm = factory.qk_norm(self.groups * self.queries)
            self.k_layernorm = factory.qk_norm(self.groups)
        self.softmax_offset: nn.Parameter | None = None
        if config.softmax_type == "learnable":
            self.softmax_offset = nn.Parameter(torch.empty(self.groups * self.queries, device="meta"))

    def forward(self, x: Tensor, context: LayerContext, recompute: InputRecompute | None = None) -> Tensor:
        """recompute: how linear_qkv recomputes x in the backward, instead of saving it."""
        return self.attend(*self.split_heads(self.linear_qkv(x, recompute), context), context)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, context: LayerContext) -> Tensor:
        """Return core attention and its output projection."""
        core = self.core.of(context, self.softmax_offset)
        if self.recompute_core:
            return RecomputedSegment(core).then(self.linear_proj, q, k, v)
        return self.linear_proj(core(q, k, v))

    def split_heads(self, qkv: Tensor, context: LayerContext) -> tuple[Tensor, Tensor, Tensor]:
        """Split [s, b, g (n + 2) d] into q [s, b, g, n, d] and k, v [s, b, g, 1, d], normed and rotated."""
        normed, groups, queries, head_dim = self.config.qk_layernorm, self.groups, self.queries, self.head_dim
        if context.rotary is not None and not normed:
            qkv = rotate_(qkv, *context.rotary, groups, queries + 1, head_dim)  # q and k at once, in place
        q, k, v = qkv.view(*qkv.shape[:2], groups, queries + 2, head_dim).split((queries, 1, 1), dim=3)
        if normed:
            q, k = self.q_layernorm(q), self.k_layernorm(k)
            if context.rotary is not None:
                q = rotate_(q, *context.rotary, groups, queries, head_dim)
                k = rotate_(k, *context.rotary, groups, 1, head_dim)
        return q, k, v
