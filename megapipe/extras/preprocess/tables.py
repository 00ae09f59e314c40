"""Documents from columns of parquet and Arrow files, and text from zstd streams: what the extra `data` reads."""

from __future__ import annotations

import importlib
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megapipe.errors import ConfigError, DataError
from megapipe.input_files import regular

ROWS_PER_BATCH = 1024
BLOCK_BYTES = 1 << 11  # of zstd, which can unpack to 64 MiB
ARROW_FILE_MAGIC = b"ARROW1"  # a stream, as `datasets` saves it, has none

Cells = tuple[bytes | None, ...]


class DamagedFile(Exception):
    """The rest of a file cannot be read. The message is the reason."""


def library(name: str, path: str | Path) -> Any:
    """Import a package of the extra `data`. Raises ConfigError if it is missing, saying what to install."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        package = name.partition(".")[0]
        if error.name != package:
            raise
        raise ConfigError(f"reading {path} needs the package {package!r}: run pip install 'megapipe[data]'") from None


def read_rows(path: Path, is_parquet: bool, keys: Sequence[str], first: int = 0) -> Iterator[tuple[int, Cells]]:
    """Yield (number of the row from 0, UTF-8 text under each key) of the rows from `first` on; None for a null.

    Raises DataError if a column is missing or holds no text, DamagedFile where the file cannot be read further.
    """
    arrow = library("pyarrow", path)
    with open(regular(path), "rb"):
        pass  # here an OSError is that of the file system
    try:
        for begin, batch in _parquet_batches(path, keys, first) if is_parquet else _arrow_batches(path, first):
            _check_columns(path, batch.schema.names, keys)
            columns = []  # in UTF-8, which is checked when a row is decoded, so that one bad row does not hide others
            for key in keys:
                column = batch.column(key)
                if arrow.types.is_dictionary(column.type):
                    column = column.dictionary_decode()
                if not (arrow.types.is_string(column.type) or arrow.types.is_large_string(column.type)):
                    raise DataError(f"{path}: the column {key!r} holds {column.type}, not strings; see --json-keys")
                columns.append(column.cast(arrow.large_binary()).to_pylist())
            for number, cells in enumerate(zip(*columns, strict=True), begin):
                if number >= first:
                    yield number, cells
    except (arrow.ArrowException, OSError) as error:
        raise DamagedFile(str(error).splitlines()[0]) from None


def _parquet_batches(path: Path, keys: Sequence[str], first: int) -> Iterator[tuple[int, Any]]:
    """Yield (first row, record batch), without the row groups before the row `first`."""
    with library("pyarrow.parquet", path).ParquetFile(path, memory_map=True) as file:
        _check_columns(path, file.schema_arrow.names, keys)
        row = 0
        for group in range(file.num_row_groups):
            num_rows = file.metadata.row_group(group).num_rows
            if row + num_rows > first:
                begin = row
                for batch in file.iter_batches(ROWS_PER_BATCH, row_groups=[group], columns=list(keys)):
                    yield begin, batch
                    begin += batch.num_rows
            row += num_rows


def _arrow_batches(path: Path, first: int) -> Iterator[tuple[int, Any]]:
    """Yield (first row, record batch) of an Arrow file or stream, without the batches before the row `first`."""
    arrow = library("pyarrow", path)
    with arrow.memory_map(str(path)) as source:
        is_file = source.read(len(ARROW_FILE_MAGIC)) == ARROW_FILE_MAGIC
        source.seek(0)
        reader = arrow.ipc.open_file(source) if is_file else arrow.ipc.open_stream(source)
        row = 0
        for batch in map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader:
            if row + batch.num_rows > first:
                yield row, batch
            row += batch.num_rows


def _check_columns(path: Path, names: Sequence[str], keys: Sequence[str]) -> None:
    for key in keys:
        if key not in names:
            raise DataError(f"{path} has no column {key!r} (it has {', '.join(map(repr, names))}); see --json-keys")


class ZstdFile(io.RawIOBase):
    """The text of all frames of a zstd file. Unlike the library's reader, raises EOFError if the last one is cut."""

    def __init__(self, file: io.BufferedReader, path: Path) -> None:
        self._file = file
        self._decompressor = library("zstandard", path).ZstdDecompressor(max_window_size=1 << 31)
        self._frame: Any = None
        self._unread = b""
        self._text = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._text:
            block = self._unread or self._file.read(BLOCK_BYTES)
            if not block and self._frame is not None:
                raise EOFError("the last zstd frame is incomplete")
            if not block:
                return 0
            if self._frame is None:
                self._frame = self._decompressor.decompressobj()
            try:
                self._text = memoryview(self._frame.decompress(block))
            except Exception as error:  # zstandard.ZstdError
                raise EOFError(str(error)) from None
            self._unread = self._frame.unused_data if self._frame.eof else b""
            if self._frame.eof:
                self._frame = None
        count = min(len(buffer), len(self._text))
        buffer[:count] = self._text[:count]
        self._text = self._text[count:]
        return count

    def close(self) -> None:
        self._file.close()
        super().close()
