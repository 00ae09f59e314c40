"""`--tokenizer-type` and its files -> a tokenizer."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megapipe.errors import ConfigError
from megapipe.tokenizers.byte import ByteTokenizer
from megapipe.tokenizers.hugging_face import (
    TOKENIZER_FILE,
    GPT2BPETokenizer,
    HuggingFaceTokenizer,
    TransformersTokenizer,
)
from megapipe.tokenizers.null import NullTokenizer
from megapipe.tokenizers.sentencepiece import GPTSentencePieceTokenizer, Llama2Tokenizer, SentencePieceTokenizer
from megapipe.tokenizers.tokenizer import Tokenizer


@dataclass(frozen=True)
class _Files:
    """The flags a tokenizer can be made from."""

    tokenizer_type: str
    tokenizer_model: str | None
    vocab_size: int | None
    vocab_file: str | None
    merge_file: str | None

    @property
    def model(self) -> str:
        if self.tokenizer_model is None:
            raise ConfigError(f"--tokenizer-type {self.tokenizer_type} needs --tokenizer-model")
        return self.tokenizer_model


def _null(files: _Files) -> Tokenizer:
    if files.vocab_size is None:
        raise ConfigError("--tokenizer-type NullTokenizer needs --vocab-size")
    return NullTokenizer(files.vocab_size)


def _gpt2(files: _Files) -> Tokenizer:
    if files.vocab_file is not None and files.merge_file is not None:
        return GPT2BPETokenizer(files.vocab_file, files.merge_file)
    if files.tokenizer_model is not None and Path(files.tokenizer_model).is_dir():
        return GPT2BPETokenizer(Path(files.tokenizer_model) / "vocab.json", Path(files.tokenizer_model) / "merges.txt")
    raise ConfigError("--tokenizer-type GPT2BPETokenizer needs --vocab-file and --merge-file")


def _hugging_face(files: _Files) -> Tokenizer:
    model = Path(files.model)
    if model.is_file() or (model / TOKENIZER_FILE).is_file():
        return HuggingFaceTokenizer(model)
    return TransformersTokenizer(files.model)


TOKENIZERS: dict[str, Callable[[_Files], Tokenizer]] = {
    "ByteTokenizer": lambda files: ByteTokenizer(),
    "GPT2BPETokenizer": _gpt2,
    "GPTSentencePieceTokenizer": lambda files: GPTSentencePieceTokenizer(files.model),
    "HuggingFaceTokenizer": _hugging_face,
    "Llama2Tokenizer": lambda files: Llama2Tokenizer(files.model),
    "NullTokenizer": _null,
    "SentencePieceTokenizer": lambda files: SentencePieceTokenizer(files.model),
}


def build_tokenizer(
    tokenizer_type: str,
    tokenizer_model: str | None = None,
    vocab_size: int | None = None,
    vocab_file: str | None = None,
    merge_file: str | None = None,
) -> Tokenizer:
    """Raises ConfigError for an unknown type or a missing flag, DataError for a file that is missing or something else."""
    if tokenizer_type not in TOKENIZERS:
        near = difflib.get_close_matches(tokenizer_type, TOKENIZERS, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]}?" if near else ";"
        raise ConfigError(f"--tokenizer-type {tokenizer_type} is not known{hint} known are {', '.join(TOKENIZERS)}")
    return TOKENIZERS[tokenizer_type](_Files(tokenizer_type, tokenizer_model, vocab_size, vocab_file, merge_file))
