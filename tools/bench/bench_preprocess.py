#!/usr/bin/env python3
"""Compare preprocessing with one raw call of the tokenizers library on the same texts, alternating.

python tools/bench/bench_preprocess.py --workers 1 2 --pairs 3

The raw side holds all texts as a list and times `encode_batch_fast` alone; the other times all from JSON lines to
token files on disk: reading, parsing, encoding, packing, writing, syncing, the index. Both run in processes of their
own with the same number of threads; imports and loading the tokenizer are not timed. Prints tokens per second of both,
the median ratio over the pairs, the same per second of CPU time (which other load disturbs less), and the speed-up
over the first number of workers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from megapipe.data.preprocess import preprocess
from megapipe.data.text_source import corpus_documents, read_records, write_jsonl
from megapipe.environment import set_tokenizer_threads
from megapipe.tokenizers.tokenizer import build_tokenizer

VOCABULARY = 16_000
TRAINING_DOCUMENTS = 300


def train_tokenizer(documents: list[str], path: Path) -> None:
    """Write a byte-level BPE like GPT-2's."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(documents[:TRAINING_DOCUMENTS], trainer)
    tokenizer.save(str(path))


def measure(side: str, folder: Path, tokenizer_file: str, num_workers: int) -> dict[str, float]:
    """Run one side in this process: tokens, seconds and seconds of CPU time."""
    corpus = folder / "corpus.jsonl"
    if side == "raw":
        set_tokenizer_threads(num_workers)
        from tokenizers import Tokenizer

        tokenizer = Tokenizer.from_file(tokenizer_file)
        texts = [json.loads(line)["text"] for line in corpus.read_text().splitlines()]
        begin, cpu = time.perf_counter(), time.process_time()
        encodings = tokenizer.encode_batch_fast(texts)
        seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
        return {"tokens": sum(len(each) for each in encodings), "seconds": seconds, "cpu": cpu}
    built = build_tokenizer("HuggingFaceTokenizer", tokenizer_file)
    begin, cpu = time.perf_counter(), time.process_time()
    counts = preprocess(read_records([corpus]), str(folder / "out"), lambda: built, num_workers=num_workers)
    seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
    return {"tokens": sum(counts.tokens.values()), "seconds": seconds, "cpu": cpu}


def run(side: str, folder: Path, tokenizer_file: str, num_workers: int) -> dict[str, float]:
    words = ["--side", side, "--folder", str(folder), "--tokenizer-model", tokenizer_file]
    done = subprocess.run(
        [sys.executable, __file__, *words, "--workers", str(num_workers)], capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(f"{side} failed:\n{done.stderr[-3000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def rate(one: dict[str, float], clock: str = "seconds") -> float:
    return one["tokens"] / one[clock]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--pairs", type=int, default=3)
    parser.add_argument("--megabytes", type=float, default=8.0, help="of the standard library's source code")
    parser.add_argument("--tokenizer-model", help="a tokenizer.json (default: a BPE trained on the text)")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    own = parser.parse_args()
    if own.side:
        print(json.dumps(measure(own.side, own.folder, own.tokenizer_model, own.workers[0])))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        documents = corpus_documents(None, own.megabytes)
        write_jsonl(documents, folder / "corpus.jsonl")
        model = own.tokenizer_model or str(folder / "tokenizer.json")
        if own.tokenizer_model is None:
            train_tokenizer(documents, Path(model))
        pairs: dict[int, list[dict[str, Any]]] = {workers: [] for workers in own.workers}
        for _ in range(own.pairs):
            for workers, found in pairs.items():
                found.append({side: run(side, folder, model, workers) for side in ("raw", "megapipe")})
    tokens = {one["tokens"] for found in pairs.values() for pair in found for one in pair.values()}
    if len(tokens) != 1:
        sys.exit(f"the sides differ: {tokens} tokens")
    print(f"{len(documents):,} documents, {tokens.pop():,.0f} tokens, {own.pairs} pairs")
    print(
        "".join(
            title.rjust(16) for title in ("workers", "raw tok/s", "megapipe tok/s", "ratio", "CPU ratio", "speed-up")
        )
    )
    first = None
    for workers, found in pairs.items():
        raw, ours = (statistics.median(rate(pair[side]) for pair in found) for side in ("raw", "megapipe"))
        ratio, cpu = (
            statistics.median(rate(pair["megapipe"], clock) / rate(pair["raw"], clock) for pair in found)
            for clock in ("seconds", "cpu")
        )
        first = first or ours
        print(f"{workers:16}{raw:16,.0f}{ours:16,.0f}{ratio:16.3f}{cpu:16.3f}{ours / first:16.2f}")


if __name__ == "__main__":
    main()
