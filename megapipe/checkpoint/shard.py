"""Shards: one safetensors file per rank, written in one pass with checksums and read in checked blocks.

Layout of safetensors: u64 header length, JSON header padded with spaces, the tensors back to back.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import struct
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megapipe.checkpoint.disk import Disk
from megapipe.checkpoint.manifest import ITEM_BYTES, SavedBox, SavedFile
from megapipe.checkpoint.tensor_box import TensorBox, byte_blocks, slices_within
from megapipe.dtypes import TENSOR_DTYPES
from megapipe.errors import DamageError
from megapipe.sharding.boxes import Box, rectangles

BLOCK_BYTES = 1 << 22  # bytes per checksum: reading a few rows reads and checks little more than those
HEADER_MULTIPLE = 4096  # aligns large tensors to pages
READ_BYTES = 1 << 24  # bytes per read call, at least one block: the most memory that reading needs besides the targets
READS_AHEAD = 2
READAHEAD_BYTES = 1 << 20  # Linux limits one readahead request to about 1 MiB
DTYPES = {dtype.safetensors_name: getattr(torch, dtype.torch_name) for dtype in TENSOR_DTYPES.values()}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class WrittenBox:
    """The manifest entry of one box that a rank has written."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    saved: SavedBox


@dataclass(frozen=True)
class WrittenShard:
    """The manifest entries of one rank's file."""

    name: str
    file: SavedFile
    boxes: tuple[WrittenBox, ...]


def shard_name(global_rank: int) -> str:
    return f"rank_{global_rank:05d}.safetensors"


def write_shard(disk: Disk, path: Path, tensors: Sequence[TensorBox], block_bytes: int = BLOCK_BYTES) -> WrittenShard:
    """Write and sync a file with these boxes. No communication, so it may run in a thread. Raises OSError."""
    header = _header(tensors)
    position = len(header)
    boxes = []
    with disk.create(path) as file:
        file.write(header)
        for tensor in tensors:
            checksums = []
            for block in byte_blocks(tensor.values, block_bytes):
                checksums.append(zlib.crc32(block))
                file.write(block)
            saved = SavedBox(path.name, tensor.box, position, tuple(checksums))
            boxes.append(WrittenBox(tensor.name, DTYPE_NAMES[tensor.values.dtype], tensor.shape, saved))
            position += tensor.num_bytes
    return WrittenShard(path.name, SavedFile(position, zlib.crc32(header)), tuple(boxes))


def _header(tensors: Sequence[TensorBox]) -> bytes:
    entries: dict[str, object] = {}
    position = 0
    for tensor in tensors:
        name = box_name(tensor.name, tensor.box)
        if name in entries:
            raise ValueError(f"one rank would write {name} twice")
        entries[name] = {
            "dtype": DTYPE_NAMES[tensor.values.dtype],
            "shape": list(tensor.box.shape),
            "data_offsets": [position, position + tensor.num_bytes],
        }
        position += tensor.num_bytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % HEADER_MULTIPLE)
    return struct.pack("<Q", len(text)) + text


def box_name(name: str, box: Box) -> str:
    """Return the name of a box in a shard: `key/parameter@offset`."""
    return f"{name}@{','.join(map(str, box.offset))}"


@dataclass(frozen=True)
class ReadRequest:
    """A saved box and the targets that share elements with it. dtype: as in the manifest."""

    name: str
    dtype: str
    saved: SavedBox
    targets: Sequence[TensorBox]


@dataclass(frozen=True)
class _BlockRange:
    """Bytes [low, high) of a saved box, starting at its block `first_block`.

    common: each target with the box that it shares with the saved box.
    """

    request: ReadRequest
    common: tuple[tuple[TensorBox, Box], ...]
    first_block: int
    low: int
    high: int


