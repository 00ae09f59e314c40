"""Token files in Megatron's indexed format: `PREFIX.bin` holds the tokens back to back, `PREFIX.idx` says where each sequence lies.

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
    then     S      i8 mode of each sequence, only in multimodal files; only the file's length tells
"""

from __future__ import annotations

import mmap
import os
import struct
from array import array
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import DTypeLike

from megapipe.data.dataset import Array
from megapipe.errors import ConfigError, DataError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPES: dict[int, np.dtype[Any]] = {
    code: np.dtype(name)
    for code, name in {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}.items()
}
CODES = {dtype: code for code, dtype in DTYPES.items()}
CHECK_BLOCK = 1 << 20  # sequences checked at a time, so that opening a huge file needs no second copy of its index


def bin_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.bin")


def idx_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.idx")


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The dtype that preprocessing writes: uint16 below 65,500 tokens of vocabulary, else int32."""
    return np.dtype("<u2") if vocab_size < 65500 else np.dtype("<i4")


class IndexedFile:
    """A pair of token files, read through mmap: opening costs a check of the index, reading costs the pages touched.

    lengths: [S] int32 tokens of each sequence. offsets: [S] int64 bytes into `.bin`. documents: [D] int64 sequence numbers.
    modes: [S] int8, or None where the file is not multimodal. All four are views of the mapped file.
    Raises DataError, naming the file and the offending number, if the pair is missing, truncated or inconsistent.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = str(prefix)
        index = _map(idx_path(prefix), self.prefix)
        self.dtype, num_sequences, num_starts = _read_header(index, idx_path(prefix))
        self.lengths, self.offsets, self.documents, self.modes = _read_tables(
            index, num_sequences, num_starts, idx_path(prefix)
        )
        self._bin = _map(bin_path(prefix), self.prefix)
        self._check_tables()

    def __len__(self) -> int:
        """Number of sequences."""
        return len(self.lengths)

    @property
    def num_documents(self) -> int:
        return len(self.documents) - 1

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum(dtype=np.int64))

    @property
    def bin_bytes(self) -> int:
        return len(self._bin)

    def read(self, sequence: int, start: int = 0, count: int | None = None) -> Array:
        """Tokens start .. start + count of a sequence, in the file's dtype: a view, not a copy."""
        length = int(self.lengths[sequence])
        count = length - start if count is None else count
        if start < 0 or count < 0 or start + count > length:
            raise DataError(
                f"{self.prefix}: tokens {start}..{start + count} asked of sequence {sequence}, which has {length}"
            )
        return np.frombuffer(self._bin, self.dtype, count, int(self.offsets[sequence]) + start * self.dtype.itemsize)

    def is_contiguous(self) -> bool:
        """Whether `.bin` is exactly the sequences back to back in order, as writers leave it."""
        return bool(np.array_equal(self.offsets, _offsets(self.lengths, self.dtype)))

    def raw(self) -> memoryview:
        """The bytes of all sequences of a contiguous file."""
        return memoryview(self._bin)[: self.num_tokens * self.dtype.itemsize]

    def _check_tables(self) -> None:
        """Every sequence lies inside `.bin`; documents rise from 0 to S."""
        idx, item, num_sequences = idx_path(self.prefix), self.dtype.itemsize, len(self)
        for begin in range(0, num_sequences, CHECK_BLOCK):
            lengths = self.lengths[begin : begin + CHECK_BLOCK].astype(np.int64)
            offsets = self.offsets[begin : begin + CHECK_BLOCK]
            if (lengths < 0).any():
                bad = int(np.argmax(lengths < 0))
                raise DataError(f"{idx}: sequence {begin + bad} has a length of {lengths[bad]} tokens")
            wrong = (offsets < 0) | (offsets + lengths * item > self.bin_bytes)
            if wrong.any():
                bad = int(np.argmax(wrong))
                raise DataError(
                    f"{bin_path(self.prefix)} has {self.bin_bytes} bytes, but {idx.name} places sequence {begin + bad} "
                    f"({lengths[bad]} tokens of {item} bytes) at byte {offsets[bad]}: the file is truncated or belongs to another index; "
                    f"copy or preprocess it again"
                )
        starts = self.documents
        if not len(starts) or starts[0] != 0 or starts[-1] != num_sequences:
            seen = f"{starts[0]} .. {starts[-1]}" if len(starts) else "nothing"
            raise DataError(
                f"{idx}: document starts must run from 0 to the number of sequences, {num_sequences}, but hold {seen}"
            )
        falls = np.flatnonzero(np.diff(starts) < 0)
        if len(falls):
            raise DataError(
                f"{idx}: document {falls[0] + 1} starts at sequence {starts[falls[0] + 1]}, before the one preceding it"
            )


