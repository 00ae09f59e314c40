"""Token files in Megatron's indexed format: `PREFIX.bin` holds all tokens, `PREFIX.idx` the place of each sequence.

Layout of `.idx`, little-endian:

    offset   bytes  content
    0        9      magic "MMIDIDX\\0\\0"
    9        8      u64 version = 1
    17       1      u8 dtype code
    18       8      u64 S, number of sequences
    26       8      u64 D, documents + 1
    34       4 S    i32 tokens of each sequence
    34+4S    8 S    i64 byte offset of each sequence in `.bin`
    34+12S   8 D    i64 sequence at which each document starts; first 0, last S
    then     S      i8 mode of each sequence, in multimodal files only; recognizable by the file's length only
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import zlib
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np

from megapipe.data.dataset import Array
from megapipe.errors import DataError
from megapipe.input_files import MOST_BYTES, regular

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES: dict[int, np.dtype[Any]] = {
    code: np.dtype(name)
    for code, name in {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}.items()
}
CODES = {dtype: code for code, dtype in DTYPES.items()}
Tokenizer = dict[str, Any]  # the fingerprint of one, see tokenizers/tokenizer.py
CHECK_BLOCK = 1 << 18  # sequences checked at a time, so that a check needs no second copy of a huge index
LENGTH, OFFSET = np.dtype("<i4"), np.dtype("<i8")


def bin_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.bin")


def idx_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.idx")


def tokenizer_path(prefix: str | Path) -> Path:
    """Return the file with the fingerprint of the tokenizer that made a pair of token files."""
    return Path(f"{prefix}.tokenizer.json")


def made_with(prefix: str | Path) -> Tokenizer | None:
    """Return the fingerprint of the tokenizer that made a pair of token files, None if that is not known."""
    path = tokenizer_path(prefix)
    try:
        found: Tokenizer = json.loads(regular(path, MOST_BYTES).read_text("utf-8"))
        if not isinstance(found["files"], dict):
            raise TypeError("its files are no object")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(f"{path}, which names the tokenizer of these data, cannot be read: {error!r}") from None
    return found


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the dtype that preprocessing writes: uint16 for a vocabulary below 65,500 tokens, else int32."""
    return np.dtype("<u2") if vocab_size < 65500 else np.dtype("<i4")


