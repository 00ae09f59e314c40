"""Tokenize text into token files: JSON lines, plain text or directories -> PREFIX_KEY_document.bin/.idx.

    megapipe preprocess --input corpus.jsonl --output-prefix data/corpus \\
        --tokenizer-type SentencePieceTokenizer --tokenizer-model tokenizer.model --append-eod --workers 8

tools/preprocess_data.py is the same command under Megatron's name.
"""

from __future__ import annotations

import argparse
import difflib
import functools
import sys
from collections.abc import Sequence

from megapipe.data.indexed_file import token_dtype
from megapipe.data.preprocess import Progress, output_prefix, preprocess
from megapipe.data.text_source import DOCUMENT_UNITS, TEXT_KEY, find_files, is_json_lines, read_records
from megapipe.errors import ConfigError, MegapipeError
from megapipe.tokenizers.tokenizer import TOKENIZERS, build_tokenizer

# Megatron's flags that are not here, and what to do instead
REFUSED = {
    "--split-sentences": "documents are stored whole, as GPT training needs them; leave it out",
    "--keep-newlines": "newlines are always kept; leave it out",
    "--partitions": "several files go to --input at once; use --workers for speed",
    "--keep-sequential-samples": "the order of the input is always kept; leave it out",
    "--lang": "documents are not cut into sentences; leave it out",
}


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megapipe preprocess",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        exit_on_error=False,
    )
    text = parser.add_argument_group("text")
    text.add_argument(
        "--input",
        nargs="+",
        required=True,
        help="files, patterns or directories; .jsonl/.json(.gz) hold JSON lines, others plain text",
    )
    text.add_argument(
        "--json-keys", nargs="+", default=[TEXT_KEY], help="keys to tokenize, each to separate files (default: text)"
    )
    text.add_argument(
        "--suffixes",
        nargs="+",
        default=[],
        help="in directories, only files with these extensions, for example .py .md (default: all)",
    )
    text.add_argument(
        "--document-unit",
        choices=DOCUMENT_UNITS,
        default="file",
        help="unit of a document in plain text (default: file)",
    )
    tokenizer = parser.add_argument_group("tokenizer")
    tokenizer.add_argument("--tokenizer-type", required=True, help=f"one of {', '.join(TOKENIZERS)}")
    tokenizer.add_argument(
        "--tokenizer-model", help="SentencePiece model, tokenizer.json, or a folder with one of them"
    )
    tokenizer.add_argument("--vocab-size", type=int, help="for NullTokenizer")
    tokenizer.add_argument("--vocab-file", help="for GPT2BPETokenizer: vocabulary (JSON)")
    tokenizer.add_argument("--merge-file", help="for GPT2BPETokenizer: merges (text)")
    tokenizer.add_argument("--append-eod", action="store_true", help="end each document with the end-of-document token")
    output = parser.add_argument_group("output")
    output.add_argument("--output-prefix", required=True, help="PREFIX of PREFIX_KEY_document.bin/.idx")
    output.add_argument("--workers", type=int, default=1, help="tokenizing processes (default: 1)")
    output.add_argument(
        "--log-interval", type=int, help="without a terminal: print progress after every N documents (default: never)"
    )
    return parser


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """A parser for flags with - or _, whose errors name the nearest flag, or the alternative to a refused one."""
    parser = build_parser()
    argv = [_dashed(word) for word in argv]
    known = [flag for action in parser._actions for flag in action.option_strings]
    for word in argv:
        flag = word.partition("=")[0]
        if flag in REFUSED:
            raise ConfigError(f"{flag}: {REFUSED[flag]}")
        if flag.startswith("--") and flag not in known:
            near = difflib.get_close_matches(flag, known, n=1)
            raise ConfigError(
                f"{flag} is not a flag of this tool{f'; did you mean {near[0]}?' if near else ', see --help'}"
            )
    try:
        return parser.parse_args(argv)
    except argparse.ArgumentError as error:
        raise ConfigError(str(error)) from None


def _dashed(word: str) -> str:
    flag, equals, value = word.partition("=")
    return flag.replace("_", "-") + equals + value if flag.startswith("--") else word


def run(argv: Sequence[str]) -> None:
    arguments = parse(argv)
    factory = functools.partial(
        build_tokenizer,
        arguments.tokenizer_type,
        arguments.tokenizer_model,
        arguments.vocab_size,
        arguments.vocab_file,
        arguments.merge_file,
    )
    files = find_files(arguments.input, arguments.suffixes)
    plain = next((path for path in files if not is_json_lines(path)), None)
    if plain is not None and arguments.json_keys != [TEXT_KEY]:
        raise ConfigError(
            f"--json-keys {' '.join(arguments.json_keys)}: {plain} is plain text, which has the key {TEXT_KEY!r} only"
        )
    counts = preprocess(
        read_records(files, arguments.document_unit),
        arguments.output_prefix,
        factory,
        keys=arguments.json_keys,
        append_eod=arguments.append_eod,
        num_workers=arguments.workers,
        progress=Progress(log_interval=arguments.log_interval),
    )
    print(counts.line() + (f", {counts.empty:,} empty documents left out" if counts.empty else ""))
    vocab_size = factory().vocab_size
    for key in arguments.json_keys:
        print(
            f"wrote {output_prefix(arguments.output_prefix, key)}.bin/.idx: {counts.tokens[key]:,} tokens as "
            f"{token_dtype(vocab_size)}, vocabulary {vocab_size:,}"
        )


def main(argv: Sequence[str]) -> int:
    """Tokenize and return the exit code."""
    try:
        run(argv)
    except MegapipeError as error:
        print(f"preprocess_data: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("\npreprocess_data: interrupted; no file was written", file=sys.stderr)
        return 130
    return 0
