"""One transformer layer, pre-norm: x + dropout(attention(norm(x))), then x + dropout(mlp(norm(x)))."""

from __future__ import annotations

from torch import Tensor, nn

from megapipe.comm.groups import Group
from megapipe.config.model import ModelConfig
from megapipe.model.attention import SelfAttention
from megapipe.model.context import LayerContext
from megapipe.model.mlp import MLP
from megapipe.model.norm import again
from megapipe.model.parts import Parts
from megapipe.tensor_parallel.random import DropoutKey, keyed_dropout
from megapipe.tensor_parallel.weight_gradient import Remake


class Block(nn.Module):
    """hidden: [s, b, h] (a slice of s under sequence parallelism) -> the same shape. layer: global index."""

    def __init__(self, layer: int, parts: Parts) -> None:
        super().__init__()
        self.layer = layer
        self.recompute_norm = "layernorm" in parts.recompute
        self.dropout = HiddenDropout(parts.config, parts.tp, parts.sequence_parallel)
        self.input_layernorm = parts.norm(parts.config.hidden_size)
        self.self_attention = SelfAttention(layer, parts)
        self.pre_mlp_layernorm = parts.norm(parts.config.hidden_size)
        self.mlp = MLP(layer, parts)

    def forward(self, hidden: Tensor, context: LayerContext) -> Tensor:
        remake = Remake(again(self.input_layernorm), (hidden,)) if self.recompute_norm else None
        update = self.self_attention(self.input_layernorm(hidden), context, remake)
        # in place: the update is the output of a linear or of a dropout, which nothing keeps
        hidden = self.dropout(update, context.dropout_key, self.layer, "attention_output").add_(hidden)
        update = self.mlp(hidden, self.pre_mlp_layernorm)
        return self.dropout(update, context.dropout_key, self.layer, "mlp_output").add_(hidden)


class HiddenDropout:
    """Dropout of the residual stream. Streams differ over tp only where ranks hold different slices of the sequence."""

    def __init__(self, config: ModelConfig, tp: Group, sequence_parallel: bool) -> None:
        self.rate = config.hidden_dropout
        self.tp_rank = tp.rank if sequence_parallel else None

    def __call__(self, x: Tensor, key: DropoutKey | None, layer: int, site: str) -> Tensor:
        """key None: no dropout. layer -1: the embedding."""
        if key is None or self.rate == 0.0:
            return x
        return keyed_dropout(x, self.rate, key, layer, site, self.tp_rank)