class IndexedFile:
    """A pair of token files. The index is mapped for work on all of it; a sequence is read from the files.

    Reading a page of a mapping whose file was cut kills the process (SIGBUS), and no Python handler can end that; a
    read from the file comes back short instead, and is a DataError. So `sequence_place` and `read`, which training
    uses, touch no mapping.

    check: also read the whole index and check it (`check`). Without it, opening reads the header and checks sizes.
    Raises DataError, naming the file and the offending number, if the pair is missing, truncated or inconsistent.
    """

    def __init__(self, prefix: str | Path, *, check: bool = True) -> None:
        self.prefix = str(prefix)
        path = idx_path(prefix)
        index = _map(path, self.prefix)
        if len(index) < HEADER.size:
            rule = f"less than the {HEADER.size} of a header"
            raise DataError(f"{path} has {len(index)} bytes, {rule}: truncated, or no index")
        magic, version, code, num_sequences, num_starts = HEADER.unpack(index[: HEADER.size])
        if magic != MAGIC:
            raise DataError(f"{path} starts with {magic!r} instead of {MAGIC!r}: not a Megatron token index")
        if version != VERSION:
            raise DataError(f"{path} has format version {version}; only version {VERSION} is supported")
        if code not in DTYPES:
            known = ", ".join(f"{code} ({dtype})" for code, dtype in DTYPES.items())
            raise DataError(f"{path} has dtype code {code}; known codes are {known}")
        self.dtype = DTYPES[code]
        plain = HEADER.size + 12 * num_sequences + 8 * num_starts
        if len(index) not in (plain, plain + num_sequences):
            state = "truncated" if len(index) < plain else "damaged"
            counts = f"{num_sequences} sequences and {num_starts} document starts"
            needed = f"{counts} need {plain} ({plain + num_sequences} with modes)"
            raise DataError(f"{path} has {len(index)} bytes, but {needed}: it is {state}")
        # views of the mapped file: [S] tokens and [S] byte offset of each sequence, [D] first sequence of each document
        self.lengths: Array = np.frombuffer(index, LENGTH, num_sequences, HEADER.size)
        self.offsets: Array = np.frombuffer(index, OFFSET, num_sequences, HEADER.size + 4 * num_sequences)
        self.documents: Array = np.frombuffer(index, "<i8", num_starts, HEADER.size + 12 * num_sequences)
        has_modes = num_sequences > 0 and len(index) == plain + num_sequences
        self.modes: Array | None = np.frombuffer(index, "i1", num_sequences, plain) if has_modes else None
        self._idx_file, self._bin_file = _open(path, self.prefix), _open(bin_path(prefix), self.prefix)
        self.num_bytes = os.fstat(self._bin_file.fileno()).st_size  # of .bin
        self._index = index
        self._is_checked = False
        if check:
            self.check()

    def __len__(self) -> int:
        """Return the number of sequences."""
        return len(self.lengths)

    @property
    def num_documents(self) -> int:
        return len(self.documents) - 1

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum(dtype=np.int64))

    def sequence_place(self, sequence: int) -> tuple[int, int]:
        """Return tokens and byte offset of a sequence. Raises DataError if they cannot be read."""
        at, count = HEADER.size, len(self)
        values = (
            np.frombuffer(read_bytes(self._idx_file, dtype.itemsize, first + dtype.itemsize * sequence), dtype)[0]
            for dtype, first in ((LENGTH, at), (OFFSET, at + LENGTH.itemsize * count))
        )
        length, offset = map(int, values)
        return length, offset

    def read(self, sequence: int, start: int = 0, count: int | None = None, most: int | None = None) -> Array:
        """Return tokens start .. start + count of a sequence, in the file's dtype; with `most`, no more than these.

        Raises DataError if the sequence has fewer or cannot be read.
        """
        length, offset = self.sequence_place(sequence)
        if count is None:
            count = length - start if most is None else min(length - start, most)
        if start < 0 or count < 0 or start + count > length:
            wanted = f"tokens {start}..{start + count} requested of sequence {sequence}"
            raise DataError(f"{self.prefix}: {wanted}, which has {length}")
        offset += start * self.dtype.itemsize
        if offset < 0 or offset + count * self.dtype.itemsize > self.num_bytes:
            found = (
                f"sequence {sequence} at byte {offset} is outside of {bin_path(self.prefix)} ({self.num_bytes} bytes)"
            )
            raise DataError(f"{found}: {idx_path(self.prefix).name} is damaged; copy or preprocess it again")
        return np.frombuffer(read_bytes(self._bin_file, count * self.dtype.itemsize, offset), self.dtype)

    def is_contiguous(self) -> bool:
        """Return True if `.bin` holds the sequences in order without gaps, as our writer leaves it."""
        return bool(np.array_equal(self.offsets, contiguous_offsets(self.lengths, self.dtype)))

    def has_tokens(self, first: int, last: int) -> bool:
        """Return True if any of the sequences first .. last - 1 has a token. Reads up to the first that has."""
        return any(self.lengths[i : min(last, i + 1024)].any() for i in range(first, last, 1024))

    def check(self) -> None:
        """Check, once, that the sequences share `.bin` among them, and that document starts rise from 0 to S.

        So a changed byte of the index is found, except in document starts and modes. Raises DataError.
        """
        if self._is_checked:
            return
        self._check_sequences()
        idx, starts = idx_path(self.prefix), self.documents
        rule = f"document starts must run from 0 to the number of sequences, {len(self)}"
        if not len(starts) or starts[0] != 0 or starts[-1] != len(self):
            found = f"{starts[0]} .. {starts[-1]}" if len(starts) else "nothing"
            raise DataError(f"{idx}: {rule}, but hold {found}")
        for begin in range(0, len(starts), CHECK_BLOCK):
            block = starts[begin : begin + CHECK_BLOCK + 1]  # one is shared with the next block
            falls = block[1:] < block[:-1]
            if falls.any():
                number = begin + int(np.argmax(falls)) + 1
                start = f"document {number} starts at sequence {starts[number]}"
                raise DataError(f"{idx}: {start}, before the preceding one")
            self.release()
        self._is_checked = True

    def release(self) -> None:
        """Unmap the pages of the index that were read; the next access maps them again."""
        if isinstance(self._index, mmap.mmap):
            self._index.madvise(mmap.MADV_DONTNEED)

    def _check_sequences(self) -> None:
        idx, item, bin_bytes = idx_path(self.prefix), self.dtype.itemsize, self.num_bytes
        end, is_in_order = 0, True  # of the sequences so far
        for begin in range(0, len(self), CHECK_BLOCK):
            lengths = self.lengths[begin : begin + CHECK_BLOCK]
            offsets = self.offsets[begin : begin + CHECK_BLOCK]
            if lengths.min() < 0:
                bad = int(np.argmax(lengths < 0))
                raise DataError(f"{idx}: sequence {begin + bad} has a length of {lengths[bad]} tokens")
            ends = end + np.cumsum(lengths, dtype=np.int64) * item
            follows = offsets[0] == end and bool(np.array_equal(offsets[1:], ends[:-1]))
            if not follows or ends[-1] > bin_bytes:
                last = bin_bytes - lengths.astype(np.int64) * item  # an offset plus a length could overflow
                wrong = (offsets < 0) | (offsets > last)
                if wrong.any():
                    bad = int(np.argmax(wrong))
                    sequence = f"sequence {begin + bad} ({lengths[bad]} tokens of {item} bytes) at byte {offsets[bad]}"
                    reason = "the file is truncated or belongs to another index; copy or preprocess it again"
                    size = f"{bin_path(self.prefix)} has {bin_bytes} bytes"
                    raise DataError(f"{size}, but {idx.name} places {sequence}: {reason}")
            is_in_order &= follows
            end = int(ends[-1])
            self.release()
        if end == bin_bytes and not is_in_order:  # sequences may follow one another without gaps in another order
            filled = np.flatnonzero(self.lengths)
            order = filled[np.argsort(self.offsets[filled])]
            contiguous = contiguous_offsets(self.lengths[order], self.dtype)
            is_in_order = bool(np.array_equal(self.offsets[order], contiguous))
        if end != bin_bytes or not is_in_order:
            found = f"its {end // item} tokens of {item} bytes ({self.dtype}) do not fill {bin_path(self.prefix).name}"
            why = f"which has {bin_bytes} bytes, one after another: it is damaged or belongs to another file"
            raise DataError(f"{idx}: {found}, {why}; copy or preprocess both again")