def _map(path: Path, prefix: str) -> mmap.mmap | bytes:
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                return b""  # an empty file cannot be mapped
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise DataError(
            f"no token file {path} (a data path is the prefix {prefix!r} that .bin and .idx are added to)"
        ) from None
    except OSError as error:
        raise DataError(f"cannot read token file {path}: {error.strerror}") from None


def _read_header(index: mmap.mmap | bytes, path: Path) -> tuple[np.dtype[Any], int, int]:
    if len(index) < HEADER.size:
        raise DataError(
            f"{path} has {len(index)} bytes, less than the {HEADER.size} of the header: it is truncated or not a token index"
        )
    magic, version, code, num_sequences, num_starts = HEADER.unpack(index[: HEADER.size])
    if magic != MAGIC:
        raise DataError(
            f"{path} starts with {magic!r} instead of {MAGIC!r}: it is not a token index of Megatron's format"
        )
    if version != VERSION:
        raise DataError(f"{path} has format version {version}; only version {VERSION} is known")
    if code not in DTYPES:
        raise DataError(
            f"{path} has dtype code {code}; known codes are {', '.join(f'{c} ({d})' for c, d in DTYPES.items())}"
        )
    return DTYPES[code], num_sequences, num_starts


def _read_tables(
    index: mmap.mmap | bytes, num_sequences: int, num_starts: int, path: Path
) -> tuple[Array, Array, Array, Array | None]:
    plain = HEADER.size + 12 * num_sequences + 8 * num_starts
    if len(index) not in (plain, plain + num_sequences):
        state = "truncated" if len(index) < plain else "damaged"
        raise DataError(
            f"{path} has {len(index)} bytes, but {num_sequences} sequences and {num_starts} document starts need {plain} "
            f"({plain + num_sequences} with modes): it is {state}"
        )
    lengths = np.frombuffer(index, "<i4", num_sequences, HEADER.size)
    offsets = np.frombuffer(index, "<i8", num_sequences, HEADER.size + 4 * num_sequences)
    documents = np.frombuffer(index, "<i8", num_starts, HEADER.size + 12 * num_sequences)
    has_modes = num_sequences > 0 and len(index) == plain + num_sequences
    return lengths, offsets, documents, np.frombuffer(index, "i1", num_sequences, plain) if has_modes else None


def _offsets(lengths: Array, dtype: np.dtype[Any]) -> Array:
    """[S] int64: byte at which each sequence starts if all lie back to back."""
    ends = np.cumsum(lengths, dtype=np.int64) * dtype.itemsize
    return np.concatenate([np.zeros(min(1, len(ends)), np.int64), ends[:-1]])


