"""The model's first part: word embeddings, learned positions, dropout. Used by `stage`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megapipe.comm.groups import Group
from megapipe.config.model import ModelConfig
from megapipe.errors import DataError
from megapipe.model.block import HiddenDropout
from megapipe.model.microbatch import Microbatch
from megapipe.tensor_parallel.embedding import VocabParallelEmbedding
from megapipe.tensor_parallel.mappings import own_slice
from megapipe.tensor_parallel.random import EMBEDDING_LAYER
from megapipe.tensor_parallel.weight_queue import WeightQueue


class PositionEmbeddings(nn.Module):
    """A table of learned positions, weight [max_position_embeddings, h], on every tp rank."""

    def __init__(self, num_positions: int, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_positions, hidden, device="meta"))


class Embedding(nn.Module):
    """Tokens -> [s, b, h], under sequence parallelism this rank's slice [s / tp, b, h].

    Kept for the backward: position ids where given.
    """

    def __init__(self, config: ModelConfig, tp: Group, *, sequence_parallel: bool, queue: WeightQueue | None) -> None:
        super().__init__()
        assert config.padded_vocab_size is not None and config.max_position_embeddings is not None
        self.tp, self.sequence_parallel = tp, sequence_parallel
        self.dropout = HiddenDropout(config, tp, sequence_parallel)
        self.word_embeddings = VocabParallelEmbedding(
            config.padded_vocab_size,
            config.hidden_size,
            tp,
            sequence_parallel,
            true_vocab_size=config.vocab_size,
            queue=queue,
        )
        if config.position_embedding_type == "learned_absolute":
            self.position_embeddings: PositionEmbeddings | None = PositionEmbeddings(
                config.max_position_embeddings, config.hidden_size
            )
        else:
            self.position_embeddings = None

    def forward(self, microbatch: Microbatch) -> Tensor:
        hidden = self.word_embeddings(microbatch.tokens)
        if self.position_embeddings is not None:
            hidden = hidden + self._positions(self.position_embeddings.weight, microbatch)
        return self.dropout(hidden, microbatch.dropout_key, EMBEDDING_LAYER, "embedding")

    def _positions(self, table: Tensor, microbatch: Microbatch) -> Tensor:
        """The rows of this rank's slice of the sequence, [s(/ tp), 1 or b, h]: under sequence parallelism their gradient is partial."""
        seq = microbatch.tokens.shape[1]
        if seq > table.shape[0]:
            raise DataError(f"a sequence of {seq} tokens is longer than --max-position-embeddings {table.shape[0]}")
        rows = (
            table[:seq].unsqueeze(1) if microbatch.position_ids is None else microbatch.position_ids.t()
        )  # [s, 1, h] or ids [s, b]
        if self.sequence_parallel:
            rows = own_slice(rows, self.tp)
        return rows if microbatch.position_ids is None else nn.functional.embedding(rows, table)
