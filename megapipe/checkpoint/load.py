"""`load_tensors`: fill this rank's boxes from a checkpoint of any grid, reading only the blocks that they need."""

from __future__ import annotations

import math
import os
import struct
import zlib
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megapipe.checkpoint.folder import CheckpointFolder
from megapipe.checkpoint.manifest import ITEM_BYTES, SavedBox
from megapipe.checkpoint.shard import DTYPES, TensorBox, box_name, read_header, slices_within
from megapipe.comm.collectives import gather_objects
from megapipe.comm.groups import Group
from megapipe.errors import CheckpointError, DamageError, RemovedError
from megapipe.sharding.boxes import Box, rectangles

READ_BYTES = 1 << 24  # bytes per read call, at least one block: the most memory that reading needs besides the targets
READS_AHEAD = 2
READAHEAD_BYTES = 1 << 20  # Linux limits one readahead request to about 1 MiB


def load_tensors(
    folder: CheckpointFolder, wanted: Iterable[TensorBox], group: Group, *, may_round: bool = False
) -> int:
    """Fill `values` of each box; called by all ranks of the group. Returns the bytes filled on this rank.

    may_round: allow narrower dtypes; widening (bf16 into fp32, fp32 into fp64) is always allowed. Raises
    CheckpointError on every rank if any rank fails, naming a tensor that is missing or has another shape or a wider
    dtype, or the file; DamageError if nothing but damaged or truncated files is wrong, RemovedError if the checkpoint
    was removed meanwhile.
    """
    filled, failure = 0, None
    try:
        filled = _load(folder, list(wanted), may_round)
    except CheckpointError as error:
        failure = type(error)(f"rank {group.global_rank}: {error}")
    failures = [other for other in gather_objects(failure, group) if other is not None]
    if failures:
        kinds = (RemovedError, DamageError, CheckpointError)
        kind = next(kind for kind in kinds if all(isinstance(other, kind) for other in failures))
        others = f" (and {len(failures) - 1} other ranks failed)" if len(failures) > 1 else ""
        raise kind(f"{failures[0]}{others}")
    return filled


def _load(folder: CheckpointFolder, wanted: list[TensorBox], may_round: bool) -> int:
    by_name: dict[str, list[TensorBox]] = {}
    for target in wanted:
        by_name.setdefault(target.name, []).append(target)
    requests = []
    for name, targets in by_name.items():  # check everything that can be checked before reading
        saved = folder.manifest.tensors.get(name)
        if saved is None:
            raise CheckpointError(f"{folder.path} holds no tensor {name}")
        for target in targets:
            if target.shape != saved.shape:
                shapes = f"has shape {list(saved.shape)}, but this model's has {list(target.shape)}"
                raise CheckpointError(f"{folder.path}: {name} {shapes}")
            dtype, needed = DTYPES[saved.dtype], target.values.dtype
            if not may_round and torch.promote_types(dtype, needed) != needed:
                message = f"was saved as {dtype}, which {needed} cannot represent exactly".replace("torch.", "")
                raise CheckpointError(f"{folder.path}: {name} {message}")
        requests += [ReadRequest(name, saved.dtype, box, targets) for box in saved.boxes]
    requests.sort(key=lambda request: (request.saved.file, request.saved.start))  # sequential reads
    with ShardReader(folder.path, folder.manifest.block_bytes) as reader:
        copied = reader.copy_all(requests)
    for name, targets in by_name.items():
        missing = sum(target.box.num_elements for target in targets) - copied[name]
        if missing:
            shape = folder.manifest.tensors[name].shape
            size = f"of shape {list(shape)} ({math.prod(shape)} elements)"
            raise CheckpointError(f"{folder.path}: {name} {size} lacks {missing}")
    return sum(target.num_bytes for target in wanted)