class IndexedWriter:
    """Writes a pair of token files beside their final names and renames them when all is on disk.

    Used as a context manager: leaving it normally commits, leaving it by an exception (Ctrl-C too) removes what was
    written. Under the final names there is at any time the old pair, no index, or the new pair; never a half.
    """

    def __init__(self, prefix: str | Path, dtype: DTypeLike, *, multimodal: bool = False) -> None:
        self.prefix = str(prefix)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        if self.dtype not in CODES:
            raise ConfigError(f"token files cannot hold {self.dtype}; they hold {', '.join(str(d) for d in CODES)}")
        self.num_tokens = 0
        self._lengths = array("i")
        self._documents = array("q", [0])
        self._modes = array("b") if multimodal else None
        self._partial = [Path(f"{path}.partial-{os.getpid()}") for path in (bin_path(prefix), idx_path(prefix))]
        try:
            bin_path(prefix).parent.mkdir(parents=True, exist_ok=True)
            self._bin = open(self._partial[0], "wb", buffering=1 << 20)  # noqa: SIM115 (closed by commit or abort)
        except OSError as error:
            raise DataError(
                f"cannot write token files {prefix}.bin/.idx: {error.strerror} ({error.filename})"
            ) from None

    @property
    def num_documents(self) -> int:
        return len(self._documents) - 1

    def add_document(
        self, tokens: Array | list[int], lengths: list[int] | None = None, modes: list[int] | None = None
    ) -> None:
        """Append one document: its tokens, back to back, and the length of each of its sequences (default: one sequence).

        Raises DataError if a token does not fit the dtype or the lengths do not add up.
        """
        values = np.asarray(tokens)
        lengths = [len(values)] if lengths is None else lengths
        if sum(lengths) != len(values):
            raise DataError(
                f"{self.prefix}: document {self.num_documents} has {len(values)} tokens, but its sequences add up to {sum(lengths)}"
            )
        if (self._modes is not None) != (modes is not None) or (modes is not None and len(modes) != len(lengths)):
            raise DataError(
                f"{self.prefix}: a multimodal file needs one mode a sequence, a plain one none (document {self.num_documents})"
            )
        self._bin.write(self._checked(values).tobytes())
        self._lengths.extend(lengths)
        if self._modes is not None and modes is not None:
            self._modes.extend(modes)
        self._documents.append(len(self._lengths))
        self.num_tokens += len(values)

    def _checked(self, values: Array) -> Array:
        """The tokens in the file's dtype; a token that would wrap around is an error."""
        if values.dtype != self.dtype and self.dtype.kind in "iu" and len(values):
            limits, low, high = np.iinfo(self.dtype), values.min(), values.max()
            if low < limits.min or high > limits.max:
                raise DataError(
                    f"{self.prefix}: token {low if low < limits.min else high} does not fit into {self.dtype}"
                )
        return values.astype(self.dtype)

    def append(self, file: IndexedFile) -> None:
        """Append all documents of another file of the same dtype and kind."""
        if file.dtype != self.dtype:
            raise DataError(
                f"{file.prefix} holds {file.dtype}, but the files before it {self.dtype}: token files of one dtype only can be merged"
            )
        if (file.modes is not None) != (self._modes is not None):
            raise DataError(
                f"{file.prefix} is {'' if file.modes is not None else 'not '}multimodal, unlike the files before it"
            )
        if file.is_contiguous():
            self._bin.write(file.raw())
        else:
            for sequence in range(len(file)):
                self._bin.write(file.read(sequence).tobytes())
        shift = len(self._lengths)
        self._lengths.frombytes(file.lengths.astype(np.intc).tobytes())
        self._documents.frombytes((file.documents[1:] + shift).astype(np.int64).tobytes())
        if self._modes is not None and file.modes is not None:
            self._modes.frombytes(file.modes.tobytes())
        self.num_tokens += file.num_tokens

    def commit(self) -> None:
        """Flush, fsync, rename. An old index goes first, the new one comes last: no index ever stands beside a foreign `.bin`."""
        try:
            self._write_index()
            self._bin.flush()
            os.fsync(self._bin.fileno())
            self._bin.close()
            idx_path(self.prefix).unlink(missing_ok=True)
            os.replace(self._partial[0], bin_path(self.prefix))
            os.replace(self._partial[1], idx_path(self.prefix))
            _sync_folder(bin_path(self.prefix).parent)
        except OSError as error:
            self.abort()
            raise DataError(f"cannot write token files {self.prefix}.bin/.idx: {error.strerror}") from None

    def _write_index(self) -> None:
        lengths = np.frombuffer(self._lengths, np.intc).astype("<i4")
        with open(self._partial[1], "wb") as file:
            file.write(HEADER.pack(MAGIC, VERSION, CODES[self.dtype], len(lengths), len(self._documents)))
            file.write(lengths.tobytes())
            file.write(_offsets(lengths, self.dtype).astype("<i8").tobytes())
            file.write(np.frombuffer(self._documents, np.int64).astype("<i8").tobytes())
            if self._modes is not None:
                file.write(self._modes.tobytes())
            file.flush()
            os.fsync(file.fileno())

    def abort(self) -> None:
        """Remove what was written; nothing under the final names has changed."""
        self._bin.close()
        for path in self._partial:
            path.unlink(missing_ok=True)

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.commit()
        else:
            self.abort()


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