class ShardReader:
    """Reads boxes of one checkpoint; each file is opened once. block_bytes: as in the manifest."""

    def __init__(self, folder: Path, block_bytes: int) -> None:
        self._folder = folder
        self._block_bytes = block_bytes
        self._descriptors: dict[str, int] = {}
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def __enter__(self) -> ShardReader:
        return self

    def __exit__(self, *exception: object) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)

    def copy_all(self, requests: Iterable[ReadRequest]) -> dict[str, int]:
        """Copy the requested elements into their targets, in the order given. Returns the elements copied per tensor.

        Reads only the blocks that hold a requested element, and has the kernel read the next ones while it checks
        these. Raises DamageError naming file and tensor.
        """
        copied: dict[str, int] = {}
        ahead: deque[_BlockRange] = deque()
        for blocks in itertools.chain((blocks for request in requests for blocks in self._ranges(request)), [None]):
            if blocks is not None:
                self._read_ahead(blocks)
                ahead.append(blocks)
            while ahead and (blocks is None or len(ahead) > READS_AHEAD):
                first = ahead.popleft()
                name = first.request.name
                copied[name] = copied.get(name, 0) + self._copy(first)
        return copied

    def _ranges(self, request: ReadRequest) -> Iterator[_BlockRange]:
        item, block_bytes, saved = ITEM_BYTES[request.dtype], self._block_bytes, request.saved
        common = tuple(
            (target, box) for target in request.targets if (box := target.box.intersect(saved.box)) is not None
        )
        needed: set[int] = set()
        for _, box in common:
            first, stop = _span(saved.box, box)
            needed.update(range(first * item // block_bytes, (stop * item - 1) // block_bytes + 1))
        for start, stop in _runs(sorted(needed), max(1, READ_BYTES // block_bytes)):
            high = min(stop * block_bytes, saved.box.num_elements * item)
            yield _BlockRange(request, common, start, start * block_bytes, high)

    def _read_ahead(self, blocks: _BlockRange) -> None:
        if hasattr(os, "posix_fadvise"):
            descriptor = self._open(blocks.request)
            start, stop = blocks.request.saved.start + blocks.low, blocks.request.saved.start + blocks.high
            for first in range(start, stop, READAHEAD_BYTES):
                os.posix_fadvise(descriptor, first, min(READAHEAD_BYTES, stop - first), os.POSIX_FADV_WILLNEED)

    def _copy(self, blocks: _BlockRange) -> int:
        """Read one range and copy it into its targets. Returns the number of elements copied."""
        saved, dtype = blocks.request.saved, DTYPES[blocks.request.dtype]
        first, stop = blocks.low // dtype.itemsize, blocks.high // dtype.itemsize
        direct = _target_memory(saved, dtype, blocks.common, (first, stop))
        if direct is not None:
            self._read(blocks, direct.view(torch.uint8))
            return direct.numel()
        num_bytes = blocks.high - blocks.low
        if self._scratch.numel() < num_bytes:
            self._scratch = torch.empty(num_bytes, dtype=torch.uint8)
        scratch = self._scratch[:num_bytes]
        self._read(blocks, scratch)
        values = scratch.view(dtype)
        boxes = _boxes_of(saved.box, first, stop)
        return sum(_copy_box(target, box, at - first, values) for box, at in boxes for target, _ in blocks.common)

    def _read(self, blocks: _BlockRange, into: Tensor) -> None:
        """Read one range and check each of its blocks."""
        content, saved, where = into.numpy().data, blocks.request.saved, self._where(blocks.request)
        descriptor, begin = self._open(blocks.request), saved.start + blocks.low
        done = 0
        while done < len(content):
            try:
                count = os.preadv(descriptor, [content[done:]], begin + done)
            except OSError as error:
                raise DamageError(f"{where}: cannot be read: {error.strerror}") from None
            if count == 0:
                raise DamageError(
                    f"{where} is truncated: the file ends at byte {begin + done}, the tensor at {begin + len(content)}"
                )
            done += count
        for start in range(0, len(content), self._block_bytes):
            block = content[start : start + self._block_bytes]
            found, expected = zlib.crc32(block), saved.crc32[blocks.first_block + start // self._block_bytes]
            if found != expected:
                raise DamageError(
                    f"{where} is damaged: {len(block)} bytes from byte {begin + start} of the file on have checksum "
                    f"{found:08x}, expected {expected:08x}"
                )

    def _open(self, request: ReadRequest) -> int:
        name = request.saved.file
        if name not in self._descriptors:
            try:
                self._descriptors[name] = os.open(self._folder / name, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise DamageError(f"{self._where(request)}: cannot be read: {error.strerror}") from None
        return self._descriptors[name]

    def _where(self, request: ReadRequest) -> str:
        return f"{self._folder / request.saved.file}, tensor {box_name(request.name, request.saved.box)}"


def _target_memory(
    saved: SavedBox, dtype: torch.dtype, common: Sequence[tuple[TensorBox, Box]], elements: tuple[int, int]
) -> Tensor | None:
    """Return the memory of the only target if elements [first, stop) of the saved box are contiguous there too.

    Then the file can be read straight into it. Returns None if a copy through scratch memory is needed.
    """
    if len(common) != 1:
        return None
    target, box = common[0]
    same_rows = box.shape[1:] == saved.box.shape[1:] == target.box.shape[1:]
    if target.values.dtype != dtype or target.values.device.type != "cpu" or not same_rows:
        return None
    row = math.prod(box.shape[1:])
    low = (box.offset[0] - saved.box.offset[0]) * row  # elements of the saved box that the target shares: [low, high)
    high = low + box.shape[0] * row
    if elements[0] < low or elements[1] > high:
        return None
    first = (saved.box.offset[0] - target.box.offset[0]) * row + elements[0]
    return target.values[first : first + elements[1] - elements[0]]


def _span(outer: Box, inner: Box) -> tuple[int, int]:
    """Return [first, stop) of a box's elements in the row-major order of the box that contains it."""
    first, last = 0, 0
    for dim, size in enumerate(outer.shape):
        low = inner.offset[dim] - outer.offset[dim]
        first = first * size + low
        last = last * size + low + inner.shape[dim] - 1
    return first, last + 1


def _runs(blocks: Sequence[int], max_length: int) -> Iterator[tuple[int, int]]:
    """Group ascending block numbers into consecutive ranges [first, stop) of at most `max_length` blocks."""
    first = 0
    for index, block in enumerate(blocks):
        if index + 1 == len(blocks) or blocks[index + 1] != block + 1 or index + 1 - first == max_length:
            yield blocks[first], block + 1
            first = index + 1


def _boxes_of(outer: Box, start: int, stop: int) -> Iterator[tuple[Box, int]]:
    """Yield elements [start, stop) of a box's row-major order as global boxes, each with its first index."""
    columns = math.prod(outer.shape[1:])
    for row, num_rows, column, num_columns, at in rectangles(outer.shape[0], columns, start, stop):
        if len(outer.shape) == 1:
            yield Box((outer.offset[0] + row,), (num_rows,)), at
        else:
            yield Box((outer.offset[0] + row, outer.offset[1] + column), (num_rows, num_columns)), at


def _copy_box(target: TensorBox, box: Box, first: int, values: Tensor) -> int:
    """Copy what a target shares with a box. values[first:] holds the box row-major. Returns the elements copied."""
    common = box.intersect(target.box)
    if common is None:
        return 0
    source = values[first : first + box.num_elements].view(box.shape)[slices_within(common, box)]
    target.values.view(target.box.shape)[slices_within(common, target.box)].copy_(source)
    return common.num_elements
