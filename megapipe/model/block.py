"""`Block`: one transformer layer. `Prediction`: one module of multi-token prediction, which has one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megapipe.config.layers import LayerConfig
from megapipe.config.parallel import RecomputeConfig
from megapipe.model.attention import SelfAttention
from megapipe.model.context import LayerContext
from megapipe.model.latent_attention import LatentAttention
from megapipe.model.layer_factory import LayerFactory
from megapipe.model.mixer import Mixer
from megapipe.model.mlp import MLP
from megapipe.model.moe import MoE
from megapipe.model.norm import norm_element
from megapipe.model.recompute import KeptAttention, KeptResults, KeptTogether, RecomputedSegment
from megapipe.model.routing import KeptRouting
from megapipe.model.segments import Compiler, Element, Elements, Segment, run
from megapipe.tensor_parallel.random import dropped, keyed_mask


class Block(nn.Module):
    """One transformer layer: [s, b, h] (a slice of s with sequence parallelism) -> the same. layer: global index.

    x + norm(attention(norm(x))), then x + norm(mlp(norm(x))), with the parts and the norms that its configuration has.
    elements: of both branches, attention_branch and mlp_branch. Stages in parts run some of them at a time.
    """

    def __init__(self, layer: int, factory: LayerFactory) -> None:
        super().__init__()
        self.layer = layer
        self.dropout_rate, self.scale = factory.config.hidden_dropout, factory.config.residual_scale
        # masks differ over tp only where ranks hold different slices of the sequence
        self.dropout_rank = factory.tp.rank if factory.sequence_parallel else None
        self.self_attention: SelfAttention | Mixer | None = None
        self.mlp: MLP | MoE | None = None
        self.compiler: Compiler | None = None
        attention: Iterator[Element] = iter(())
        mlp: Iterator[Element] = iter(())
        if factory.config.has_attention or factory.config.mixer is not None:
            self.input_layernorm, after = factory.branch_norms()
            self.self_attention = _mixer(factory.config)(layer, factory)
            self.post_self_attn_layernorm = after
            attention = self.self_attention.elements(self._norm("input_layernorm"))
        if factory.config.has_mlp:
            self.pre_mlp_layernorm, after = factory.branch_norms()
            self.mlp = MLP(layer, factory) if factory.config.num_experts is None else MoE(layer, factory)
            self.post_mlp_layernorm = after
            mlp = self.mlp.elements(self._norm("pre_mlp_layernorm"))
        end = [*self._norm("post_self_attn_layernorm"), self._sum("attention_output")]
        mlp_end = [*self._norm("post_mlp_layernorm"), self._sum("mlp_output")]
        self.attention_branch = Elements([*attention, *(end if self.self_attention is not None else ())])
        self.mlp_branch = Elements([*mlp, *(mlp_end if self.mlp is not None else ())])
        self.elements = Elements([*self.attention_branch, *self.mlp_branch])

    def forward(
        self, hidden: Tensor, context: LayerContext, elements: Elements | None = None, values: tuple[Any, ...] = ()
    ) -> Any:
        """Run the layer: return the next residual stream. With `elements`, some of the layer's, return the stream and
        the values of the branch behind them. values: those before them; at the start of a branch none.

        Whatever runs of a layer is called here, since weights are waited for when a block is called.
        """
        if self.compiler is not None and self.compiler.accepts(hidden) and context.cache is None:
            context = replace(context, compiler=self.compiler)
        whole = self.elements if elements is None else elements
        stream, values = run(whole, hidden, values or (hidden,), context)
        if elements is None:
            return stream
        is_at_start = len(values) == 1 and values[0] is stream
        return (stream,) if is_at_start else (stream, *values)

    def _norm(self, name: str) -> Elements:
        """Return the element of a norm that the layer may have."""
        norm: nn.Module | None = getattr(self, name, None)
        return Elements(() if norm is None else [norm_element(name, norm)])

    def _sum(self, site: str) -> Element:
        """Return the residual sum that ends a branch. site: of its dropout."""
        rate = self.dropout_rate

        def mask(context: LayerContext, stream: Tensor) -> tuple[Tensor | None]:
            if rate == 0.0 or context.dropout_key is None:
                return (None,)
            place = self.layer, site, self.dropout_rank
            return (keyed_mask(stream.shape, rate, context.dropout_key, *place, stream.device),)

        return Segment("add", ResidualSum(self.scale / (1.0 - rate), self.scale), mask, joins=True)


def _mixer(config: LayerConfig) -> type[SelfAttention] | type[Mixer]:
    """Return the module of a layer's first branch."""
    if config.mixer is not None:
        module: type[Mixer] = config.mixer_kind.module
        return module
    return LatentAttention if config.multi_latent_attention else SelfAttention


