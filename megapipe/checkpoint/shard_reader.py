"""`ShardReader`: copies what boxes have in common out of shard files, block by block, each block checked against its checksum."""

from __future__ import annotations

import itertools
import math
import os
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megapipe.checkpoint.manifest import ITEM_BYTES, SavedBox
from megapipe.checkpoint.shard_file import DTYPES, offset_text
from megapipe.checkpoint.tensor_box import TensorBox
from megapipe.errors import DamageError
from megapipe.sharding.boxes import Box, rectangles

READ_BYTES = (
    1 << 24
)  # of one call, at least one block; the most memory that reading takes beside the tensors themselves
READS_AHEAD = 2
ANNOUNCED_BYTES = 1 << 20


@dataclass(frozen=True)
class Wanted:
    """A saved box of a tensor, and what shares elements with it. dtype: as in the manifest."""

    name: str
    dtype: str
    saved: SavedBox
    targets: Sequence[TensorBox]


@dataclass(frozen=True)
class _Read:
    """Bytes [low, high) of a saved box, which begin with its block `first_block`. common: each target with what it shares with the box."""

    wanted: Wanted
    common: tuple[tuple[TensorBox, Box], ...]
    first_block: int
    low: int
    high: int

    def where(self, folder: Path) -> str:
        saved = self.wanted.saved
        return f"{folder / saved.file}, tensor {self.wanted.name}@{offset_text(saved.box)}"


