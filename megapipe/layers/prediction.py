"""Multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2): modules that predict tokens further ahead.

Module d sees at position i the hidden state of the module before it (of the model for the first one) and the token at
position i + d, and predicts the token after that:

    x_d  = eh_proj [norm(embedding(token at i + d)) ; norm(h_{d-1})]
    h_d  = norm(layer(x_d))
    loss of the shared output layer of h_d against the token at i + d + 1

The layer is of the kind of the model's last one. Embedding and output layer are the model's, so that all is on the
last stage. h_0 is the input of the model's output layer. Names are Megatron-Core's.
"""

from __future__ import annotations

from dataclasses import dataclass

from megapipe.config.config import ResolvedModelConfig
from megapipe.config.model import NORMALIZATIONS
from megapipe.layers.table import RankShape


@dataclass(frozen=True, eq=False)
class PredictionTable:
    """The parts of a module around its transformer layer: two norms and eh_proj before it; norm, output layer, loss.

    number: of the module, from 0.
    """

    model: ResolvedModelConfig
    number: int
    is_fp8: bool  # eh_proj multiplies in 8 bits

    @property
    def prefix(self) -> str:
        return f"mtp.layers.{self.number}."

    @property
    def layer_prefix(self) -> str:
        """The names of the parameters of its transformer layer begin with this."""
        return f"{self.prefix}transformer_layer."

    def kept_bytes(self, shape: RankShape) -> int:
        """Return what is kept of the embedding of the next tokens, the norms and the input of eh_proj."""
        statistics = 2 * NORMALIZATIONS[self.model.normalization].statistics * shape.own_tokens * shape.wide
        return 3 * shape.hidden_bytes(self.model.hidden_size) + statistics
