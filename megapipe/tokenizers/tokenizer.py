"""What a tokenizer is to everyone else."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol


class Tokenizer(Protocol):
    """Ids lie in 0 .. vocab_size - 1. `decode(encode(text))` is the text again, save for what a type says it normalises."""

    @property
    def name(self) -> str:
        """The value of --tokenizer-type that makes it."""
        ...

    @property
    def vocab_size(self) -> int:
        """All ids, special tokens included; without padding for tensor parallelism."""
        ...

    @property
    def eod(self) -> int | None:
        """The token that ends a document, or None where the vocabulary has none."""
        ...

    @property
    def bos(self) -> int | None:
        """The token that begins a text, if there is one."""
        ...

    @property
    def pad(self) -> int | None:
        """The token that fills up, if there is one."""
        ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the ids; special tokens give none."""
        ...

    def save(self, folder: Path) -> None:
        """Write the files that --tokenizer-model FOLDER reads again; nothing, where none are needed."""
        ...


def files_of(tokenizer: Tokenizer) -> dict[str, bytes]:
    """What `save` writes: contents by name; empty where no files are needed."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(Path(folder))
        return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir()) if path.is_file()}
