"""VocabularySlice: the rows of the padded vocabulary that one tp rank holds; used by the embedding and by the cross entropy."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megapipe.errors import ConfigError, DataError


@dataclass(frozen=True)
class VocabularySlice:
    """Rows [first, first + num_rows) of the padded vocabulary; the first `num_true` of them are words, the rest padding."""

    first: int
    num_rows: int
    num_true: int

    @classmethod
    def of(cls, padded_size: int, true_size: int, tp_rank: int, tp: int) -> VocabularySlice:
        """Equal slices of padded_size rows. Raises ConfigError if tp does not divide padded_size or true_size exceeds it."""
        if padded_size % tp:
            raise ConfigError(
                f"a vocabulary of {padded_size} rows cannot be cut over {tp} tensor-parallel ranks; "
                f"raise --make-vocab-size-divisible-by so that it is padded to a multiple of {tp}"
            )
        if not 0 < true_size <= padded_size:
            raise ConfigError(f"the true vocabulary size {true_size} must lie in 1 .. {padded_size}, the padded size")
        num_rows = padded_size // tp
        return cls(tp_rank * num_rows, num_rows, min(max(true_size - tp_rank * num_rows, 0), num_rows))

    def local(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """(rows, is_here): local row of each id where is_here, elsewhere some valid row, spread over all of them.

        Spread, because accumulating many zeros into one row is slow where duplicates are added one after another (CUDA).
        """
        rows = ids - self.first
        is_here = (rows >= 0) & (rows < self.num_rows)
        return rows.remainder_(self.num_rows), is_here


def check_ids(ids: Tensor, size: int, what: str) -> None:
    """Refuse ids outside [0, size): they would silently be nobody's row. Raises DataError; on CUDA a device assertion."""
    if ids.is_cuda:
        torch._assert_async(((ids >= 0) & (ids < size)).all())  # no synchronisation
    elif ids.numel() and ids.device.type == "cpu":
        low, high = (int(v) for v in torch.aminmax(ids))
        if low < 0 or high >= size:
            raise DataError(
                f"{what} {low if low < 0 else high} lies outside the vocabulary of {size}; check that data and tokenizer belong together "
                "(positions that shall not count belong in the loss mask)"
            )
