"""The interface of all tokenizers, and the two that need no files."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from megapipe.errors import ConfigError, DataError


class Tokenizer(Protocol):
    """Converts text to ids in 0 .. vocab_size - 1 and back.

    `decode(encode(text))` is the text again, except for what a type documents to normalize.
    """

    @property
    def name(self) -> str:
        """The value of --tokenizer-type."""
        ...

    @property
    def vocab_size(self) -> int:
        """Number of ids, including special tokens, without padding for tensor parallelism."""
        ...

    @property
    def eod(self) -> int | None:
        """The end-of-document token, or None if the vocabulary has none."""
        ...

    @property
    def bos(self) -> int | None:
        """The beginning-of-sequence token, if there is one."""
        ...

    @property
    def pad(self) -> int | None:
        """The padding token, if there is one."""
        ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of the ids, without special tokens."""
        ...

    def save(self, folder: Path) -> None:
        """Write the files that --tokenizer-model FOLDER reads, if any are needed."""
        ...


def files_of(tokenizer: Tokenizer) -> dict[str, bytes]:
    """Return the files that `save` writes: contents by name."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(Path(folder))
        return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir()) if path.is_file()}


class ByteTokenizer:
    """UTF-8 bytes as tokens: ids 0 .. 255, and 256 ends a document.

    Decoding a sequence that was cut inside a character shows U+FFFD there.
    """

    name = "ByteTokenizer"
    vocab_size = 257
    eod = 256
    bos = None
    pad = None

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")

    def save(self, folder: Path) -> None:
        """Do nothing."""


class NullTokenizer:
    """Text that consists of ids separated by spaces.

    --vocab-size N gives ids 0 .. N - 1, and N ends a document, so the vocabulary has N + 1 tokens, as in Megatron.
    """

    name = "NullTokenizer"
    bos = None
    pad = None

    def __init__(self, vocab_size: int) -> None:
        if vocab_size < 1:
            raise ConfigError(f"--vocab-size {vocab_size}: the NullTokenizer needs at least one token")
        self.vocab_size = vocab_size + 1
        self.eod = vocab_size

    def encode(self, text: str) -> list[int]:
        """Return the ids. Raises DataError for a word that is not a number below the vocabulary size."""
        ids = []
        for word in text.split():
            if not word.isdecimal() or int(word) >= self.vocab_size:
                raise DataError(f"the NullTokenizer reads numbers from 0 to {self.eod}, not {word[:40]!r}")
            ids.append(int(word))
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(str(i) for i in ids)

    def save(self, folder: Path) -> None:
        """Do nothing: --vocab-size is enough."""