@dataclass(frozen=True)
class ReadRequest:
    """A saved box and the targets that may share elements with it. dtype: as in the manifest."""

    name: str
    dtype: str
    saved: SavedBox
    targets: Sequence[TensorBox]


@dataclass(frozen=True)
class _BlockRange:
    """Bytes [low, high) of a saved box: whole blocks. common: each target with the box that it shares with it."""

    request: ReadRequest
    common: tuple[tuple[TensorBox, Box], ...]
    low: int
    high: int


class ShardReader:
    """Reads boxes of one checkpoint; each file is opened once. block_bytes: as in the manifest."""

    def __init__(self, folder: Path, block_bytes: int) -> None:
        self._folder = folder
        self._block_bytes = block_bytes
        self._descriptors: dict[str, int] = {}
        self._headers: dict[str, dict[str, tuple[str, list[int], int]]] = {}
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def __enter__(self) -> ShardReader:
        return self

    def __exit__(self, *exception: object) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)

    def copy_all(self, requests: Iterable[ReadRequest]) -> Counter[str]:
        """Copy the requested elements into their targets, in the order given. Returns the elements copied per tensor.

        Reads only the blocks that hold a requested element, and has the kernel read the next ones while it checks
        these. Raises DamageError naming file and tensor.
        """
        copied: Counter[str] = Counter()
        ahead: deque[_BlockRange] = deque()
        for blocks in (blocks for request in requests for blocks in self._ranges(request)):
            self._read_ahead(blocks)
            ahead.append(blocks)
            if len(ahead) > READS_AHEAD:
                first = ahead.popleft()
                copied[first.request.name] += self._copy(first)
        for blocks in ahead:
            copied[blocks.request.name] += self._copy(blocks)
        return copied

    def _ranges(self, request: ReadRequest) -> Iterator[_BlockRange]:
        item, block_bytes, saved = ITEM_BYTES[request.dtype], self._block_bytes, request.saved
        common = tuple(
            (target, box) for target in request.targets if (box := target.box.intersect(saved.box)) is not None
        )
        needed: set[int] = set()
        for _, box in common:
            first, last = 0, 0  # elements of the saved box, in row-major order
            for dim, size in enumerate(saved.box.shape):
                low = box.offset[dim] - saved.box.offset[dim]
                first, last = first * size + low, last * size + low + box.shape[dim] - 1
            needed.update(range(first * item // block_bytes, ((last + 1) * item - 1) // block_bytes + 1))
        for start, stop in _runs(sorted(needed), max(1, READ_BYTES // block_bytes)):
            high = min(stop * block_bytes, saved.box.num_elements * item)
            yield _BlockRange(request, common, start * block_bytes, high)

    def _read_ahead(self, blocks: _BlockRange) -> None:
        if hasattr(os, "posix_fadvise"):
            descriptor = self._open(blocks.request)
            start, stop = blocks.request.saved.start + blocks.low, blocks.request.saved.start + blocks.high
            for first in range(start, stop, READAHEAD_BYTES):
                os.posix_fadvise(descriptor, first, min(READAHEAD_BYTES, stop - first), os.POSIX_FADV_WILLNEED)

    def _copy(self, blocks: _BlockRange) -> int:
        """Read one range and copy it into its targets. Returns the number of elements copied."""
        outer, dtype = blocks.request.saved.box, DTYPES[blocks.request.dtype]
        first, stop = blocks.low // dtype.itemsize, blocks.high // dtype.itemsize
        direct = _target_memory(outer, dtype, blocks.common, first, stop)
        if direct is not None:
            self._read(blocks, direct.view(torch.uint8))
            return direct.numel()
        num_bytes = blocks.high - blocks.low
        if self._scratch.numel() < num_bytes:
            self._scratch = torch.empty(num_bytes, dtype=torch.uint8)
        scratch = self._scratch[:num_bytes]
        self._read(blocks, scratch)
        values = scratch.view(dtype)
        copied = 0
        columns = math.prod(outer.shape[1:])
        for row, num_rows, column, num_columns, at in rectangles(outer.shape[0], columns, first, stop):
            if len(outer.shape) == 1:
                box = Box((outer.offset[0] + row,), (num_rows,))
            else:
                box = Box((outer.offset[0] + row, outer.offset[1] + column), (num_rows, num_columns))
            part = values[at - first : at - first + box.num_elements].view(box.shape)
            for target, _ in blocks.common:
                shared = box.intersect(target.box)
                if shared is not None:
                    into = target.values.view(target.box.shape)[slices_within(shared, target.box)]
                    into.copy_(part[slices_within(shared, box)])
                    copied += shared.num_elements
        return copied

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
                ends = f"the file ends at byte {begin + done}, the tensor at {begin + len(content)}"
                raise DamageError(f"{where} is truncated: {ends}")
            done += count
        for start in range(0, len(content), self._block_bytes):
            block = content[start : start + self._block_bytes]
            found, expected = zlib.crc32(block), saved.crc32[(blocks.low + start) // self._block_bytes]
            if found != expected:
                raise DamageError(
                    f"{where} is damaged: {len(block)} bytes from byte {begin + start} of the file on have checksum "
                    f"{found:08x}, expected {expected:08x}"
                )

    def _open(self, request: ReadRequest) -> int:
        """Return the descriptor of a file whose header has the requested box where the manifest has it."""
        saved = request.saved
        if saved.file not in self._headers:
            try:
                descriptor = os.open(self._folder / saved.file, os.O_RDONLY | os.O_CLOEXEC)
                self._descriptors[saved.file] = descriptor
                self._headers[saved.file] = read_header(descriptor)
            except OSError as error:
                kind = DamageError if self._folder.exists() else RemovedError  # by a run with --keep-last
                raise kind(f"{self._where(request)}: cannot be read: {error.strerror}") from None
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError, struct.error) as error:
                raise DamageError(f"{self._folder / saved.file}: its header is damaged: {error}") from None
        found = self._headers[saved.file].get(box_name(request.name, saved.box))
        expected = request.dtype, list(saved.box.shape), saved.start
        if found != expected:
            both = f"the manifest says {expected}, but the header of the file says {found}"
            raise DamageError(f"{self._where(request)}: dtype, shape and first byte: {both}; one of them was changed")
        return self._descriptors[saved.file]

    def _where(self, request: ReadRequest) -> str:
        return f"{self._folder / request.saved.file}, tensor {box_name(request.name, request.saved.box)}"


def _target_memory(
    saved: Box, dtype: torch.dtype, common: Sequence[tuple[TensorBox, Box]], first: int, stop: int
) -> Tensor | None:
    """Return the memory of the only target if elements [first, stop) of the saved box are contiguous there too.

    Then the file can be read straight into it. Returns None if a copy through scratch memory is needed.
    """
    if len(common) != 1:
        return None
    target, box = common[0]
    same_rows = box.shape[1:] == saved.shape[1:] == target.box.shape[1:]
    if target.values.dtype != dtype or target.values.device.type != "cpu" or not same_rows:
        return None
    row = math.prod(box.shape[1:])
    low = (box.offset[0] - saved.offset[0]) * row  # elements of the saved box that the target shares: [low, high)
    high = low + box.shape[0] * row
    if first < low or stop > high:
        return None
    start = (saved.offset[0] - target.box.offset[0]) * row + first
    return target.values[start : start + stop - first]


def _runs(blocks: Sequence[int], max_length: int) -> Iterator[tuple[int, int]]:
    """Group ascending block numbers into consecutive ranges [first, stop) of at most `max_length` blocks."""
    first = 0
    for index, block in enumerate(blocks):
        if index + 1 == len(blocks) or blocks[index + 1] != block + 1 or index + 1 - first == max_length:
            yield blocks[first], block + 1
            first = index + 1
