"""Train a SentencePiece tokenizer on text: a directory, a text file or JSON lines.

    megapipe train-tokenizer --input corpus.jsonl --output tokenizer.model --vocab-size 8192

Unigram, no normalization, pieces of only spaces, bytes for unknown characters: code is decoded exactly as it was.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from megapipe.data.text_source import corpus_documents
from megapipe.errors import MegapipeError
from megapipe.tokenizers.sentencepiece import train_sentencepiece


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megapipe train-tokenizer",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--input", required=True, help="directory of text files, text file, or JSON lines with texts under the key text"
    )
    parser.add_argument("--output", required=True, help="the model file to write")
    parser.add_argument(
        "--vocab-size", "--vocab_size", type=int, default=8192, help="pieces, special tokens included (default: 8192)"
    )
    parser.add_argument("--megabytes", type=float, default=4.0, help="most text to train on (default: 4)")
    return parser


def main(argv: Sequence[str]) -> int:
    """Train the tokenizer and return the exit code."""
    arguments = build_parser().parse_args(argv)
    try:
        documents = corpus_documents(arguments.input, arguments.megabytes)
        max_bytes = round(arguments.megabytes * 1e6)
        train_sentencepiece(documents, arguments.output, vocab_size=arguments.vocab_size, max_bytes=max_bytes)
    except MegapipeError as error:
        print(f"train-tokenizer: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("\ntrain-tokenizer: interrupted; no file was written", file=sys.stderr)
        return 130
    print(f"wrote {arguments.output}: {arguments.vocab_size:,} pieces, trained on {len(documents):,} documents")
    return 0
