"""The ends of a model: the embedding, which is word and learned position tables and dropout; the head, which is final
norm, output layer over the padded vocabulary and cross entropy.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from megapipe.config.config import ResolvedModelConfig
from megapipe.layers.norm import NormTable
from megapipe.layers.table import RankShape
from megapipe.sharding.spec import Fused, Init, ParamSpec

WORD_EMBEDDING = "embedding.word_embeddings.weight"
POSITION_EMBEDDING = "embedding.position_embeddings.weight"


def loss_block_bytes(is_cuda: bool) -> int:
    """Return the bytes of fp32 to which the loss raises logits of half types at a time.

    CPUs: what their caches hold. CUDA: a block costs ten kernel launches, so few blocks.
    """
    return 1 << 27 if is_cuda else 1 << 23


@dataclass(frozen=True)
class EmbeddingTable:
    """The first part of a model. frozen: names of parameters of the model that are not trained."""

    model: ResolvedModelConfig
    frozen: frozenset[str] = frozenset()

    def parameters(self, sequence_parallel: bool) -> Iterator[ParamSpec]:
        """Yield the tables. Under sequence parallelism each tp rank sees only the positions of its tokens."""
        model, normal = self.model, Init("normal", self.model.init_method_std)
        yield ParamSpec(
            WORD_EMBEDDING,
            (model.padded_vocab_size, model.hidden_size),
            owner="embedding",
            slicing=Fused(0),
            init=normal,
            tied=model.has_embedding_at_both_ends,
            decoupled_lr=True,
            true_rows=model.vocab_size,
        )
        if model.position_embedding_type == "learned_absolute":
            shape, is_partial = (model.max_position_embeddings, model.hidden_size), sequence_parallel
            yield ParamSpec(POSITION_EMBEDDING, shape, owner="embedding", init=normal, partial_gradient=is_partial)


@dataclass(frozen=True)
class HeadTable:
    """The final norm, the output layer and the loss. Tied, the output layer uses the word embedding's table.

    frozen: names of parameters of the model that are not trained.
    """

    model: ResolvedModelConfig
    frozen: frozenset[str] = frozenset()

    @cached_property
    def norm(self) -> NormTable:
        return NormTable.of(self.model, "decoder.final_layernorm")

    def parameters(self, sequence_parallel: bool) -> Iterator[ParamSpec]:
        """Yield the final norm and, untied, the output layer's weight."""
        model = self.model
        yield from self.norm.parameters("", "head", sequence_parallel)
        if model.untie_embeddings_and_output_weights:
            yield ParamSpec(
                "output_layer.weight",
                (model.padded_vocab_size, model.hidden_size),
                owner="head",
                slicing=Fused(0),
                init=Init("normal", model.init_method_std),
                decoupled_lr=True,
                true_rows=model.vocab_size,
            )

    def logits(self, shape: RankShape) -> int:
        """Return the elements of the logits on one rank."""
        return shape.tokens * (self.model.padded_vocab_size // shape.tp)
