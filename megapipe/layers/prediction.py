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

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from megapipe.config.config import ResolvedModelConfig
from megapipe.layers.norm import NormTable
from megapipe.layers.table import RankShape
from megapipe.sharding.spec import Init, ParamSpec


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

    @property
    def layer_number(self) -> int:
        """The number of its transformer layer, after those of the model."""
        return self.model.num_layers + self.number

    @cached_property
    def norms(self) -> tuple[NormTable, NormTable, NormTable]:
        """The norms of the embedding, of the hidden states, and of the layer's output."""
        embedding, hidden, final = (NormTable.of(self.model, name) for name in ("enorm", "hnorm", "final_layernorm"))
        return embedding, hidden, final

    def parameters_before(self, sequence_parallel: bool) -> Iterator[ParamSpec]:
        """Yield the parameters before the layer."""
        hidden, is_partial = self.model.hidden_size, sequence_parallel
        for norm in self.norms[:2]:
            yield from norm.parameters(self.prefix, "head", is_partial)
        init = Init("normal", self.model.init_method_std)
        yield ParamSpec(
            f"{self.prefix}eh_proj.weight",
            (hidden, 2 * hidden),
            "head",
            init=init,
            partial_gradient=is_partial,
            matrix="outputs x inputs",
        )

    def kept_bytes(self, shape: RankShape) -> int:
        """Return what is kept of the embedding of the next tokens, the norms and the input of eh_proj."""
        statistics = sum(norm.kind.statistics for norm in self.norms[:2]) * shape.own_tokens * shape.wide
        return 3 * shape.hidden_bytes(self.model.hidden_size) + statistics
