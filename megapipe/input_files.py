"""Files that a user names: checked before they are opened, and JSON in them without ambiguity; tables of megapipe."""

from __future__ import annotations

import csv
import errno
import json
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

MOST_BYTES = 1 << 26  # of a file with settings
MOST_DOCUMENT_BYTES = 1 << 28  # of text; a compressed file of kilobytes can hold a line of gigabytes
NOT_REGULAR = "it is a pipe or a device, and not a regular file, which can be read again"


def regular(path: str | Path, most_bytes: int | None = None) -> Path:
    """Return the path of a regular file of at most `most_bytes`.

    Raises OSError for another one without opening it: a pipe would wait for its writer, and a device has no end.
    """
    found = os.stat(path)
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, NOT_REGULAR, str(path))
    if most_bytes is not None and found.st_size > most_bytes:
        raise OSError(errno.EFBIG, f"it has {found.st_size:,} bytes, more than {most_bytes:,}", str(path))
    return Path(path)


def bounded_lines(file: IO[bytes], most_bytes: int = MOST_DOCUMENT_BYTES) -> Iterator[tuple[bytes, int]]:
    """Yield each line with its size; of one that is longer, the first `most_bytes` + 1 bytes."""
    while line := file.readline(most_bytes + 1):
        size, part = len(line), line
        while size > most_bytes and part and not part.endswith(b"\n"):
            part = file.readline(1 << 20)
            size += len(part)
        yield line, size


def parse_json(text: str | bytes, parse_constant: Callable[[str], Any] | None = None) -> Any:
    """Parse JSON. Raises ValueError, also for a key that occurs twice in an object and for deep nesting.

    parse_constant: of NaN and Infinity, which Python's JSON has besides; None makes numbers of them.
    """
    try:
        return json.loads(text, object_pairs_hook=_object, parse_constant=parse_constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key[:80]!r} occurs twice in an object")
        found[key] = value
    return found


def read_table(path: Path) -> list[list[str]]:
    """Return the rows of a CSV file that comes with megapipe, without its head."""
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.reader(file))[1:]
