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
from megapipe.errors import DataError
from megapipe.extras.cli.frame import Command, option
from megapipe.extras.cli.saved_model import MODEL_OPTIONS, SavedModel, open_model

OPTIONS = (
    *MODEL_OPTIONS,
    "data",
    option("--data", required=True, nargs="+", metavar="PATH", help="PREFIX of .bin/.idx, or text files"),
    option("--max-tokens", type=int, metavar="N", help="only the first N tokens"),
    option("--seq-length", type=int, metavar="N", help="length of a window (default: as trained)"),
    option("--stride", type=int, metavar="N", help="tokens scored in a window (default: all)"),
    option("--micro-batch-size", type=int, default=4, metavar="N", help="windows at a time (default: 4)"),
    option("--json", action="store_true", help="print one JSON object"),
)


def _evaluate(own: argparse.Namespace, environment: Environment) -> None:
    model = open_model(own, environment, own.micro_batch_size, own.seq_length)
    tokens, num_bytes = _tokens(model, own.data)
    if own.max_tokens is not None and own.max_tokens < len(tokens):
        tokens, num_bytes = tokens[: own.max_tokens], None
    from megapipe.extras.inference.perplexity import Evaluator, windows

    seq = model.plan.config.model.seq_length
    next(windows(len(tokens), seq, own.stride or seq))  # report errors before the model is built
    result = Evaluator(model.runtime()).score(tokens, own.stride)
    if environment.global_rank != 0:
        return
    row = {
        "loss": result.loss,
        "perplexity": result.perplexity,
        "num_tokens": result.num_tokens,
        "bits_per_byte": None if num_bytes is None else result.total_bits / num_bytes,
        "checkpoint": str(model.folder),
    }
    if own.json:
        print(json.dumps(row))
        return
    in_bytes = "" if num_bytes is None else f", {result.total_bits / num_bytes:.4f} bits a byte of text"
    print(
        f"{model.folder}: loss {result.loss:.4f} nats a token, perplexity {result.perplexity:.4g}{in_bytes}, over "
        f"{result.num_tokens:,} tokens"
    )


def _tokens(model: SavedModel, paths: Sequence[str]) -> tuple[Any, int | None]:
    """Return (one stream of tokens, bytes of the text or None for token files)."""
    if any(idx_path(path).is_file() for path in paths):
        tokens = np.concatenate([_stream(IndexedFile(path)) for path in paths])
        vocab_size = model.plan.config.model.vocab_size
        if len(tokens) and int(tokens.max()) >= vocab_size:
            raise DataError(
                f"--data holds token {tokens.max()}, the model's vocabulary has {vocab_size}: the file was made with "
                "another tokenizer"
            )
        return tokens, None
    tokenizer = model.required_tokenizer(", or a token file")
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


main = Command("megapipe evaluate", __doc__, OPTIONS, _evaluate, on_ranks=True)
