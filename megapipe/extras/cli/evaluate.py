"""Compute loss and perplexity of a trained model on a text or a token file, on any grid.

    megapipe evaluate --load CHECKPOINTS --data held_out.txt
    megapipe evaluate --load CHECKPOINTS --data data/corpus_text_document --max-tokens 1000000 --json
    megapipe launch --nproc-per-node 4 tools/evaluate.py --load CHECKPOINTS --pipeline-model-parallel-size 2 \\
        --data held_out.jsonl

--data is PREFIX of PREFIX.bin/.idx, or text files (.txt, .jsonl with the key `text`, ...), each document followed by
the end-of-document token. The tokens are one stream, cut into windows of --seq-length; every token but the first is
scored once. With --stride N below the window's length each window scores its last N tokens, so that every token has at
least seq-length - N before it: slower, and nearer to what the model knows. Ranks beyond tensor x pipeline parallel size
share the windows. tools/evaluate.py is the same.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from megapipe.data.indexed_file import IndexedFile, idx_path
from megapipe.data.text_source import TEXT_KEY, find_files, read_records
from megapipe.environment import Environment
from megapipe.errors import ConfigError, DataError
from megapipe.extras.cli.saved_model import SavedModel, add_model_flags, open_model, parse, run_on_all_ranks


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megapipe evaluate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        exit_on_error=False,
    )
    add_model_flags(parser)
    data = parser.add_argument_group("data")
    data.add_argument("--data", required=True, nargs="+", metavar="PATH", help="PREFIX of .bin/.idx, or text files")
    data.add_argument("--max-tokens", type=int, metavar="N", help="only the first N tokens")
    data.add_argument("--seq-length", type=int, metavar="N", help="length of a window (default: as trained)")
    data.add_argument("--stride", type=int, metavar="N", help="tokens scored in a window (default: all)")
    data.add_argument("--micro-batch-size", type=int, default=4, metavar="N", help="windows at a time (default: 4)")
    data.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def main(argv: Sequence[str]) -> int:
    """Evaluate on this rank and return the exit code."""
    return run_on_all_ranks("megapipe evaluate", lambda environment: _evaluate(argv, environment))


def _evaluate(argv: Sequence[str], environment: Environment) -> int:
    arguments = parse(build_parser(), argv)
    model = open_model(arguments, environment, arguments.micro_batch_size, arguments.seq_length)
    tokens, num_bytes = _tokens(model, arguments.data)
    if arguments.max_tokens is not None and arguments.max_tokens < len(tokens):
        tokens, num_bytes = tokens[: arguments.max_tokens], None
    from megapipe.extras.inference.perplexity import Evaluator, windows

    seq = model.plan.config.model.seq_length
    next(windows(len(tokens), seq, arguments.stride or seq))  # report errors before the model is built
    result = Evaluator(model.runtime()).score(tokens, arguments.stride)
    if environment.global_rank == 0:
        bits_per_byte = None if num_bytes is None else result.total_bits / num_bytes
        _print(model, result.loss, result.perplexity, result.num_tokens, bits_per_byte, arguments.json)
    return 0


def _tokens(model: SavedModel, paths: Sequence[str]) -> tuple[Any, int | None]:
    """Return (one stream of tokens, bytes of the text or None for token files)."""
    vocab_size = model.plan.config.model.vocab_size
    assert vocab_size is not None
    if any(idx_path(path).is_file() for path in paths):
        files = [IndexedFile(path) for path in paths]
        tokens = np.concatenate([_stream(file) for file in files])
        if len(tokens) and int(tokens.max()) >= vocab_size:
            raise DataError(
                f"--data holds token {tokens.max()}, the model's vocabulary has {vocab_size}: the file was "
                "made with another tokenizer"
            )
        return tokens, None
    tokenizer = model.tokenizer
    if tokenizer is None:
        raise ConfigError(
            f"{model.folder} was trained without a tokenizer: give --tokenizer-type and --tokenizer-model, or a "
            "token file"
        )
    ids: list[int] = []
    num_bytes = 0
    for record in read_records(find_files(paths)):
        for text in record.texts([TEXT_KEY]):
            num_bytes += len(text.encode())
            ids += tokenizer.encode(text)
            if tokenizer.eod is not None:
                ids.append(tokenizer.eod)
    return np.array(ids, dtype=np.int64), num_bytes


def _stream(file: IndexedFile) -> Any:
    if file.is_contiguous():
        return np.frombuffer(file.raw(), file.dtype)
    return np.concatenate([file.read(number) for number in range(len(file))])


def _print(
    model: SavedModel, loss: float, perplexity: float, num_tokens: int, bits_per_byte: float | None, as_json: bool
) -> None:
    if as_json:
        row = {"loss": loss, "perplexity": perplexity, "num_tokens": num_tokens, "bits_per_byte": bits_per_byte}
        print(json.dumps(row | {"checkpoint": str(model.folder)}))
        return
    in_bytes = "" if bits_per_byte is None else f", {bits_per_byte:.4f} bits a byte of text"
    print(
        f"{model.folder}: loss {loss:.4f} nats a token, perplexity {perplexity:.4g}{in_bytes}, over {num_tokens:,} "
        "tokens"
    )
