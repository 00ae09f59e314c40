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
from dataclasses import dataclass, replace
from functools import cached_property

from megapipe.config.config import ResolvedModelConfig
from megapipe.layers.ends import EmbeddingTable, HeadTable
from megapipe.layers.linear import weight_gradient_bytes
from megapipe.layers.norm import NormTable
from megapipe.layers.table import Backward, Gemm, Kept, Operation, RankShape, Table
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

    @property
    def gemm(self) -> Gemm:
        """eh_proj. Every tp rank holds it whole, for its own tokens."""
        return Gemm(2 * self.model.hidden_size, self.model.hidden_size, True, self.is_fp8, is_replicated=True)

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

    def projection_table(self, shape: RankShape) -> Table:
        """Return what one microbatch does on one rank before the layer."""
        hidden, splits = shape.hidden_bytes(self.model.hidden_size), shape.splits_backward
        embedding, previous, _ = self.norms
        vectors = shape.own_tokens * self.model.hidden_size
        lookup = EmbeddingTable(self.model).table(shape).operations[0]
        waits = 3 * hidden if splits else 0  # eh_proj's input and the gradient of its output
        norm_backward = Backward(
            2 * hidden + hidden + max(embedding.gradient_bytes(shape), previous.gradient_bytes(shape))
        )
        operations = (
            replace(lookup, name="next_word_embeddings"),
            Operation(
                "enorm",
                (Kept("next embeddings", vectors, shape.element), *embedding.statistics(shape.own_tokens, shape)),
                backward=norm_backward,
            ),
            Operation("hnorm", previous.statistics(shape.own_tokens, shape), backward=norm_backward),
            Operation(
                "eh_proj",
                (Kept("eh_proj inputs", 2 * vectors, shape.element),),
                gemm=self.gemm,
                deferred_bytes=3 * hidden,
                backward=Backward(2 * hidden + weight_gradient_bytes(self.gemm, shape), 0 if splits else 2 * hidden),
            ),
        )
        return Table(operations, hidden + waits, weight_gradient_bytes(self.gemm, shape))

    def head_table(self, shape: RankShape) -> Table:
        """Return what one microbatch does on one rank after the layer: always with a loss mask."""
        masked = replace(shape, documents=replace(shape.documents, loss_mask=True))
        return HeadTable(self.model).table(masked)
