"""Self-attention of one layer on one tp rank: projections, qk-norm, rotation, core attention softmax(scale q k^T) v.

linear_qkv's rows are in Megatron's order, one block per query group: [q_0 .. q_{n-1}, k, v] x head_dim. With fewer
key/value heads than tp ranks, neighbouring ranks share one: each holds its own query heads and a replica of k and v.

Shapes: s sequence, b batch, g key/value heads, n query heads per key/value head, d head_dim, all of this rank.
q: [s, b, g, n, d]; k, v: [s, b, g, 1, d]. Result: [s, b, h] (a slice of s with sequence parallelism).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from megapipe.model.context import LayerContext, rotate_
from megapipe.model.core_attention import CoreAttention
from megapipe.model.layer_factory import LayerFactory
from megapipe.model.norm import Norm, NormFunction
from megapipe.model.segments import NOTHING, Element, Elements, Operator, Segment, again_if, linear_element


class SelfAttention(nn.Module):
    """Self-attention: elements from [s, b, h] (a slice of s with sequence parallelism) to the same shape."""

    def __init__(self, layer: int, factory: LayerFactory) -> None:
        super().__init__()
        config, tp = factory.config, factory.tp
        self.config, self.layer = config, layer
        self.recompute = factory.recompute
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

    def elements(self, norm: Elements = NOTHING) -> Iterator[Element]:
        """Yield the elements of the branch. norm: those before linear_qkv, which may be recomputed."""
        yield from again_if("layernorm" in self.recompute, norm)
        yield linear_element("linear_qkv", self.linear_qkv)
        yield self._heads()
        yield from again_if("core_attn" in self.recompute, Elements([self.core_element]))
        yield linear_element("linear_proj", self.linear_proj)

    @property
    def core_element(self) -> Element:
        """Core attention."""
        return Operator("core_attention", lambda context, q, k, v: self.core.of(context, self.softmax_offset)(q, k, v))

    def _heads(self) -> Element:
        """Return the element that splits, norms and rotates heads: a segment, unless its norms are none."""
        heads = Heads(self.groups, self.queries, self.head_dim)
        if not self.config.qk_layernorm:
            if self.config.rotary is None:
                return Operator("heads", lambda context, qkv: heads(qkv))  # views alone
            return Segment("heads", heads, lambda context, like: context.rotary)
        q_norm, k_norm = self.q_layernorm, self.k_layernorm
        if not (isinstance(q_norm, Norm) and isinstance(k_norm, Norm) and q_norm.is_pure):
            return Operator("heads", lambda context, qkv: heads(qkv, *(context.rotary or ()), norms=(q_norm, k_norm)))
        normed = replace(heads, norm=q_norm.function)

        def operands(context: LayerContext, like: Tensor) -> tuple[Tensor | None, ...]:
            return *(context.rotary or (None, None)), q_norm.weight, q_norm.bias, k_norm.weight, k_norm.bias

        return Segment("heads", normed, operands)


@dataclass(frozen=True)
class Heads:
    """Splits [s, b, g (n + 2) d] into q [s, b, g, n, d] and k, v [s, b, g, 1, d], normed and rotated.

    norm: of q and of k, with the weights given.
    """

    groups: int
    queries: int
    head_dim: int
    norm: NormFunction | None = None

    def __call__(
        self,
        qkv: Tensor,
        cos: Tensor | None = None,
        sin: Tensor | None = None,
        *weights: Tensor | None,  # and biases, of the norms of q and of k
        norms: tuple[nn.Module, nn.Module] | None = None,  # in place of `norm`
    ) -> tuple[Tensor, Tensor, Tensor]:
        groups, queries, head_dim, compiles = self.groups, self.queries, self.head_dim, torch.compiler.is_compiling()
        normed = norms is not None or self.norm is not None
        if cos is not None and sin is not None and not normed and not compiles:
            qkv = rotate_(qkv, cos, sin, groups, queries + 1, head_dim)  # q and k at once, in place
        q, k, v = qkv.view(*qkv.shape[:2], groups, queries + 2, head_dim).split((queries, 1, 1), dim=3)
        if norms is not None:
            q, k = norms[0](q), norms[1](k)
        elif self.norm is not None:
            q, k = self.norm(q, *weights[:2]), self.norm(k, *weights[2:])  # type: ignore[arg-type]
        if cos is None or sin is None:
            return q, k, v
        if compiles:
            # v is written in the same pass; as a view it would keep all of qkv for the backward
            return rotated(q, cos, sin), rotated(k, cos, sin), v.contiguous()
        if normed:
            q, k = rotate_(q, cos, sin, groups, queries, head_dim), rotate_(k, cos, sin, groups, 1, head_dim)
        return q, k, v


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return the rotation of the first channels of each head, as many as the tables have, for a graph of torch.compile.

    `rotate_` writes in place, which a graph would do by a copy.
    """
    half = cos.shape[-1]
    first, second = x[..., :half].to(cos.dtype), x[..., half : 2 * half].to(cos.dtype)
    turned = [(first * cos - second * sin).to(x.dtype), (second * cos + first * sin).to(x.dtype)]
    return torch.cat([*turned, *([x[..., 2 * half :]] if x.shape[-1] > 2 * half else [])], dim=-1)
