"""`megapipe train-tokenizer`, `preprocess` and `merge`: from text to a tokenizer and token files."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import Any

from megapipe.config.files import TOKENIZER_TYPES
from megapipe.data.indexed_file import bin_path, idx_path, token_dtype
from megapipe.errors import ConfigError
from megapipe.extras.cli.frame import command, option, switch
from megapipe.extras.preprocess.corpus import find_corpus
from megapipe.extras.preprocess.merge import merge as merge_files
from megapipe.extras.preprocess.merge import prefixes_in
from megapipe.extras.preprocess.partial_output import PartialOutput, output_prefix, require_space
from megapipe.extras.preprocess.preprocess import Progress
from megapipe.extras.preprocess.preprocess import preprocess as tokenize
from megapipe.extras.preprocess.text_source import DOCUMENT_UNITS, FORMATS, TEXT_KEY
from megapipe.extras.preprocess.tokenizer_training import train_tokenizer as train
from megapipe.input_files import MOST_DOCUMENT_BYTES
from megapipe.tokenizers.tokenizer import build_tokenizer, described, tokenizer_fingerprint

TEXT_OPTIONS = (
    "text",
    option(
        "--input",
        "files, patterns, directories, folders of `datasets`, or - for standard input: .jsonl .json .ndjson, .parquet, "
        ".arrow; all others are plain text. Text may be packed (.gz .zst)",
        nargs="+",
        required=True,
    ),
    option("--json-keys", "keys to read, each to its own token files (default: text)", nargs="+", default=[TEXT_KEY]),
    option("--suffixes", "in directories, only files such as .py .md (default: all)", nargs="+", default=[]),
    option("--input-format", "of all inputs (default: by their names; JSON lines from a pipe)", choices=FORMATS),
    option(
        "--document-unit",
        "in plain text (default: file; of a single .txt inferred from its blank lines)",
        choices=DOCUMENT_UNITS,
    ),
)
TRAIN_TOKENIZER_OPTIONS = (
    *TEXT_OPTIONS,
    "tokenizer",
    option("--output", "the folder to write: tokenizer.json, special tokens, chat template", required=True),
    option("--vocab-size", "tokens, special tokens included", default=8192),
    option("--megabytes", "most text to train on, as much of each file as its share allows", default=4.0, above=0),
)
PREPROCESS_OPTIONS = (
    *TEXT_OPTIONS,
    option(
        "--skip-bad", "leave out up to N bad records and report them in PREFIX.skipped.jsonl", default=0, at_least=0
    ),
    option("--max-document-bytes", "a document of more text is a bad record", default=MOST_DOCUMENT_BYTES, at_least=1),
    "tokenizer",
    option("--tokenizer-type", f"one of {', '.join(TOKENIZER_TYPES)}", required=True),
    option("--tokenizer-model", "SentencePiece model, tokenizer.json, or a folder with one of them"),
    option("--vocab-size", "for NullTokenizer", type=int),
    option("--vocab-file", "for GPT2BPETokenizer: vocabulary (JSON)"),
    option("--merge-file", "for GPT2BPETokenizer: merges (text)"),
    switch("--append-eod", "end each document with the end-of-document token"),
    "output",
    option("--output-prefix", "PREFIX of PREFIX_KEY_document.bin/.idx", required=True),
    switch("--overwrite", "replace existing files, and drop the work of another interrupted run"),
    option("--workers", "threads of a tokenizer's library that has them", default=1),
    option("--log-interval", "without a terminal: print progress after every N documents (default: never)", type=int),
)
REFUSED = {  # Megatron's flags that are not here, and what to do instead
    "--split-sentences": "documents are stored whole, as GPT training needs them; leave it out",
    "--keep-newlines": "newlines are always kept; leave it out",
    "--partitions": "several files go to --input at once; use --workers for speed",
    "--keep-sequential-samples": "the order of the input is always kept; leave it out",
    "--lang": "documents are not cut into sentences; leave it out",
    "--find-optimal-num-workers": "use as many --workers as there are cores",
    "--workers-to-check": "use as many --workers as there are cores",
    "--max-documents": "give fewer files, or lines by way of head: head -n 1000 FILE | megapipe preprocess --input -",
}
MERGE_OPTIONS = (
    option("--input", "file prefixes (without .bin/.idx), or directories", nargs="+", required=True),
    option("--output-prefix", "prefix of the merged .bin/.idx", required=True),
    switch("--overwrite", "replace existing files"),
)
NO_FILE = "\ninterrupted; no file was written"
KEPT = "\ninterrupted; the same command continues from the last commit (from the beginning, if the input was a pipe)"


@command("megapipe train-tokenizer", TRAIN_TOKENIZER_OPTIONS, interrupted=NO_FILE)
def train_tokenizer(own: argparse.Namespace) -> None:
    """Train a tokenizer on text, which `preprocess` takes alike.

        megapipe train-tokenizer --input corpus.jsonl --output tokenizer --vocab-size 8192

    A byte-level BPE: any text is decoded exactly as it was. The folder holds a tokenizer.json with tokens for
    conversations and a chat template, for --tokenizer-type HuggingFaceTokenizer --tokenizer-model tokenizer.
    Of a corpus larger than --megabytes every file gives the documents at its beginning. What is no text is left out.
    """
    if Path(own.output).suffix in (".json", ".model") or Path(own.output).is_file():
        raise ConfigError(
            f"--output {own.output} is to be a folder, which gets a tokenizer.json; use --output tokenizer"
        )
    corpus, remark = find_corpus(own.input, own.suffixes, own.json_keys, own.input_format, own.document_unit)
    if remark:
        print(remark)
    counts: Counter[str] = Counter()
    texts = corpus.beginnings(own.megabytes * 1e6, counts)
    first = next(texts, None)
    if first is None:
        bad = f" ({counts['bad']:,} documents are not UTF-8 text)" if counts["bad"] else ""
        raise ConfigError(f"--input {' '.join(own.input)} holds no text{bad}; give files with text in them")
    train(chain([first], texts), own.output, own.vocab_size)
    left_out = f"; {counts['bad']:,} that are no text were left out" if counts["bad"] else ""
    read = f"{counts['documents']:,} documents ({counts['bytes'] / 1e6:.2f} MB) of {counts['files']:,} files"
    print(f"wrote {own.output}: {own.vocab_size:,} tokens, trained on {read}{left_out}")


@command("megapipe preprocess", PREPROCESS_OPTIONS, interrupted=KEPT, refused=REFUSED)
def preprocess(own: argparse.Namespace) -> None:
    """Tokenize text into token files: JSON lines, plain text, parquet, Arrow -> PREFIX_KEY_document.bin/.idx.

        megapipe preprocess --input 'corpus/*.jsonl.zst' --output-prefix data/corpus \\
            --tokenizer-type HuggingFaceTokenizer --tokenizer-model tokenizer --append-eod --workers 8

    After an error, Ctrl-C or kill -9, the same command continues where the work was last committed. The token files do
    not depend on --workers or interruptions. tools/preprocess_data.py is the same command under Megatron's name.
    """
    corpus, remark = find_corpus(own.input, own.suffixes, own.json_keys, own.input_format, own.document_unit)
    tokenizer = build_tokenizer(own.tokenizer_type, own.tokenizer_model, own.vocab_size, own.vocab_file, own.merge_file)
    if remark:
        print(remark)
    made = tokenizer_fingerprint(tokenizer, own.tokenizer_model or own.vocab_file)
    description: dict[str, Any] | None = None
    if corpus.pipe is None:
        description = {
            "input": corpus.states(),
            "--json-keys": own.json_keys,
            "--input-format": own.input_format,
            "--document-unit": corpus.document_unit,
            "--max-document-bytes": own.max_document_bytes,
            "--append-eod": own.append_eod,
            "tokenizer": described({**made, "source": None}),
        }
    else:
        print(f"note: {corpus.pipe} can be read only once: an interrupted run begins again", file=sys.stderr)
    dtype = token_dtype(tokenizer.vocab_size)
    output = PartialOutput(
        own.output_prefix, own.json_keys, dtype, description, overwrite=own.overwrite, tokenizer=made
    )
    if output.counts:
        print(f"going on after {output.counts['documents']:,} documents of an interrupted run ({output.folder})")
    counts = tokenize(
        corpus.records(output.position, own.max_document_bytes),
        output,
        tokenizer,
        append_eod=own.append_eod,
        num_workers=own.workers,
        skip_bad=own.skip_bad,
        progress=Progress(log_interval=own.log_interval),
    )
    print(counts.line() + (f", {counts.empty:,} empty documents left out" if counts.empty else ""))
    if counts.skipped:
        print(f"{counts.skipped:,} bad records skipped: see {own.output_prefix}.skipped.jsonl")
    for key in own.json_keys:
        print(
            f"wrote {output_prefix(own.output_prefix, key)}.bin/.idx: {counts.tokens[key]:,} tokens as "
            f"{output.dtype}, vocabulary {tokenizer.vocab_size:,}"
        )


@command("megapipe merge", MERGE_OPTIONS, interrupted=NO_FILE)
def merge(own: argparse.Namespace) -> None:
    """Merge several token files into one, in the order given; a directory means all of its token files, sorted by name.

    megapipe merge --input data/part1 data/part2 --output-prefix data/all
    """
    prefixes = [prefix for name in own.input for prefix in (prefixes_in(name) if Path(name).is_dir() else [name])]
    for path in (bin_path(own.output_prefix), idx_path(own.output_prefix)):
        if path.exists() and not own.overwrite:
            raise ConfigError(f"{path} exists: choose another --output-prefix, or replace it with --overwrite")
    pairs = [make(prefix) for prefix in prefixes for make in (bin_path, idx_path)]
    folder = Path(own.output_prefix).absolute().parent
    folder.mkdir(parents=True, exist_ok=True)
    require_space(folder, sum(path.stat().st_size for path in pairs if path.exists()), "the merged file")
    merged = merge_files(prefixes, own.output_prefix)
    print(
        f"wrote {own.output_prefix}.bin/.idx: {merged.num_documents:,} documents, {merged.num_tokens:,} tokens as "
        f"{merged.dtype}"
    )
