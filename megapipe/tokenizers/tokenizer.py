"""The interface of all tokenizers, the two that need no files, and `--tokenizer-type` and its files -> a tokenizer.

Also fingerprints of tokenizers: written with token files and checkpoints, compared wherever tokens meet a model. A
fingerprint is plain JSON: {"type": --tokenizer-type, "source": its path or null, "vocab_size": tokens, "eod": id or
null, "files": {name: SHA-256 of the whole content}}. `source` is for people. `files` are those that turn text into ids;
the special tokens of configuration files count by `eod`.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from megapipe.config.fields import unknown_name
from megapipe.config.files import TOKENIZER_TYPES
from megapipe.errors import ConfigError, DataError
from megapipe.tokenizers.hugging_face import (
    COMPANIONS,
    TOKENIZER_FILE,
    GPT2BPETokenizer,
    HuggingFaceTokenizer,
    from_transformers,
)
from megapipe.tokenizers.sentencepiece import GPTSentencePieceTokenizer, Llama2Tokenizer, SentencePieceTokenizer

NOT_IDS = frozenset(COMPANIONS) - {"added_tokens.json"}  # of the files: they do not change the ids of a text
COMPARED = ("type", "vocab_size", "eod", "files")
SHOWN_DIGITS = 8

Fingerprint = dict[str, Any]


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


def end_tokens(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the tokens that end a text: the end-of-document token, and those that the tokenizer's files name."""
    own = () if tokenizer.eod is None else (tokenizer.eod,)
    return tuple(dict.fromkeys((*own, *getattr(tokenizer, "ends", ()))))


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


SAMPLE_TEXT = "A text, with numbers 0 to 9.\n"  # that a tokenizer of an extension is tried on
FROM_MODEL = {
    kind.name: kind
    for kind in (GPTSentencePieceTokenizer, HuggingFaceTokenizer, Llama2Tokenizer, SentencePieceTokenizer)
}


def checked(tokenizer: Any, name: str) -> Tokenizer:
    """Return the tokenizer of an extension, with what it may leave out. Raises ConfigError.

    A text must give ids of the vocabulary. bos, eod and pad are None, and `save` does nothing, where it lacks them.
    """
    kind = type(tokenizer).__name__
    for word in ("encode", "decode", "vocab_size"):
        if not hasattr(tokenizer, word):
            raise ConfigError(f"--tokenizer-type {name}: {kind} has no {word}; see docs/extend.md")
    size, ids = tokenizer.vocab_size, list(tokenizer.encode(SAMPLE_TEXT))
    for attribute in ("eod", "bos", "pad"):
        if not hasattr(tokenizer, attribute):
            setattr(tokenizer, attribute, None)
    if not hasattr(tokenizer, "save"):
        tokenizer.save = lambda folder: None
    tokenizer.name = name
    special = [number for number in (tokenizer.eod, tokenizer.bos, tokenizer.pad) if number is not None]
    wrong = [number for number in (*ids, *special) if not 0 <= number < size]
    if wrong:
        raise ConfigError(f"--tokenizer-type {name}: token {wrong[0]} is outside its vocab_size of {size} tokens")
    found: Tokenizer = tokenizer
    return found


def build_tokenizer(
    tokenizer_type: str,
    tokenizer_model: str | None = None,
    vocab_size: int | None = None,
    vocab_file: str | None = None,
    merge_file: str | None = None,
) -> Tokenizer:
    """Build a tokenizer. Raises ConfigError for an unknown type or a missing flag, DataError for an invalid file."""
    if tokenizer_type not in TOKENIZER_TYPES:
        raise ConfigError(f"unknown --tokenizer-type {tokenizer_type}: {unknown_name(tokenizer_type, TOKENIZER_TYPES)}")
    build = TOKENIZER_TYPES[tokenizer_type].build
    if build is not None:
        return checked(build(tokenizer_model), tokenizer_type)
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
        if not model.is_file() and not (model / TOKENIZER_FILE).exists():
            return from_transformers(tokenizer_model)
    return FROM_MODEL[tokenizer_type](tokenizer_model)


def tokenizer_fingerprint(tokenizer: Tokenizer, source: str | None = None) -> Fingerprint:
    """Return the fingerprint of a tokenizer. source: the path that it was read from."""
    files = {name: content for name, content in files_of(tokenizer).items() if name not in NOT_IDS}
    if not files and tokenizer.name not in (ByteTokenizer.name, NullTokenizer.name):  # of an extension
        files = {"ids of a text": repr(list(tokenizer.encode(SAMPLE_TEXT))).encode()}
    return {
        "type": tokenizer.name,
        "source": source,
        "vocab_size": tokenizer.vocab_size,
        "eod": tokenizer.eod,
        "files": {name: hashlib.sha256(content).hexdigest() for name, content in sorted(files.items())},
    }


def is_same(one: Fingerprint, other: Fingerprint, *, with_eod: bool = True) -> bool:
    """Return True if two tokenizers give the same ids, and with_eod end documents with the same one."""
    return all(one.get(key) == other.get(key) for key in COMPARED if with_eod or key != "eod")


def described(found: Fingerprint) -> str:
    """Return a fingerprint as the name of a tokenizer, for messages."""
    origin = f" of {found['source']}" if found.get("source") else ""
    digests = [f"SHA-256 {digest[:SHOWN_DIGITS]}" for digest in found["files"].values()]
    end = "no end-of-document token" if found["eod"] is None else f"end of document {found['eod']}"
    return f"{found['type']}{origin} ({found['vocab_size']:,} tokens, {', '.join([end, *digests])})"