def _open(path: Path, prefix: str) -> FileIO:
    try:
        return open(regular(path), "rb", buffering=0)
    except FileNotFoundError:
        rule = f"a data path is a prefix, here {prefix!r}, without .bin or .idx"
        if Path(prefix).is_file() and Path(prefix).suffix not in (".bin", ".idx"):
            rule = f"{prefix} is another file; megapipe preprocess makes token files of text"
        raise DataError(f"there is no token file {path}; {rule}") from None
    except OSError as error:
        raise DataError(f"cannot read token file {path}: {error.strerror}") from None


def _map(path: Path, prefix: str) -> mmap.mmap | bytes:
    with _open(path, prefix) as file:
        try:
            if os.fstat(file.fileno()).st_size == 0:
                return b""  # an empty file cannot be mapped
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise DataError(f"cannot read token file {path}: {error.strerror}") from None


def read_bytes(file: FileIO, num_bytes: int, offset: int) -> bytes:
    """Return bytes of a file, by reads that threads may share. Raises DataError, with its name, for fewer."""
    found = []
    try:
        while num_bytes and (block := os.pread(file.fileno(), num_bytes, offset)):  # at most 2 GiB at once
            found.append(block)
            num_bytes, offset = num_bytes - len(block), offset + len(block)
    except OSError as error:
        raise DataError(f"cannot read token file {file.name}: {error.strerror}") from None
    if num_bytes:
        size = f"it ends at byte {offset:,}, {num_bytes:,} bytes before the end of what is read"
        raise DataError(f"token file {file.name} was cut since it was opened: {size}; restore it and start again")
    return found[0] if len(found) == 1 else b"".join(found)


def sampled_checksum(path: Path, count: int, block_bytes: int) -> int:
    """Return the CRC-32 of `count` blocks, evenly spaced with the first and the last, or of a whole smaller file.

    Raises DataError if it cannot be read.
    """
    try:
        with open(regular(path), "rb") as file:
            size, found = os.fstat(file.fileno()).st_size, 0
            steps = min(count, -(-size // block_bytes))
            for step in range(steps):
                start = step * block_bytes if steps < count else step * (size - block_bytes) // max(1, count - 1)
                file.seek(start)
                found = zlib.crc32(file.read(block_bytes), found)
            return found
    except OSError as error:
        raise DataError(f"cannot read token file {path}: {error.strerror}") from None


def contiguous_offsets(lengths: Array, dtype: np.dtype[Any]) -> Array:
    """Return the first byte of each sequence, [S] int64, if there are no gaps."""
    ends = np.cumsum(lengths, dtype=np.int64) * dtype.itemsize
    return np.concatenate([np.zeros(min(1, len(ends)), np.int64), ends[:-1]])


def replace_json(path: Path, partial: Path, content: Any, indent: int | None = None) -> None:
    """Write and sync a JSON file under the name `partial`, then rename it."""
    with open(partial, "w", encoding="utf-8") as file:
        json.dump(content, file, indent=indent)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
