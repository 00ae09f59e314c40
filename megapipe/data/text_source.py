"""Documents from text on disk: JSON lines, plain text files, directory trees, Python's own standard library.

`read_records` yields raw records for workers to parse; `corpus_documents` reads a whole small corpus into memory.
"""

from __future__ import annotations

import glob
import gzip
import hashlib
import itertools
import json
import os
import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

from megapipe.errors import ConfigError, DataError

JSON_SUFFIXES = (".jsonl", ".json", ".ndjson", ".jsonl.gz", ".json.gz", ".ndjson.gz")
DOCUMENT_UNITS = ("file", "line", "blank-line")
TEXT_KEY = "text"

CODE_SUFFIXES = "py pyi txt md rst tex html css js ts c h cc cpp hpp cu java go rs rb sh sql toml yaml yml csv"
TEXT_SUFFIXES = frozenset(f".{name}" for name in CODE_SUFFIXES.split())
TEST_FOLDERS = frozenset({"test", "tests"})
# of the standard library; encodings and pydoc_data are character tables and generated text, a fifth of it
SKIPPED_FOLDERS = TEST_FOLDERS | frozenset(
    "site-packages dist-packages __pycache__ node_modules idlelib encodings pydoc_data".split()
)
PIECE_CHARACTERS = 4000  # a long text file is cut into documents of about this length
MIN_DOCUMENTS = 20  # fewer cannot be split into train and valid


@dataclass(frozen=True)
class Record:
    """The source of one document. number: line in the file, from 1; 0 for a whole text file."""

    path: str
    number: int
    content: bytes
    is_json: bool

    @property
    def origin(self) -> str:
        return f"{self.path} line {self.number}" if self.number else self.path

    def texts(self, keys: Sequence[str]) -> list[str]:
        """Return the text under each key; plain text counts as key "text". Raises DataError naming file and line."""
        try:
            text = self.content.decode("utf-8")
        except UnicodeDecodeError as error:
            invalid = self.content[error.start : error.start + 4]
            raise DataError(f"{self.origin}: byte {error.start} is not UTF-8 ({invalid!r})") from None
        if not self.is_json:
            return [text]
        try:
            value = json.loads(text)
        except json.JSONDecodeError as error:
            reason = f"{error.msg.removesuffix(' at')} at column {error.colno}"
            raise DataError(f"{self.origin} is not JSON: {reason}: {text.strip()[:80]!r}") from None
        if not isinstance(value, dict):
            rule = f"each line must be an object with the keys {', '.join(keys)}"
            raise DataError(f"{self.origin} holds a JSON {type(value).__name__}; {rule}")
        for key in keys:
            if not isinstance(value.get(key), str):
                others = f"the keys {', '.join(map(repr, value)) or 'none'}"
                found = f"{type(value[key]).__name__} under {key!r}" if key in value else others
                raise DataError(f"{self.origin} has no text under the key {key!r} (it has {found}); see --json-keys")
        texts: list[str] = [value[key] for key in keys]
        if b"\\u" in self.content and any("\ud800" <= character <= "\udfff" for text in texts for character in text):
            raise DataError(f"{self.origin}: an unpaired surrogate escape (\\ud800 .. \\udfff) is not a character")
        return texts


def find_files(inputs: Sequence[str], suffixes: Sequence[str] = ()) -> list[Path]:
    """Return the files named, matched by a pattern, or found in directories (sorted; with one of `suffixes` if any).

    Raises ConfigError if an input does not exist or nothing is found.
    """
    files: list[Path] = []
    for name in inputs:
        path = Path(name)
        if path.is_dir():
            for found in sorted(path.rglob("*")):
                is_hidden = any(part.startswith(".") for part in found.relative_to(path).parts)
                if not is_hidden and found.is_file() and (not suffixes or found.name.endswith(tuple(suffixes))):
                    files.append(found)
        elif path.exists():
            files.append(path)
        elif matches := sorted(glob.glob(name, recursive=True)):
            files.extend(Path(match) for match in matches if Path(match).is_file())
        else:
            raise ConfigError(f"--input {name}: no such file, directory or pattern")
    if not files:
        wanted = f" whose name ends in {' '.join(suffixes)}" if suffixes else ""
        raise ConfigError(f"--input {' '.join(inputs)} holds no file{wanted}")
    return files


def is_json_lines(path: Path) -> bool:
    return path.name.endswith(JSON_SUFFIXES)


