"""Text that is numbers already."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from megapipe.errors import ConfigError, DataError


class NullTokenizer:
    """Ids separated by spaces. --vocab-size N gives ids 0 .. N - 1, and N ends a document, so the vocabulary has N + 1 tokens, as in
    Megatron."""

    name = "NullTokenizer"
    bos = None
    pad = None

    def __init__(self, vocab_size: int) -> None:
        if vocab_size < 1:
            raise ConfigError(f"--vocab-size {vocab_size}: the NullTokenizer needs at least one token")
        self.vocab_size = vocab_size + 1
        self.eod = vocab_size

    def encode(self, text: str) -> list[int]:
        """Raises DataError for a word that is no number below the vocabulary size."""
        ids = []
        for word in text.split():
            if not word.isdecimal() or int(word) >= self.vocab_size:
                raise DataError(f"the NullTokenizer reads numbers from 0 to {self.eod}, not {word[:40]!r}")
            ids.append(int(word))
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(str(i) for i in ids)

    def save(self, folder: Path) -> None:
        """Nothing to write: --vocab-size says it all."""
