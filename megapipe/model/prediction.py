"""`Prediction`: one module of multi-token prediction (`layers.prediction` describes it)."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from megapipe.config.parallel import RecomputeConfig
from megapipe.model.block import Block
from megapipe.model.context import LayerContext
from megapipe.model.layer_factory import LayerFactory
from megapipe.model.recompute import KeptAttention, RecomputedSegment


class Prediction(nn.Module):
    """Norms of embedding and hidden states, eh_proj, one transformer layer, final norm. layer: its global number.

    (hidden states of the module before, embedding of the tokens ahead) -> hidden states for the output layer, all
    [s, b, h] (a slice of s with sequence parallelism).
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
            kept = KeptAttention() if self.keeps_attention else None
            run = partial(self.transformer_layer, context=context.keeping(kept))
            hidden = RecomputedSegment(run, kept)(hidden)
        else:
            hidden = self.transformer_layer(hidden, context)
        return self.final_layernorm(hidden)