class ShardReader:
    """The files of one checkpoint, opened once each. block_bytes: of the manifest."""

    def __init__(self, folder: Path, block_bytes: int) -> None:
        self._folder = folder
        self._block_bytes = block_bytes
        self._blocks_at_once = max(1, READ_BYTES // block_bytes)
        self._descriptors: dict[str, int] = {}
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def __enter__(self) -> ShardReader:
        return self

    def __exit__(self, *exception: object) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)

    def copy_all(self, wanted: Iterable[Wanted]) -> dict[str, int]:
        """Copy everything that `wanted` asks for, in its order; returns the number of elements copied, by tensor.

        Only the blocks that hold something of it are read; the disk is told of the next ones while these are checked.
        Raises DamageError naming file and tensor.
        """
        copied: dict[str, int] = {}
        ahead: deque[_Read] = deque()
        for read in itertools.chain((read for one in wanted for read in self._reads(one)), [None]):
            if read is not None:
                self._announce(read)
                ahead.append(read)
            while ahead and (read is None or len(ahead) > READS_AHEAD):
                first = ahead.popleft()
                name = first.wanted.name
                copied[name] = copied.get(name, 0) + self._copy(first)
        return copied

    def copy(self, wanted: Wanted) -> int:
        """The same for one box of one tensor; returns the number of elements."""
        return sum(self._copy(read) for read in self._reads(wanted))

    def _reads(self, wanted: Wanted) -> Iterator[_Read]:
        item, block_bytes, saved = ITEM_BYTES[wanted.dtype], self._block_bytes, wanted.saved
        common = tuple(
            (target, box) for target in wanted.targets if (box := target.box.intersect(saved.box)) is not None
        )
        blocks: set[int] = set()
        for _, box in common:
            first, last = _span(saved.box, box)
            blocks.update(range(first * item // block_bytes, (last * item - 1) // block_bytes + 1))
        for start, stop in _runs(sorted(blocks), self._blocks_at_once):
            yield _Read(
                wanted, common, start, start * block_bytes, min(stop * block_bytes, saved.box.num_elements * item)
            )

    def _announce(self, read: _Read) -> None:
        """Have the kernel begin to read; it takes no more than about a mebibyte from one call."""
        if hasattr(os, "posix_fadvise"):
            saved = read.wanted.saved
            descriptor = self._open(saved.file, read.where(self._folder))
            for start in range(saved.start + read.low, saved.start + read.high, ANNOUNCED_BYTES):
                length = min(ANNOUNCED_BYTES, saved.start + read.high - start)
                os.posix_fadvise(descriptor, start, length, os.POSIX_FADV_WILLNEED)

    def _copy(self, read: _Read) -> int:
        saved, dtype = read.wanted.saved, DTYPES[read.wanted.dtype]
        first, last = read.low // dtype.itemsize, read.high // dtype.itemsize
        whole = self._target_memory(saved, dtype, read.common, (first, last))
        into = self._memory(read.high - read.low) if whole is None else whole.view(torch.uint8)
        self._read(read, into)
        if whole is not None:
            return whole.numel()
        values = into.view(dtype)
        boxes = _boxes_of(saved.box, first, last)
        return sum(_copy(target, box, at - first, values) for box, at in boxes for target, _ in read.common)

    def _target_memory(
        self, saved: SavedBox, dtype: torch.dtype, common: Sequence[tuple[TensorBox, Box]], elements: tuple[int, int]
    ) -> Tensor | None:
        """The one target's memory for these elements of the saved box, where they lie there in a row as they do in the file."""
        if len(common) != 1:
            return None
        target, box = common[0]
        if (
            target.values.dtype != dtype
            or target.values.device.type != "cpu"
            or not box.shape[1:] == saved.box.shape[1:] == target.box.shape[1:]
        ):
            return None
        row = math.prod(box.shape[1:])
        first = (saved.box.offset[0] - target.box.offset[0]) * row + elements[0]
        low, high = (
            (box.offset[0] - saved.box.offset[0]) * row,
            (box.offset[0] - saved.box.offset[0] + box.shape[0]) * row,
        )
        if elements[0] < low or elements[1] > high:
            return None
        return target.values[first : first + elements[1] - elements[0]]

    def _memory(self, num_bytes: int) -> Tensor:
        if self._scratch.numel() < num_bytes:
            self._scratch = torch.empty(num_bytes, dtype=torch.uint8)
        return self._scratch[:num_bytes]

    def _read(self, read: _Read, into: Tensor) -> None:
        content, saved, where = into.numpy().data, read.wanted.saved, read.where(self._folder)
        begin = saved.start + read.low
        try:
            _read_fully(self._open(saved.file, where), content, begin, where)
        except OSError as error:
            raise DamageError(f"{where}: cannot be read: {error.strerror}") from None
        for start in range(0, len(content), self._block_bytes):
            block = content[start : start + self._block_bytes]
            found, written = zlib.crc32(block), saved.crc32[read.first_block + start // self._block_bytes]
            if found != written:
                raise DamageError(
                    f"{where} is damaged: the {len(block)} bytes from byte {begin + start} of the file on have checksum "
                    f"{found:08x}, they were written with {written:08x}"
                )

    def _open(self, name: str, where: str) -> int:
        if name not in self._descriptors:
            try:
                self._descriptors[name] = os.open(self._folder / name, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise DamageError(f"{where}: cannot be read: {error.strerror}") from None
        return self._descriptors[name]


def _span(outer: Box, inner: Box) -> tuple[int, int]:
    """First and behind-the-last element of a box inside another, in the other's row-major order."""
    first, last = 0, 0
    for dim, size in enumerate(outer.shape):
        low = inner.offset[dim] - outer.offset[dim]
        first = first * size + low
        last = last * size + low + inner.shape[dim] - 1
    return first, last + 1


def _runs(blocks: Sequence[int], at_most: int) -> Iterator[tuple[int, int]]:
    """Ascending block numbers as ranges [first, stop) of no more than so many."""
    first = 0
    for index, block in enumerate(blocks):
        if index + 1 == len(blocks) or blocks[index + 1] != block + 1 or index + 1 - first == at_most:
            yield blocks[first], block + 1
            first = index + 1


def _boxes_of(outer: Box, start: int, stop: int) -> Iterator[tuple[Box, int]]:
    """Elements [start, stop) of a box's row-major order as boxes of the global tensor, each with its first element's number."""
    columns = math.prod(outer.shape[1:])
    for row, num_rows, column, num_columns, at in rectangles(outer.shape[0], columns, start, stop):
        if len(outer.shape) == 1:
            yield Box((outer.offset[0] + row,), (num_rows,)), at
        else:
            yield Box((outer.offset[0] + row, outer.offset[1] + column), (num_rows, num_columns)), at


def _copy(target: TensorBox, box: Box, first: int, values: Tensor) -> int:
    """values[first:] holds a box row-major; copy what the target has in common with it. Returns the number of elements."""
    common = box.intersect(target.box)
    if common is None:
        return 0
    source = values[first : first + box.num_elements].view(box.shape)[_inside(common, box)]
    target.values.view(target.box.shape)[_inside(common, target.box)].copy_(source)
    return common.num_elements


def _inside(inner: Box, outer: Box) -> tuple[slice, ...]:
    return tuple(slice(o - t, o - t + n) for o, t, n in zip(inner.offset, outer.offset, inner.shape, strict=True))


def _read_fully(descriptor: int, into: memoryview, start: int, where: str) -> None:
    done = 0
    while done < len(into):
        count = os.preadv(descriptor, [into[done:]], start + done)
        if count == 0:
            raise DamageError(
                f"{where} is truncated: the file ends at byte {start + done}, the tensor at {start + len(into)}"
            )
        done += count
