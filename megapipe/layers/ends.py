"""The ends of a model: the embedding, which is word and learned position tables and dropout; the head, which is final
norm, output layer over the padded vocabulary and cross entropy.
"""

from __future__ import annotations

from dataclasses import dataclass

from megapipe.config.config import ResolvedModelConfig
from megapipe.layers.table import RankShape

WORD_EMBEDDING = "embedding.word_embeddings.weight"


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


@dataclass(frozen=True)
class HeadTable:
    """The final norm, the output layer and the loss. Tied, the output layer uses the word embedding's table.

    frozen: names of parameters of the model that are not trained.
    """

    model: ResolvedModelConfig
    frozen: frozenset[str] = frozenset()

    def logits(self, shape: RankShape) -> int:
        """Return the elements of the logits on one rank."""
        return shape.tokens * (self.model.padded_vocab_size // shape.tp)
