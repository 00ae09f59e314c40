"""`--tokenizer-type` and its files -> a tokenizer."""

from __future__ import annotations

import difflib
from pathlib import Path

from megapipe.errors import ConfigError
from megapipe.tokenizers.hugging_face import (
    TOKENIZER_FILE,
    GPT2BPETokenizer,
    HuggingFaceTokenizer,
    TransformersTokenizer,
)
from megapipe.tokenizers.sentencepiece import GPTSentencePieceTokenizer, Llama2Tokenizer, SentencePieceTokenizer
from megapipe.tokenizers.tokenizer import ByteTokenizer, NullTokenizer, Tokenizer

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
    """Build a tokenizer from its flags.

    Raises ConfigError for an unknown type or a missing flag, DataError for a file that is missing or invalid.
    """
    if tokenizer_type not in TOKENIZERS:
        near = difflib.get_close_matches(tokenizer_type, TOKENIZERS, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]}?" if near else ";"
        raise ConfigError(f"unknown --tokenizer-type {tokenizer_type}{hint} known are {', '.join(TOKENIZERS)}")
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
