"""Writes the index of token files and gives complete files their names. The format is that of `data.indexed_file`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

from megapipe.checkpoint.disk import Disk
from megapipe.data.dataset import Array
from megapipe.data.indexed_file import (
    CHECK_BLOCK,
    CODES,
    HEADER,
    MAGIC,
    VERSION,
    Tokenizer,
    bin_path,
    contiguous_offsets,
    idx_path,
    replace_json,
    tokenizer_path,
)


def index_bytes(num_documents: int) -> int:
    """Return the size of an `.idx` with one sequence per document."""
    return HEADER.size + 12 * num_documents + 8 * (num_documents + 1)


def write_index(
    path: Path, dtype: np.dtype[Any], lengths: Array, documents: Array | None = None, modes: bytes = b""
) -> None:
    """Write the `.idx` of sequences that follow one another and sync it. documents: None for one sequence each.

    Works in blocks, so that the arrays may be mapped files of any size.
    """
    num_starts = len(lengths) + 1 if documents is None else len(documents)
    with open(path, "wb") as file:
        file.write(HEADER.pack(MAGIC, VERSION, CODES[dtype], len(lengths), num_starts))
        blocks = [slice(begin, begin + CHECK_BLOCK) for begin in range(0, max(len(lengths), num_starts), CHECK_BLOCK)]
        for block in blocks:
            file.write(lengths[block].astype("<i4").tobytes())
        end = 0
        for block in blocks:
            file.write((end + contiguous_offsets(lengths[block], dtype)).astype("<i8").tobytes())
            end += int(lengths[block].sum(dtype=np.int64)) * dtype.itemsize
        for block in blocks:
            starts = np.arange(block.start, min(block.stop, num_starts)) if documents is None else documents[block]
            file.write(starts.astype("<i8").tobytes())
        file.write(modes)
        file.flush()
        os.fsync(file.fileno())


def publish(partial_bin: Path, partial_idx: Path, prefix: str, tokenizer: Tokenizer | None = None) -> None:
    """Give a pair of files on disk its names. The part that was done before a crash is left out.

    The old index is removed first and the new one comes last, so that no index ever meets a foreign `.bin`, nor the
    name of a foreign tokenizer.
    """
    if partial_bin.exists():
        idx_path(prefix).unlink(missing_ok=True)
        if tokenizer is None:
            tokenizer_path(prefix).unlink(missing_ok=True)
        else:
            replace_json(tokenizer_path(prefix), Path(f"{partial_bin}.tokenizer"), tokenizer, indent=1)
        os.replace(partial_bin, bin_path(prefix))
    if partial_idx.exists():
        os.replace(partial_idx, idx_path(prefix))
    Disk().sync_folder(bin_path(prefix).parent)
