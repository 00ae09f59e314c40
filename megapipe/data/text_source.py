"""Text on disk as a stream of documents: JSON lines, plain text files, directory trees.

Records are handed out raw (a line of JSON, or a text), so that the work of parsing is the workers'.
"""

from __future__ import annotations

import glob
import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

from megapipe.errors import ConfigError, DataError

JSON_SUFFIXES = (".jsonl", ".json", ".ndjson", ".jsonl.gz", ".json.gz", ".ndjson.gz")
DOCUMENT_UNITS = ("file", "line", "blank-line")
TEXT_KEY = "text"


@dataclass(frozen=True)
class Record:
    """What one document is read from. number: line in the file, from 1; 0 for a whole text file."""

    path: str
    number: int
    content: bytes
    is_json: bool

    @property
    def origin(self) -> str:
        return f"{self.path} line {self.number}" if self.number else self.path

    def texts(self, keys: Sequence[str]) -> list[str]:
        """The text under each key; plain text is that of the key "text". Raises DataError naming file and line."""
        try:
            text = self.content.decode("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(
                f"{self.origin}: byte {error.start} is not UTF-8 ({self.content[error.start : error.start + 4]!r})"
            ) from None
        if not self.is_json:
            return [text]
        try:
            value = json.loads(text)
        except json.JSONDecodeError as error:
            raise DataError(
                f"{self.origin} is not JSON: {error.msg.removesuffix(' at')} at column {error.colno}: {text.strip()[:80]!r}"
            ) from None
        if not isinstance(value, dict):
            raise DataError(
                f"{self.origin} holds a JSON {type(value).__name__}; each line must be an object with the keys {', '.join(keys)}"
            )
        for key in keys:
            if not isinstance(value.get(key), str):
                found = (
                    f"{type(value[key]).__name__} under {key!r}"
                    if key in value
                    else f"the keys {', '.join(map(repr, value)) or 'none'}"
                )
                raise DataError(f"{self.origin} has no text under the key {key!r} (it has {found}); see --json-keys")
        texts: list[str] = [value[key] for key in keys]
        if b"\\u" in self.content and any("\ud800" <= character <= "\udfff" for text in texts for character in text):
            raise DataError(f"{self.origin}: an escape \\ud800 .. \\udfff without its other half is not a character")
        return texts


def find_files(inputs: Sequence[str], suffixes: Sequence[str] = ()) -> list[Path]:
    """Files named, matched by a pattern, or found in directories (in sorted order; with `suffixes`, only names that end so).

    Raises ConfigError if an input does not exist or nothing is found.
    """
    files: list[Path] = []
    for name in inputs:
        path = Path(name)
        if path.is_dir():
            hidden_free = (
                p
                for p in sorted(path.rglob("*"))
                if not any(part.startswith(".") for part in p.relative_to(path).parts)
            )
            files.extend(p for p in hidden_free if p.is_file() and (not suffixes or p.name.endswith(tuple(suffixes))))
        elif path.exists():
            files.append(path)
        elif matches := sorted(glob.glob(name, recursive=True)):
            files.extend(Path(match) for match in matches if Path(match).is_file())
        else:
            raise ConfigError(f"--input {name}: there is no such file, directory or pattern")
    if not files:
        wanted = f" whose name ends in {' '.join(suffixes)}" if suffixes else ""
        raise ConfigError(f"--input {' '.join(inputs)} holds no file{wanted}")
    return files


def is_json_lines(path: Path) -> bool:
    return path.name.endswith(JSON_SUFFIXES)


def read_records(files: Sequence[Path], document_unit: str = "file") -> Iterator[Record]:
    """Every document of the files, in order. document_unit: what a document is in plain text: a file, a line, or what blank lines part."""
    for path in files:
        try:
            with _open(path) as file:
                if is_json_lines(path):
                    yield from _lines(path, file, True)
                elif document_unit == "line":
                    yield from _lines(path, file, False)
                elif document_unit == "blank-line":
                    yield from _paragraphs(path, file)
                else:
                    yield Record(str(path), 0, file.read(), False)
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None


def _open(path: Path) -> IO[bytes]:
    return cast(IO[bytes], gzip.open(path, "rb")) if path.suffix == ".gz" else open(path, "rb")


def _lines(path: Path, file: IO[bytes], is_json: bool) -> Iterator[Record]:
    for number, line in enumerate(file, 1):
        if line.strip():
            yield Record(str(path), number, line if is_json else line.rstrip(b"\r\n"), is_json)


def _paragraphs(path: Path, file: IO[bytes]) -> Iterator[Record]:
    lines: list[bytes] = []
    first = 1
    for number, line in enumerate(file, 1):
        if line.strip():
            first = number if not lines else first
            lines.append(line)
        elif lines:
            yield Record(str(path), first, b"".join(lines), False)
            lines = []
    if lines:
        yield Record(str(path), first, b"".join(lines), False)
