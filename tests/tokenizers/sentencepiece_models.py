"""SentencePiece models of the kind that Megatron's users bring along, trained on a few texts."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

CONTROL_SYMBOLS = ["<CLS>", "<SEP>", "<EOD>", "<MASK>"]


def train_sentencepiece(
    texts: Iterable[str], file: Path, *, vocab_size: int, max_bytes: int = 4_000_000, num_threads: int = 2
) -> None:
    """Write a Unigram model without normalization, with pieces of blanks and byte fallback."""
    import sentencepiece

    lines, left = [], max_bytes
    for line in "\n".join(texts).splitlines():
        if 0 < len(line.encode()) <= min(left, 4096):
            lines.append(line)
            left -= len(line.encode())
    partial = file.with_name(f"partial-{os.getpid()}")
    with partial.open("wb") as written:
        sentencepiece.SentencePieceTrainer.Train(
            sentence_iterator=iter(lines),
            model_writer=written,
            model_type="unigram",
            vocab_size=vocab_size,
            character_coverage=0.9995,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=True,
            byte_fallback=True,
            split_digits=True,
            unk_id=0,
            bos_id=1,
            eos_id=2,
            pad_id=3,
            pad_piece="<PAD>",
            control_symbols=CONTROL_SYMBOLS,
            user_defined_symbols=["\n", "\t"],
            max_sentence_length=4096,
            num_threads=num_threads,
            minloglevel=2,
        )
    partial.rename(file)
