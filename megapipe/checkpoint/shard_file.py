"""One rank's safetensors file: written in one pass with checksums, read in the blocks that are needed, each checked.

The layout is safetensors': a u64 header length, a JSON header padded with spaces to 8 bytes, the tensors back to back.
"""

from __future__ import annotations

import json
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megapipe.checkpoint.disk import Disk
from megapipe.checkpoint.manifest import ITEM_BYTES, SavedBox, SavedFile
from megapipe.checkpoint.tensor_box import TensorBox, as_bytes
from megapipe.errors import CheckpointError
from megapipe.sharding.boxes import Box

BLOCK_BYTES = 1 << 22  # one checksum each: a reader of a few rows reads and checks no more than it needs
DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
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
            for block in _blocks(as_bytes(tensor.values), block_bytes):
                checksums.append(zlib.crc32(block))
                file.write(block)
            saved = SavedBox(path.name, tensor.box, len(header) + start, tuple(checksums))
            boxes.append(WrittenBox(tensor.name, DTYPE_NAMES[tensor.values.dtype], tensor.shape, saved))
    total = len(header) + sum(tensor.values.numel() * tensor.values.dtype.itemsize for tensor in tensors)
    return WrittenShard(path.name, SavedFile(total, zlib.crc32(header)), tuple(boxes))


def copy_into(folder: Path, tensor_name: str, dtype: str, saved: SavedBox, targets: Sequence[TensorBox], block_bytes: int) -> int:
    """Copy what `targets` have in common with a saved box out of its file; returns the number of elements copied.

    Only the blocks that hold something of it are read; each is checked. Raises CheckpointError naming file and tensor.
    """
    where = f"{folder / saved.file}, tensor {tensor_name}@{_offset_text(saved.box)}"
    item = ITEM_BYTES[dtype]
    common = [(target, box) for target in targets if (box := target.box.intersect(saved.box)) is not None]
    spans = [_span(saved.box, box) for _, box in common]
    wanted = {block for first, last in spans for block in range(first * item // block_bytes, (last * item - 1) // block_bytes + 1)}
    copied = 0
    for first_block, stop_block in _runs(sorted(wanted)):
        values = _read_blocks(folder / saved.file, where, saved, (first_block, stop_block), block_bytes, item, DTYPES[dtype])
        origin = first_block * block_bytes // item
        for (target, box), (first, last) in zip(common, spans, strict=True):
            if origin <= first and last <= origin + values.numel():
                _copy(target, box, saved.box, values, first - origin)
                copied += box.num_elements
    return copied


def _header(tensors: Sequence[TensorBox]) -> tuple[bytes, list[int]]:
    """The file's first bytes, and where each tensor starts after them."""
    entries: dict[str, object] = {}
    starts: list[int] = []
    position = 0
    for tensor in tensors:
        stop = position + tensor.values.numel() * tensor.values.dtype.itemsize
        entry = {"dtype": DTYPE_NAMES[tensor.values.dtype], "shape": list(tensor.box.shape), "data_offsets": [position, stop]}
        name = f"{tensor.name}@{_offset_text(tensor.box)}"
        if name in entries:
            raise ValueError(f"{name} is to be written twice by one rank")
        entries[name] = entry
        starts.append(position)
        position = stop
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, starts


def _offset_text(box: Box) -> str:
    return ",".join(str(offset) for offset in box.offset)


def _blocks(content: memoryview, block_bytes: int) -> Iterator[memoryview]:
    for start in range(0, len(content), block_bytes):
        yield content[start : start + block_bytes]


def _span(outer: Box, inner: Box) -> tuple[int, int]:
    """First and behind-the-last element of a box inside another, in the other's row-major order."""
    first, last = 0, 0
    for dim, size in enumerate(outer.shape):
        low = inner.offset[dim] - outer.offset[dim]
        first = first * size + low
        last = last * size + low + inner.shape[dim] - 1
    return first, last + 1


def _runs(blocks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Ascending block numbers as ranges [first, stop)."""
    first = 0
    for index, block in enumerate(blocks):
        if index + 1 == len(blocks) or blocks[index + 1] != block + 1:
            yield blocks[first], block + 1
            first = index + 1


def _read_blocks(
    path: Path, where: str, saved: SavedBox, blocks: tuple[int, int], block_bytes: int, item: int, dtype: torch.dtype
) -> Tensor:
    first, stop = blocks
    low, high = first * block_bytes, min(stop * block_bytes, saved.box.num_elements * item)
    content = bytearray(high - low)
    try:
        with open(path, "rb", buffering=0) as file:
            _read_fully(file.fileno(), memoryview(content), saved.start + low, where)
    except OSError as error:
        raise CheckpointError(f"{where}: cannot be read: {error.strerror}") from None
    for number, block in zip(range(first, stop), _blocks(memoryview(content), block_bytes), strict=True):
        found = zlib.crc32(block)
        if found != saved.crc32[number]:
            raise CheckpointError(
                f"{where} is damaged: the {len(block)} bytes from byte {saved.start + number * block_bytes} of the file on have checksum "
                f"{found:08x}, they were written with {saved.crc32[number]:08x}"
            )
    return torch.frombuffer(content, dtype=dtype)


def _read_fully(descriptor: int, into: memoryview, start: int, where: str) -> None:
    done = 0
    while done < len(into):
        count = os.preadv(descriptor, [into[done:]], start + done)
        if count == 0:
            raise CheckpointError(f"{where} is truncated: the file ends at byte {start + done}, the tensor at {start + len(into)}")
        done += count


def _copy(target: TensorBox, common: Box, outer: Box, values: Tensor, first: int) -> None:
    """values: a flat run of the outer box's elements; the common box's first element is values[first]."""
    strides = [1]
    for size in reversed(outer.shape[1:]):
        strides.insert(0, strides[0] * size)
    source = values.as_strided(common.shape, tuple(strides), first)
    inside = tuple(slice(o - t, o - t + n) for o, t, n in zip(common.offset, target.box.offset, common.shape, strict=True))
    target.values.view(target.box.shape)[inside].copy_(source)
