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
class Embedding:
    """The first part of a model.

    positions: rows of the position table, 0 without learned positions. is_tied: the head uses the table too.
    """

    hidden: int
    vocab: int  # padded
    true_vocab: int
    positions: int
    is_tied: bool
    has_hidden_dropout: bool
    std: float

    @classmethod
    def of(cls, model: ResolvedModelConfig) -> Embedding:
        """Return the embedding of a resolved model."""
        has_positions = model.position_embedding_type == "learned_absolute"
        return cls(
            hidden=model.hidden_size,
            vocab=model.padded_vocab_size,
            true_vocab=model.vocab_size,
            positions=model.max_position_embeddings if has_positions else 0,
            is_tied=not model.untie_embeddings_and_output_weights,
            has_hidden_dropout=model.hidden_dropout > 0,
            std=model.init_method_std,
        )

    def parameters(self, sequence_parallel: bool) -> Iterator[ParamSpec]:
        """Yield the tables. Under sequence parallelism each tp rank sees only the positions of its tokens."""
        normal = Init("normal", self.std)
        yield ParamSpec(
            WORD_EMBEDDING,
            (self.vocab, self.hidden),
            owner="embedding",
            slicing=Fused(0),
            init=normal,
            tied=self.is_tied,
            decoupled_lr=True,
            true_rows=self.true_vocab,
        )
        if self.positions:
            shape, is_partial = (self.positions, self.hidden), sequence_parallel
            yield ParamSpec(POSITION_EMBEDDING, shape, owner="embedding", init=normal, partial_gradient=is_partial)

    def table(self, shape: RankShape) -> Table:
        """Return what one microbatch does on one rank.

        The rows of the vocabulary are split over the tp ranks, so the output is a sum over tp; under sequence
        parallelism W gathers its gradient.
        """
        dropout = Kept("dropout masks", shape.own_tokens * self.hidden, MASK_BYTES)
        gradient = shape.gathered_bytes(self.hidden) + shape.tokens * self.hidden * shape.wide
        lookup = Operation(
            "word_embeddings",
            (dropout,) if self.has_hidden_dropout else (),
            collectives=Collectives(1, 0, 1) if shape.sequence_parallel else Collectives(ALL_REDUCE),
            deferred_bytes=shape.hidden_bytes(self.hidden),
            backward=Backward(gradient),
        )
        return Table((lookup,))
