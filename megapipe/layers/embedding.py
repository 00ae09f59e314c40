"""The embedding: word and learned position tables, and dropout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megapipe.config.config import ResolvedModelConfig
from megapipe.layers.table import ALL_REDUCE, MASK_BYTES, Backward, Collectives, Kept, Operation, RankShape, Table
from megapipe.sharding.spec import Fused, Init, ParamSpec

WORD_EMBEDDING = "embedding.word_embeddings.weight"
POSITION_EMBEDDING = "embedding.position_embeddings.weight"


@dataclass(frozen=True)
class EmbeddingTable:
    """The first part of a model."""

    model: ResolvedModelConfig

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

    def table(self, shape: RankShape) -> Table:
        """Return what one microbatch does on one rank.

        The rows of the vocabulary are split over the tp ranks, so the output is a sum over tp; under sequence
        parallelism W gathers its gradient.
        """
        hidden = self.model.hidden_size
        dropout = Kept("dropout masks", shape.own_tokens * hidden, MASK_BYTES)
        lookup = Operation(
            "word_embeddings",
            (dropout,) if self.model.hidden_dropout > 0 else (),
            collectives=Collectives(1, 0, 1) if shape.sequence_parallel else Collectives(ALL_REDUCE),
            deferred_bytes=shape.hidden_bytes(hidden),
            backward=Backward(shape.gathered_bytes(hidden) + shape.tokens * hidden * shape.gradient),
        )
        return Table((lookup,))