def read_records(files: Sequence[Path], document_unit: str = "file") -> Iterator[Record]:
    """Yield every document of the files, in order. document_unit: of plain text, a key of DOCUMENT_UNITS."""
    for path in files:
        try:
            is_json = is_json_lines(path)
            with cast(IO[bytes], gzip.open(path, "rb")) if path.suffix == ".gz" else open(path, "rb") as file:
                if is_json or document_unit == "line":
                    for number, line in enumerate(file, 1):
                        if line.strip():
                            yield Record(str(path), number, line if is_json else line.rstrip(b"\r\n"), is_json)
                elif document_unit == "blank-line":
                    lines: list[bytes] = []
                    first = 1
                    for number, line in enumerate(itertools.chain(file, [b""]), 1):
                        if line.strip():
                            first = first if lines else number
                            lines.append(line)
                        elif lines:
                            yield Record(str(path), first, b"".join(lines), False)
                            lines = []
                else:
                    yield Record(str(path), 0, file.read(), False)
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None


def corpus_documents(
    source: str | Path | None = None, max_megabytes: float | None = None, *, include_tests: bool = False
) -> list[str]:
    """Return up to `max_megabytes` of documents in a fixed order drawn from their names and places.

    source: a directory tree (one document per text file), a JSON-lines file (one per line, key "text"), a text file
    (cut at blank lines into pieces), or None for Python's standard library. The order makes a split by position give
    parts of one distribution, the same on every machine. Files that are not UTF-8 text are left out. Raises ConfigError
    if the source does not exist, DataError if it holds too little text.
    """
    root = Path(sysconfig.get_path("stdlib")) if source is None else Path(source)
    if not root.exists():
        raise ConfigError(f"--corpus {root}: no such file or directory")
    if not root.is_dir():
        named = _pieces(root)
    elif source is None:
        named = _tree(root, frozenset({".py"}), SKIPPED_FOLDERS - TEST_FOLDERS if include_tests else SKIPPED_FOLDERS)
    else:
        named = _tree(root, TEXT_SUFFIXES, frozenset())
    documents: list[str] = []
    budget = float("inf") if max_megabytes is None else max_megabytes * 1e6
    for _, text in sorted((hashlib.sha256(name.encode()).digest(), text) for name, text in named):
        size = len(text.encode("utf-8"))
        if size <= budget:  # a document that does not fit is skipped, so that a huge file does not end the corpus
            documents.append(text)
            budget -= size
    if len(documents) < MIN_DOCUMENTS:
        rule = f"at least {MIN_DOCUMENTS} are needed to split off a validation part"
        raise DataError(f"{root} gives {len(documents)} documents of text; {rule}")
    return documents


def _tree(root: Path, suffixes: frozenset[str], skipped: frozenset[str]) -> Iterator[tuple[str, str]]:
    """Yield (path within the tree, text) of each text file."""
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = sorted(name for name in subfolders if name not in skipped and not name.startswith("."))
        for name in sorted(files):
            path = Path(folder) / name
            if path.suffix.lower() in suffixes and (text := _text(path)):
                yield path.relative_to(root).as_posix(), text


def _pieces(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (number, text) of the documents of one file."""
    if is_json_lines(path):
        for record in read_records([path]):
            yield str(record.number), record.texts(["text"])[0]
        return
    text = _text(path)
    if text is None:
        raise DataError(f"{path} is not a text file in UTF-8")
    piece: list[str] = []
    size = number = 0
    for line in text.splitlines(keepends=True):
        piece.append(line)
        size += len(line)
        if (size >= PIECE_CHARACTERS and not line.strip()) or size >= 4 * PIECE_CHARACTERS:
            yield str(number), "".join(piece)
            piece, size, number = [], 0, number + 1
    if piece:
        yield str(number), "".join(piece)


def _text(path: Path) -> str | None:
    """Return the text of a file, or None if it is empty, unreadable, binary or not UTF-8."""
    try:
        content = path.read_bytes()
        return None if not content.strip() or b"\0" in content else content.decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return None


def write_jsonl(documents: list[str], path: str | Path) -> None:
    """Write one JSON object per line, {"text": document}, under a temporary name that is then renamed."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f"{target.name}.partial-{os.getpid()}")
    with open(partial, "w", encoding="utf-8") as file:
        for document in documents:
            file.write(json.dumps({"text": document}, ensure_ascii=False) + "\n")
    os.replace(partial, target)
