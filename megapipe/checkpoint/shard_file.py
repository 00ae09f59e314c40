"""One rank's safetensors file, written in one pass with checksums.

The layout is safetensors': a u64 header length, a JSON header padded with spaces, the tensors back to back.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megapipe.checkpoint.disk import Disk
from megapipe.checkpoint.manifest import SavedBox, SavedFile
from megapipe.checkpoint.tensor_box import TensorBox, as_bytes
from megapipe.dtypes import TENSOR_DTYPES
from megapipe.sharding.boxes import Box

BLOCK_BYTES = 1 << 22  # one checksum each: a reader of a few rows reads and checks no more than it needs
HEADER_MULTIPLE = 4096  # so that large tensors are written in whole pages
DTYPES = {dtype.safetensors_name: getattr(torch, dtype.torch_name) for dtype in TENSOR_DTYPES.values()}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class WrittenBox:
    """What a rank reports of one box it has written: enough for the manifest."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    saved: SavedBox


@dataclass(frozen=True)
class WrittenShard:
    """What a rank reports of its file."""

    name: str
    file: SavedFile
    boxes: tuple[WrittenBox, ...]


def shard_name(global_rank: int) -> str:
    return f"rank_{global_rank:05d}.safetensors"


def write_shard(disk: Disk, path: Path, tensors: Sequence[TensorBox], block_bytes: int = BLOCK_BYTES) -> WrittenShard:
    """Write and sync a file with these boxes. Raises OSError; nothing is communicated, so that it may run beside the training."""
    header, starts = _header(tensors)
    boxes = []
    with disk.create(path) as file:
        file.write(header)
        for tensor, start in zip(tensors, starts, strict=True):
            checksums = []
            for block in as_bytes(tensor.values, block_bytes):
                checksums.append(zlib.crc32(block))
                file.write(block)
            saved = SavedBox(path.name, tensor.box, len(header) + start, tuple(checksums))
            boxes.append(WrittenBox(tensor.name, DTYPE_NAMES[tensor.values.dtype], tensor.shape, saved))
    total = len(header) + sum(tensor.values.numel() * tensor.values.dtype.itemsize for tensor in tensors)
    return WrittenShard(path.name, SavedFile(total, zlib.crc32(header)), tuple(boxes))


def _header(tensors: Sequence[TensorBox]) -> tuple[bytes, list[int]]:
    """The file's first bytes, and where each tensor starts after them."""
    entries: dict[str, object] = {}
    starts: list[int] = []
    position = 0
    for tensor in tensors:
        stop = position + tensor.values.numel() * tensor.values.dtype.itemsize
        entry = {
            "dtype": DTYPE_NAMES[tensor.values.dtype],
            "shape": list(tensor.box.shape),
            "data_offsets": [position, stop],
        }
        name = f"{tensor.name}@{offset_text(tensor.box)}"
        if name in entries:
            raise ValueError(f"{name} is to be written twice by one rank")
        entries[name] = entry
        starts.append(position)
        position = stop
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % HEADER_MULTIPLE)
    return struct.pack("<Q", len(text)) + text, starts


def offset_text(box: Box) -> str:
    return ",".join(str(offset) for offset in box.offset)
