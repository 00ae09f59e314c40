"""`megapipe train-tokenizer`, `preprocess` and `merge`: from text to a tokenizer and token files."""

from __future__ import annotations

import argparse
import functools
from pathlib import Path

from megapipe.data import indexed_file
from megapipe.data.preprocess import Progress, output_prefix
from megapipe.data.preprocess import preprocess as tokenize
from megapipe.data.text_source import (
    DOCUMENT_UNITS,
    TEXT_KEY,
    corpus_documents,
    find_files,
    is_json_lines,
    read_records,
)
from megapipe.errors import ConfigError
from megapipe.extras.cli.frame import command, option
from megapipe.tokenizers.sentencepiece import train_sentencepiece
from megapipe.tokenizers.tokenizer import TOKENIZERS, build_tokenizer

TRAIN_TOKENIZER_OPTIONS = (
    option("--input", "directory of text files, text file, or JSON lines with the key text", required=True),
    option("--output", "the model file to write", required=True),
    option("--vocab-size", "pieces, special tokens included", default=8192),
    option("--megabytes", "most text to train on", default=4.0),
)
PREPROCESS_OPTIONS = (
    "text",
    option(
        "--input",
        "files, patterns or directories; .jsonl/.json(.gz) hold JSON lines, others plain text",
        nargs="+",
        required=True,
    ),
    option("--json-keys", "keys to tokenize, each to its own files (default: text)", nargs="+", default=[TEXT_KEY]),
    option("--suffixes", "in directories, only files such as .py .md (default: all)", nargs="+", default=[]),
    option("--document-unit", "unit of a document in plain text", choices=DOCUMENT_UNITS, default="file"),
    "tokenizer",
    option("--tokenizer-type", f"one of {', '.join(TOKENIZERS)}", required=True),
    option("--tokenizer-model", "SentencePiece model, tokenizer.json, or a folder with one of them"),
    option("--vocab-size", "for NullTokenizer", type=int),
    option("--vocab-file", "for GPT2BPETokenizer: vocabulary (JSON)"),
    option("--merge-file", "for GPT2BPETokenizer: merges (text)"),
    option("--append-eod", "end each document with the end-of-document token", action="store_true"),
    "output",
    option("--output-prefix", "PREFIX of PREFIX_KEY_document.bin/.idx", required=True),
    option("--workers", "tokenizing processes", default=1),
    option("--log-interval", "without a terminal: print progress after every N documents (default: never)", type=int),
)
REFUSED = {  # Megatron's flags that are not here, and what to do instead
    "--split-sentences": "documents are stored whole, as GPT training needs them; leave it out",
    "--keep-newlines": "newlines are always kept; leave it out",
    "--partitions": "several files go to --input at once; use --workers for speed",
    "--keep-sequential-samples": "the order of the input is always kept; leave it out",
    "--lang": "documents are not cut into sentences; leave it out",
}
MERGE_OPTIONS = (
    option("--input", "file prefixes (without .bin/.idx), or directories", nargs="+", required=True),
    option("--output-prefix", "prefix of the merged .bin/.idx", required=True),
)
NO_FILE = "\ninterrupted; no file was written"


@command("megapipe train-tokenizer", TRAIN_TOKENIZER_OPTIONS, interrupted=NO_FILE)
def train_tokenizer(own: argparse.Namespace) -> None:
    """Train a SentencePiece tokenizer on text: a directory, a text file or JSON lines.

        megapipe train-tokenizer --input corpus.jsonl --output tokenizer.model --vocab-size 8192

    Unigram, no normalization, pieces of only spaces, bytes for unknown characters: code is decoded exactly as it was.
    """
    documents = corpus_documents(own.input, own.megabytes)
    max_bytes = round(own.megabytes * 1e6)
    train_sentencepiece(documents, own.output, vocab_size=own.vocab_size, max_bytes=max_bytes)
    print(f"wrote {own.output}: {own.vocab_size:,} pieces, trained on {len(documents):,} documents")


@command("megapipe preprocess", PREPROCESS_OPTIONS, interrupted=NO_FILE, refused=REFUSED)
def preprocess(own: argparse.Namespace) -> None:
    """Tokenize text into token files: JSON lines, plain text or directories -> PREFIX_KEY_document.bin/.idx.

        megapipe preprocess --input corpus.jsonl --output-prefix data/corpus \\
            --tokenizer-type SentencePieceTokenizer --tokenizer-model tokenizer.model --append-eod --workers 8

    tools/preprocess_data.py is the same command under Megatron's name.
    """
    factory = functools.partial(
        build_tokenizer, own.tokenizer_type, own.tokenizer_model, own.vocab_size, own.vocab_file, own.merge_file
    )
    files = find_files(own.input, own.suffixes)
    plain = next((path for path in files if not is_json_lines(path)), None)
    if plain is not None and own.json_keys != [TEXT_KEY]:
        keys = " ".join(own.json_keys)
        raise ConfigError(f"--json-keys {keys}: {plain} is plain text, which has the key {TEXT_KEY!r} only")
    counts = tokenize(
        read_records(files, own.document_unit),
        own.output_prefix,
        factory,
        keys=own.json_keys,
        append_eod=own.append_eod,
        num_workers=own.workers,
        progress=Progress(log_interval=own.log_interval),
    )
    print(counts.line() + (f", {counts.empty:,} empty documents left out" if counts.empty else ""))
    vocab_size = factory().vocab_size
    for key in own.json_keys:
        print(
            f"wrote {output_prefix(own.output_prefix, key)}.bin/.idx: {counts.tokens[key]:,} tokens as "
            f"{indexed_file.token_dtype(vocab_size)}, vocabulary {vocab_size:,}"
        )


@command("megapipe merge", MERGE_OPTIONS, interrupted=NO_FILE)
def merge(own: argparse.Namespace) -> None:
    """Merge several token files into one, in the order given; a directory means all of its token files, sorted by name.

    megapipe merge --input data/part1 data/part2 --output-prefix data/all
    """
    prefixes = [
        prefix for name in own.input for prefix in (indexed_file.prefixes_in(name) if Path(name).is_dir() else [name])
    ]
    merged = indexed_file.merge(prefixes, own.output_prefix)
    print(
        f"wrote {own.output_prefix}.bin/.idx: {merged.num_documents:,} documents, {merged.num_tokens:,} tokens as "
        f"{merged.dtype}"
    )
