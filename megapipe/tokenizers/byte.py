"""UTF-8 bytes as tokens: any text, no file, a vocabulary of 257."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


class ByteTokenizer:
    """Ids 0 .. 255 are bytes, 256 ends a document. Decoding a sequence cut inside a character shows U+FFFD there."""

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
        """Nothing to write."""
