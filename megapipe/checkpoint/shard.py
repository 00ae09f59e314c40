"""`TensorBox`, a rectangle of a global tensor with its memory, and shards: one safetensors file of boxes per rank.

Layout of safetensors: u64 header length, JSON header padded with spaces, the tensors back to back.
"""

from __future__ import annotations

import json
import math
import os
import struct
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megapipe.checkpoint.disk import Disk
from megapipe.checkpoint.manifest import SavedBox, SavedFile, SavedTensor
from megapipe.dtypes import TENSOR_DTYPES
from megapipe.sharding.boxes import Box, Piece

BLOCK_BYTES = 1 << 22  # bytes per checksum: reading a few rows reads and checks little more than those
HEADER_MULTIPLE = 4096  # aligns large tensors to pages
DTYPES = {dtype.safetensors_name: getattr(torch, dtype.torch_name) for dtype in TENSOR_DTYPES.values()}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class TensorBox:
    """A box and its values."""

    name: str  # `key/parameter`
    shape: tuple[int, ...]  # of the global tensor, without vocabulary padding
    box: Box
    values: Tensor  # [box.num_elements], row-major and contiguous

    def __post_init__(self) -> None:
        if self.values.numel() != self.box.num_elements or not self.values.is_contiguous():
            shape, strides = tuple(self.values.shape), self.values.stride()
            raise ValueError(f"{self.name}: {shape} values with strides {strides} for {self.box}")

    @property
    def num_bytes(self) -> int:
        return self.values.numel() * self.values.dtype.itemsize


def unpadded_box(piece: Piece) -> Box | None:
    """Return a piece's box without vocabulary padding (its last rows), or None if nothing is left."""
    box, true_rows = piece.box, piece.spec.true_rows or piece.spec.shape[0]
    rows = min(max(true_rows - box.offset[0], 0), box.shape[0])
    return Box(box.offset, (rows, *box.shape[1:])) if rows else None


def tensor_box(key: str, piece: Piece, values: Tensor) -> TensorBox | None:
    """Return a view of a piece's values [piece.box.num_elements] without padding, or None if all are padding."""
    box = unpadded_box(piece)
    if box is None:
        return None
    shape = (piece.spec.true_rows or piece.spec.shape[0], *piece.spec.shape[1:])
    return TensorBox(f"{key}/{piece.spec.name}", shape, box, values.detach()[: box.num_elements])


def padding_of(piece: Piece, values: Tensor) -> Tensor:
    """Return a view of the part of a piece's values that is vocabulary padding, often empty."""
    box = unpadded_box(piece)
    return values.detach()[0 if box is None else box.num_elements :]


def box_name(name: str, box: Box) -> str:
    """Return the name of a box in a shard: `key/parameter@offset`."""
    return f"{name}@{','.join(map(str, box.offset))}"


def byte_blocks(values: Tensor, block_bytes: int) -> Iterator[memoryview]:
    """Yield the bytes of a tensor in host memory, in blocks; tensors on the CPU are not copied."""
    flat = values.detach().reshape(-1).view(torch.uint8)
    if flat.device.type == "cpu":
        whole = flat.numpy().data
        for start in range(0, len(whole), block_bytes):
            yield whole[start : start + block_bytes]
    else:
        for block in flat.split(block_bytes):
            yield block.cpu().numpy().data


def slices_within(inner: Box, outer: Box) -> tuple[slice, ...]:
    """Return the index of a box in the values of the box that contains it."""
    return tuple(slice(o - t, o - t + n) for o, t, n in zip(inner.offset, outer.offset, inner.shape, strict=True))


@dataclass(frozen=True)
class WrittenShard:
    """The manifest entries of one rank's file."""

    name: str
    file: SavedFile
    tensors: tuple[tuple[str, SavedTensor], ...]  # (name, its part here: one box), in the file's order


def shard_name(global_rank: int) -> str:
    return f"rank_{global_rank:05d}.safetensors"


def write_shard(disk: Disk, path: Path, tensors: Sequence[TensorBox], block_bytes: int = BLOCK_BYTES) -> WrittenShard:
    """Write and sync a file with these boxes. No communication, so it may run in a thread. Raises OSError."""
    entries = [(box_name(tensor.name, tensor.box), tensor.values.dtype, tensor.box.shape) for tensor in tensors]
    header = safetensors_header(entries, HEADER_MULTIPLE)
    position = len(header)
    parts = []
    with disk.create(path) as file:
        file.write(header)
        for tensor in tensors:
            checksums = []
            for block in byte_blocks(tensor.values, block_bytes):
                checksums.append(zlib.crc32(block))
                file.write(block)
            saved = SavedBox(path.name, tensor.box, position, tuple(checksums))
            parts.append((tensor.name, SavedTensor(DTYPE_NAMES[tensor.values.dtype], tensor.shape, (saved,))))
            position += tensor.num_bytes
    return WrittenShard(path.name, SavedFile(position, zlib.crc32(header)), tuple(parts))


def read_header(descriptor: int) -> dict[str, tuple[str, list[int], int]]:
    """Return dtype, shape and first byte of each tensor of an open file. Raises OSError, or ValueError or others of its
    kind if it is damaged.
    """
    num_bytes = min(struct.unpack("<Q", os.pread(descriptor, 8, 0))[0], os.fstat(descriptor).st_size)
    entries = json.loads(os.pread(descriptor, num_bytes, 8))
    return {name: (one["dtype"], one["shape"], 8 + num_bytes + one["data_offsets"][0]) for name, one in entries.items()}


def safetensors_header(
    tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...]]],
    multiple: int,
    metadata: Mapping[str, str] | None = None,
) -> bytes:
    """Return the start of a safetensors file, a multiple of `multiple` bytes. tensors: name, dtype, shape, in order."""
    entries: dict[str, object] = {} if metadata is None else {"__metadata__": metadata}
    start = 0
    for name, dtype, shape in tensors:
        if name in entries:
            raise ValueError(f"one file would hold {name} twice")
        stop = start + math.prod(shape) * dtype.itemsize
        entries[name] = {"dtype": DTYPE_NAMES[dtype], "shape": list(shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % multiple)
    return struct.pack("<Q", len(text)) + text
