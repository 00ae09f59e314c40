"""The first part of the model: word embeddings, learned positions, dropout."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megapipe.comm.groups import Group
from megapipe.config.config import ResolvedModelConfig
from megapipe.errors import DataError
from megapipe.model.microbatch import Microbatch
from megapipe.tensor_parallel.embedding import VocabParallelEmbedding
from megapipe.tensor_parallel.gemms import slice_length
from megapipe.tensor_parallel.gradients import WeightQueue
from megapipe.tensor_parallel.random import EMBEDDING_LAYER, keyed_dropout


class PositionEmbeddings(nn.Module):
    """A table of learned positions, weight [max_position_embeddings, h], replicated over tp."""

    def __init__(self, num_positions: int, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_positions, hidden, device="meta"))


class Embedding(nn.Module):
    """Tokens -> [s, b, h], with sequence parallelism this rank's slice [s / tp, b, h].

    Saves position ids where given.
    """

    def __init__(self, config: ResolvedModelConfig, tp: Group, *, sequence_parallel: bool, queue: WeightQueue) -> None:
        super().__init__()
        hidden_size = config.hidden_size
        self.tp, self.sequence_parallel = tp, sequence_parallel
        self.dropout_rate = config.hidden_dropout
        self.dropout_rank = tp.rank if sequence_parallel else None
        self.word_embeddings = VocabParallelEmbedding(
            config.padded_vocab_size, hidden_size, tp, sequence_parallel, true_vocab_size=config.vocab_size, queue=queue
        )
        self.position_embeddings: PositionEmbeddings | None = None
        if config.position_embedding_type == "learned_absolute":
            self.position_embeddings = PositionEmbeddings(config.max_position_embeddings, hidden_size)

    def forward(self, microbatch: Microbatch) -> Tensor:
        hidden = self.word_embeddings(microbatch.tokens)
        if self.position_embeddings is not None:
            hidden = hidden + self._positions(self.position_embeddings.weight, microbatch)
        return keyed_dropout(
            hidden, self.dropout_rate, microbatch.dropout_key, EMBEDDING_LAYER, "embedding", self.dropout_rank
        )

    def _positions(self, table: Tensor, microbatch: Microbatch) -> Tensor:
        """Return the position embeddings of this rank's slice of the sequence, [s(/ tp), 1 or b, h].

        With sequence parallelism the gradient of the table is partial.
        """
        seq, ids = microbatch.tokens.shape[1], microbatch.position_ids
        if seq > table.shape[0]:
            raise DataError(f"a sequence of {seq} tokens is longer than --max-position-embeddings {table.shape[0]}")
        rows = table[:seq].unsqueeze(1) if ids is None else ids.t()  # [s, 1, h], or ids [s, b]
        if self.sequence_parallel:
            length = slice_length(rows, self.tp)
            rows = rows.narrow(0, self.tp.rank * length, length)
        return rows if ids is None else nn.functional.embedding(rows, table)
