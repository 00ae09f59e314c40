"""The interface of all tokenizers, the two that need no files, and `--tokenizer-type` and its files -> a tokenizer."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from megapipe.config.fields import nearest
from megapipe.errors import ConfigError, DataError
from megapipe.tokenizers.hugging_face import (
    TOKENIZER_FILE,
    GPT2BPETokenizer,
    HuggingFaceTokenizer,
    TransformersTokenizer,
)
from megapipe.tokenizers.sentencepiece import GPTSentencePieceTokenizer, Llama2Tokenizer, SentencePieceTokenizer


class Tokenizer(Protocol):
    """Converts text to ids in 0 .. vocab_size - 1 and back, unchanged but for what a type documents to normalize."""

    name: str  # the value of --tokenizer-type
    vocab_size: int  # number of ids, including special tokens, without padding for tensor parallelism
    eod: int | None  # the end-of-document token, if the vocabulary has one
    bos: int | None  # the beginning-of-sequence token
    pad: int | None  # the padding token

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
    """UTF-8 bytes as tokens: ids 0 .. 255, and 256 ends a document. A character that was cut is decoded as U+FFFD."""

    name = "ByteTokenizer"
    vocab_size = 257
    eod: int | None = 256
    bos: int | None = None
    pad: int | None = None

    def encode(self, text: str) -> list[int]:
        return list(text.encode("utf-8"))

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", errors="replace")

    def save(self, folder: Path) -> None:
        """Do nothing."""


class NullTokenizer:
    """Ids separated by spaces: 0 .. N - 1 for --vocab-size N, and N ends a document: N + 1 tokens, as in Megatron."""

    name = "NullTokenizer"
    bos: int | None = None
    pad: int | None = None

    def __init__(self, vocab_size: int) -> None:
        if vocab_size < 1:
            raise ConfigError(f"--vocab-size {vocab_size}: the NullTokenizer needs at least one token")
        self.vocab_size = vocab_size + 1
        self.eod: int | None = vocab_size

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


FROM_MODEL = {
    kind.name: kind
    for kind in (GPTSentencePieceTokenizer, HuggingFaceTokenizer, Llama2Tokenizer, SentencePieceTokenizer)
}
TOKENIZERS = sorted([*FROM_MODEL, ByteTokenizer.name, GPT2BPETokenizer.name, NullTokenizer.name])


def build_tokenizer(
    tokenizer_type: str,
    tokenizer_model: str | None = None,
    vocab_size: int | None = None,
    vocab_file: str | None = None,
    merge_file: str | None = None,
) -> Tokenizer:
    """Build a tokenizer. Raises ConfigError for an unknown type or a missing flag, DataError for an invalid file."""
    if tokenizer_type not in TOKENIZERS:
        meant = nearest(tokenizer_type, TOKENIZERS)
        raise ConfigError(f"unknown --tokenizer-type {tokenizer_type}{meant} (known are {', '.join(TOKENIZERS)})")
    if tokenizer_type == ByteTokenizer.name:
        return ByteTokenizer()
    if tokenizer_type == NullTokenizer.name:
        if vocab_size is None:
            raise ConfigError("--tokenizer-type NullTokenizer needs --vocab-size")
        return NullTokenizer(vocab_size)
    if tokenizer_type == GPT2BPETokenizer.name:
        if vocab_file is not None and merge_file is not None:
            return GPT2BPETokenizer(vocab_file, merge_file)
        if tokenizer_model is not None and Path(tokenizer_model).is_dir():
            return GPT2BPETokenizer(Path(tokenizer_model) / "vocab.json", Path(tokenizer_model) / "merges.txt")
        raise ConfigError("--tokenizer-type GPT2BPETokenizer needs --vocab-file and --merge-file")
    if tokenizer_model is None:
        raise ConfigError(f"--tokenizer-type {tokenizer_type} needs --tokenizer-model")
    if tokenizer_type == HuggingFaceTokenizer.name:
        model = Path(tokenizer_model)
        if not model.is_file() and not (model / TOKENIZER_FILE).is_file():
            return TransformersTokenizer(tokenizer_model)
    return FROM_MODEL[tokenizer_type](tokenizer_model)
