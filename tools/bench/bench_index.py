#!/usr/bin/env python3
"""Measure building and opening the sample index of a huge token file, and Megatron-Core's if its Python is given.

python tools/bench/bench_index.py --documents 30000000 --folder /tmp/index --megatron-python /path/to/bin/python

Writes a token file whose `.bin` is sparse (zeros that take no disk space) and whose `.idx` takes 20 bytes a document.
Then each side builds the index of the training samples in an empty cache, and opens it as every further rank and every
later start does, each time in a new process. Imports are not timed. Peak memory is VmHWM of the process, beside
what it was after the imports; "of the .idx" is the part of the file that was in this process's memory at the end of a
start. Both sides must give the same samples.
"""

from __future__ import annotations

import argparse
import json
import os.path
import shutil
import statistics
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

SEED, SPLIT = 1234, "100,0,0"
COLUMNS = ("seconds", "peak_mb", "peak_over_imports_mb", "idx_mb", "cache_mb")


def write_tokens(prefix: Path, num_documents: int) -> None:
    """Write documents of 20 to 980 tokens, all zero."""
    from megapipe.data.indexed_file import CODES, HEADER, MAGIC, VERSION, bin_path, idx_path

    lengths = np.random.default_rng(SEED).integers(20, 981, num_documents, dtype=np.int32)
    offsets = np.zeros(num_documents, np.int64)
    np.cumsum(lengths[:-1].astype(np.int64) * 2, out=offsets[1:])
    with open(idx_path(prefix), "wb") as file:
        file.write(HEADER.pack(MAGIC, VERSION, CODES[np.dtype("<u2")], num_documents, num_documents + 1))
        lengths.tofile(file)
        offsets.tofile(file)
        np.arange(num_documents + 1, dtype=np.int64).tofile(file)
    with open(bin_path(prefix), "wb") as file:
        file.truncate(int(offsets[-1]) + int(lengths[-1]) * 2)


def megapipe_index(prefix: str, cache: str, seq_length: int, num_samples: int) -> tuple[Callable[[], Any], Any]:
    """Return a function that builds or opens the data set, and one that gives (documents, shuffle) of it."""
    from megapipe.config.files import DataConfig
    from megapipe.data.build_datasets import DatasetRequest, build_datasets

    data = DataConfig(data_path=(prefix,), split=SPLIT, data_cache_path=cache)
    request = DatasetRequest(data, seq_length, SEED, (num_samples, 0, 0))
    return lambda: build_datasets(request).train, lambda built: (built.index.documents, built.index.shuffle)


def megatron_index(prefix: str, cache: str, seq_length: int, num_samples: int) -> tuple[Callable[[], Any], Any]:
    """Return the same of Megatron-Core."""
    from megatron.core.datasets import helpers  # noqa: F401 (compiled; imported when an index is built)
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    class Tokenizer:
        eod, vocab_size, unique_identifiers, pad = 0, 1000, {"class": "Tokenizer"}, -1

    config = GPTDatasetConfig(
        random_seed=SEED, sequence_length=seq_length, blend=([prefix], None), split=SPLIT, path_to_cache=cache,
        tokenizer=Tokenizer(), reset_position_ids=False, reset_attention_mask=False, eod_mask_loss=False,
        create_attention_mask=False,
    )  # fmt: skip
    builder = BlendedMegatronDatasetBuilder(GPTDataset, [num_samples, 0, 0], lambda: True, config)
    return lambda: builder.build()[0], lambda built: (built.document_index, built.shuffle_index)


SIDES = {"megapipe": megapipe_index, "megatron": megatron_index}


def memory_mb(field: str) -> float:
    """Return VmHWM or VmRSS of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(field)).split()[1]) / 1024


def mapped_mb(path: str) -> float:
    """Return how much of a file is in this process's memory through its mappings."""
    total, is_file = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            is_file = line.endswith(path)
        elif is_file and line.startswith("Rss:"):
            total += int(line.split()[1])
    return total / 1024


def measure(own: argparse.Namespace) -> None:
    """Build or open the data set in this process and print a JSON line."""
    make, indices = SIDES[own.side](own.prefix, own.cache, own.seq_length, own.samples)
    imported = memory_mb("VmRSS")
    begin, cpu = time.perf_counter(), time.process_time()
    built = make()
    seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
    peak, idx = memory_mb("VmHWM"), mapped_mb(os.path.realpath(f"{own.prefix}.idx"))
    documents, shuffle = indices(built)
    digest = zlib.crc32(np.asarray(documents[::1000], np.int64).tobytes())
    digest = zlib.crc32(np.asarray(shuffle[::1000], np.int64).tobytes(), digest)
    found = {"seconds": seconds, "cpu": cpu, "peak_mb": peak, "peak_over_imports_mb": peak - imported, "idx_mb": idx}
    print(json.dumps(found | {"samples": len(built), "digest": digest}))


def run(python: str, side: str, own: argparse.Namespace, cache: Path) -> dict[str, Any]:
    words = ["--side", side, "--prefix", str(own.folder / "tokens"), "--cache", str(cache)]
    words += ["--seq-length", str(own.seq_length), "--samples", str(own.samples)]
    done = subprocess.run([python, __file__, *words], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{side} failed:\n{done.stderr[-3000:]}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found | {"cache_mb": sum(path.stat().st_size for path in cache.rglob("*") if path.is_file()) / (1 << 20)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, default=30_000_000)
    parser.add_argument("--seq-length", type=int, default=4096)
    parser.add_argument("--samples", type=int, default=3_000_000, help="training samples of the run")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/megapipe_index"))
    parser.add_argument("--megatron-python", help="Python that imports megatron.core")
    parser.add_argument("--repeats", type=int, default=3, help="of every measurement, alternating; medians are shown")
    for name in ("--side", "--prefix", "--cache"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    own = parser.parse_args()
    if own.side:
        measure(own)
        return
    own.folder.mkdir(parents=True, exist_ok=True)
    write_tokens(own.folder / "tokens", own.documents)
    pythons = {"megapipe": sys.executable} | ({"megatron": own.megatron_python} if own.megatron_python else {})
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    try:
        for _ in range(own.repeats):
            for side, python in pythons.items():
                cache = own.folder / f"cache_{side}"
                shutil.rmtree(cache, ignore_errors=True)
                for what in ("build", "start"):
                    found.setdefault((what, side), []).append(run(python, side, own, cache))
    finally:
        shutil.rmtree(own.folder, ignore_errors=True)
    if len({(one["samples"], one["digest"]) for runs in found.values() for one in runs}) != 1:
        sys.exit(f"the sides differ: {found}")
    print(f"{own.documents:,} documents, {next(iter(found.values()))[0]['samples']:,} samples of {own.seq_length}")
    print("".join(name.rjust(22) for name in ("", *COLUMNS)))
    for (what, side), runs in sorted(found.items()):
        medians = [statistics.median(one[name] for one in runs) for name in COLUMNS]
        print(f"{side} {what}".rjust(22) + "".join(f"{value:22.3f}" for value in medians))


if __name__ == "__main__":
    main()