@dataclass(frozen=True)
class ResidualSum:
    """(stream, update, mask of its dropout or None) -> stream + update x mask x kept_scale, or stream + update x scale
    without a mask; `update` is overwritten.
    """

    kept_scale: float
    scale: float = 1.0

    def __call__(self, stream: Tensor, update: Tensor, mask: Tensor | None) -> Tensor:
        if mask is not None:
            update = dropped(update, mask, self.kept_scale)
        elif self.scale != 1.0:
            update = update * self.scale
        # in place: it is the output of a linear, norm or dropout, which no operation saves
        return stream + update if torch.compiler.is_compiling() else update.add_(stream)


def keeping(
    blocks: Sequence[Block], contexts: Sequence[LayerContext], attention: bool
) -> tuple[list[LayerContext], KeptResults]:
    """Return the contexts of blocks that one checkpoint recomputes, and what keeps their results: the routing of
    experts, which the recompute would wait for again, and with `attention` the results of attention.
    """
    of_attention = KeptAttention() if attention else None
    routings = [KeptRouting() if isinstance(block.mlp, MoE) else None for block in blocks]
    own = [
        replace(context, kept_attention=of_attention, kept_routing=routing)
        for context, routing in zip(contexts, routings, strict=True)
    ]
    return own, KeptTogether([kept for kept in (of_attention, *routings) if kept is not None])


class Prediction(nn.Module):
    """A module of multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2). Names are Megatron-Core's.

    Module d sees at position i the hidden state of the module before it (of the model for the first one) and the token
    at position i + d, and predicts the token after that:

        x_d  = eh_proj [enorm(embedding(token at i + d)) ; hnorm(h_{d-1})]
        h_d  = final_layernorm(layer(x_d))
        loss of the model's output layer of h_d against the token at i + d + 1

    (hidden states of the module before, embedding of the tokens ahead) -> hidden states for the output layer, all
    [s, b, h] (a slice of s with sequence parallelism). layer: its global number.
    """

    def __init__(self, layer: int, factory: LayerFactory, recompute: RecomputeConfig) -> None:
        super().__init__()
        self.layer, size = layer, factory.config.hidden_size
        self.is_checkpointed = recompute.recompute_granularity == "full"
        self.keeps_attention = recompute.recompute_keep_attention
        self.enorm, self.hnorm = factory.norm(size), factory.norm(size)
        self.eh_proj = factory.replicated_linear(layer, 2 * size, size)
        self.transformer_layer = Block(layer, factory)
        self.final_layernorm = factory.norm(size)

    def forward(self, hidden: Tensor, embedded: Tensor, context: LayerContext) -> Tensor:
        hidden = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(hidden)), dim=-1))
        if self.is_checkpointed:
            (own,), kept = keeping([self.transformer_layer], [context], self.keeps_attention)
            hidden = RecomputedSegment(partial(self.transformer_layer, context=own), kept)(hidden)
        else:
            hidden = self.transformer_layer(hidden, context)
        return self.final_layernorm(hidden)
