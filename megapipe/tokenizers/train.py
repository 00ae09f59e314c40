"""Train a SentencePiece model that gives code back as it was: every space, tab and line end.

Unigram, without normalisation (the default one folds spaces and characters), with pieces of spaces alone, so that an indentation is one
token, and with bytes for whatever the vocabulary does not hold. The one character that does not come back is U+2581: inside SentencePiece
it stands for a space.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from megapipe.errors import ConfigError

# Megatron looks for these names; declared here, they do not enlarge the vocabulary later
CONTROL_SYMBOLS = ("<CLS>", "<SEP>", "<EOD>", "<MASK>")
MAX_LINE_BYTES = 4096
MIN_VOCAB_SIZE = 400  # 256 bytes, 10 special tokens, and something to tell characters by


def train_sentencepiece(
    texts: Iterable[str],
    model_file: str | Path,
    *,
    vocab_size: int = 8192,
    max_bytes: int = 4_000_000,
    num_threads: int | None = None,
) -> None:
    """Train on the first `max_bytes` of the texts, a line a time, and write `model_file`.

    Raises ConfigError if the vocabulary is too small to hold bytes and special tokens, or larger than the text can fill.
    """
    import sentencepiece

    if vocab_size < MIN_VOCAB_SIZE:
        raise ConfigError(
            f"--vocab-size {vocab_size}: bytes and special tokens alone need most of that; use {MIN_VOCAB_SIZE} or more"
        )
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.Train(
            sentence_iterator=_lines(texts, max_bytes),
            model_writer=model,
            model_type="unigram",
            vocab_size=vocab_size,
            character_coverage=0.9995,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            split_by_whitespace=True,
            allow_whitespace_only_pieces=True,
            byte_fallback=True,
            split_digits=True,
            unk_id=0,
            bos_id=1,
            eos_id=2,
            pad_id=3,
            pad_piece="<PAD>",
            control_symbols=list(CONTROL_SYMBOLS),
            user_defined_symbols=["\n", "\t"],
            max_sentence_length=MAX_LINE_BYTES,
            num_threads=num_threads if num_threads is not None else min(16, os.cpu_count() or 1),
            minloglevel=2,
        )
    except RuntimeError as error:
        most = re.search(r"value <= (\d+)", str(error))
        reason = f"the text supports at most {most[1]}" if most else str(error)
        raise ConfigError(f"--vocab-size {vocab_size}: {reason}; give more text or a smaller vocabulary") from None
    target = Path(model_file)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f"{target.name}.partial-{os.getpid()}")
    partial.write_bytes(model.getvalue())
    os.replace(partial, target)


def _lines(texts: Iterable[str], max_bytes: int) -> Iterator[str]:
    """Lines of the texts until `max_bytes` are given out. A line is what the trainer calls a sentence."""
    given = 0
    for text in texts:
        for line in text.splitlines():
            size = len(line.encode("utf-8", errors="ignore"))
            if 0 < size <= MAX_LINE_BYTES:
                yield line
                given += size
            if given >= max_bytes:
                return
