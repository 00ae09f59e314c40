"""Documents from files and pipes: JSON lines, plain text, parquet, Arrow, `datasets` folders, the standard library.

`read_records` yields raw records for workers to parse; `corpus_documents` reads a whole small corpus into memory.
"""

from __future__ import annotations

import glob
import gzip
import hashlib
import io
import itertools
import json
import os
import stat
import sysconfig
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, NamedTuple, cast

from megapipe.errors import ConfigError, DataError
from megapipe.extras.preprocess.tables import Cells, DamagedFile, ZstdFile, read_rows
from megapipe.input_files import MOST_DOCUMENT_BYTES, bounded_lines
from megapipe.monitor.roster import replace_file

JSON_SUFFIXES = (".jsonl", ".json", ".ndjson")
COMPRESSED_SUFFIXES = (".gz", ".zst", ".zstd")
TABLE_SUFFIXES = {".parquet": "parquet", ".arrow": "arrow", ".feather": "arrow", ".ipc": "arrow"}
UNREADABLE_SUFFIXES = (".xz", ".bz2", ".lz4", ".zip", ".7z", ".tar", ".tgz", ".tar.gz", ".tar.zst")
GZIP_MAGIC, ZSTD_MAGIC = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
FORMATS = ("jsonl", "text", "parquet", "arrow")
DOCUMENT_UNITS = ("file", "line", "blank-line")
TEXT_KEY = "text"
STDIN, STDIN_PATH = "-", Path("/dev/stdin")
GUESS_BYTES = 1 << 20  # read of a text file to find its document unit
LINES_PER_PARAGRAPH = 50  # on average, in a text whose blank lines are taken for separators

CODE_SUFFIXES = "py pyi txt md rst tex html css js ts c h cc cpp hpp cu java go rs rb sh sql toml yaml yml csv"
TEXT_SUFFIXES = frozenset(f".{name}" for name in CODE_SUFFIXES.split())
# of the standard library; encodings and pydoc_data are character tables and generated text, a fifth of it
SKIPPED_FOLDERS = frozenset(
    "test tests site-packages dist-packages __pycache__ node_modules idlelib encodings pydoc_data".split()
)
PIECE_CHARACTERS = 4000  # a long text file is cut into documents of about this length
MIN_DOCUMENTS = 20  # fewer cannot be split into train and valid


class Position(NamedTuple):
    """A place between two documents of the input."""

    file: int = 0  # index in the list of files
    byte: int = 0  # of the decompressed text; 0 in tables
    number: int = 0  # lines or rows of the file before it


class Problem(NamedTuple):
    """A record that cannot be read, or the rest of a file."""

    path: str
    unit: str  # "line", "row", or "" in a whole text file
    number: int  # from 1
    byte: int | None  # in the decompressed text; None in tables
    reason: str

    @property
    def text(self) -> str:
        place = f" {self.unit} {self.number}" if self.unit else ""
        return f"{self.path}{place}{'' if self.byte is None else f', byte {self.byte}'}: {self.reason}"


class Record(NamedTuple):
    """The source of one document. number: line or row in the file, from 1; 0 for a whole text file."""

    path: str
    number: int
    content: bytes
    is_json: bool
    byte: int = 0  # of its first byte, in the decompressed text
    end: Position = Position()  # behind it
    cells: Cells | None = None  # of a table, in the order of the keys
    damage: str | None = None  # why this document, or the rest of the file, cannot be read

    @property
    def num_bytes(self) -> int:
        return len(self.content) if self.cells is None else sum(len(cell or b"") for cell in self.cells)

    def problem(self, reason: str, byte: int = 0) -> Problem:
        """Return a problem of this record, at a byte of its content."""
        if self.cells is not None:
            return Problem(self.path, "row", self.number, None, reason)
        return Problem(self.path, "line" if self.number else "", self.number, self.byte + byte, reason)

    def texts(self, keys: Sequence[str]) -> list[str]:
        """Return the text under each key; plain text counts as key "text". Raises DataError naming file and line."""
        found = self.parse(keys)
        if isinstance(found, Problem):
            raise DataError(found.text)
        return found

    def parse(self, keys: Sequence[str]) -> list[str] | Problem:
        """Return the text under each key; plain text counts as key "text"."""
        if self.damage is not None:
            return self.problem(self.damage)
        if self.cells is not None:
            texts = []
            for key, cell in zip(keys, self.cells, strict=True):
                if cell is None:
                    return self.problem(f"null in the column {key!r}")
                try:
                    texts.append(cell.decode("utf-8"))
                except UnicodeDecodeError as error:
                    return self.problem(f"the column {key!r} is not UTF-8 at byte {error.start}")
            return texts
        content = self.content
        if not self.byte and content.startswith(BYTE_ORDER_MARK):
            content = content[len(BYTE_ORDER_MARK) :]
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError as error:
            invalid = content[error.start : error.start + 4]
            return self.problem(f"not UTF-8 ({invalid!r})", error.start + len(self.content) - len(content))
        return self._parse_json(text.rstrip("\r\n"), keys) if self.is_json else [text]

    def _parse_json(self, text: str, keys: Sequence[str]) -> list[str] | Problem:
        try:
            value = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            at = error.pos if isinstance(error, json.JSONDecodeError) else 0
            reason = error.msg.removesuffix(" at") if isinstance(error, json.JSONDecodeError) else "nested too deeply"
            hint = "; a JSON array is not JSON lines: convert it with jq -c '.[]'" if text.lstrip()[:1] == "[" else ""
            found = f"not JSON ({reason} at column {at + 1}): {text.strip()[:80]!r}{hint}"
            return self.problem(found, len(text[:at].encode("utf-8")))
        except ValueError as error:  # a number of thousands of digits
            return self.problem(f"not JSON that can be read: {error}")
        if not isinstance(value, dict):
            rule = f"each line must be an object with the keys {', '.join(keys)}"
            return self.problem(f"holds a JSON {type(value).__name__}; {rule}")
        for key in keys:
            if not isinstance(value.get(key), str):
                others = f"the keys {', '.join(map(repr, value)) or 'none'}"
                found = f"{type(value[key]).__name__} under {key!r}" if key in value else others
                return self.problem(f"no text under the key {key!r} (it has {found}); see --json-keys")
        texts: list[str] = [value[key] for key in keys]
        if "\\u" in text and any("\ud800" <= character <= "\udfff" for text in texts for character in text):
            return self.problem("an unpaired surrogate escape (\\ud800 .. \\udfff) is not a character")
        return texts


def find_files(inputs: Sequence[str], suffixes: Sequence[str] = ()) -> list[Path]:
    """Return the files named, matched by a pattern, or found in directories (sorted; with one of `suffixes` if any).

    `-` is standard input; a folder saved by `datasets` gives its data files. Raises ConfigError if an input does not
    exist, nothing is found, a file occurs twice or is compressed in a way that is not supported.
    """
    files = [file for name in inputs for file in _files_of(name, tuple(suffixes))]
    if not files:
        wanted = f" whose name ends in {' '.join(suffixes)}" if suffixes else ""
        raise ConfigError(f"--input {' '.join(inputs)} holds no file{wanted}")
    seen: dict[tuple[int, int], Path] = {}
    for file in files:
        if file.name.endswith(UNREADABLE_SUFFIXES):
            raise ConfigError(f"--input {file}: this compression is not supported; unpack it, or use .gz or .zst")
        found = os.stat(file)
        if stat.S_ISCHR(found.st_mode) and file != STDIN_PATH:
            raise ConfigError(f"--input {file} is a device, not a file, a directory or a pipe")
        first = seen.setdefault((found.st_dev, found.st_ino), file)
        if first is not file:
            raise ConfigError(f"--input gives the same file twice: {first} and {file}")
    return files


def _files_of(name: str, suffixes: tuple[str, ...]) -> list[Path]:
    path = Path(name)
    if name == STDIN:
        return [STDIN_PATH]
    if (path / "dataset_dict.json").is_file():
        splits = sorted(f"{each.parent}" for each in path.glob("*/state.json"))
        raise ConfigError(f"--input {name} is a folder of `datasets` with several splits; name one: {' '.join(splits)}")
    state_path = path / "state.json"
    if state_path.is_file() and any(path.glob("*.arrow")):  # written by Dataset.save_to_disk
        try:
            state = json.loads(state_path.read_text("utf-8"))
            names = [each["filename"] for each in state["_data_files"]]
        except (OSError, ValueError, KeyError, TypeError) as error:
            rule = f"{state_path} is not the state of a `datasets` folder ({error!r})"
            raise ConfigError(f"--input {path}: {rule}") from None
        if state.get("_indices_data_files"):
            raise ConfigError(f"--input {path}: its rows are selected by an index; save it after flatten_indices()")
        missing = [each for each in names if Path(each).name != each or not (path / each).is_file()]
        if missing or not names:
            raise ConfigError(f"--input {path}: its data files are missing: {', '.join(missing) or 'none is named'}")
        return [path / each for each in names]
    if path.is_dir():
        found = [
            each
            for each in sorted(path.rglob("*"))
            if not any(part.startswith(".") for part in each.relative_to(path).parts) and each.is_file()
        ]
        return [each for each in found if not suffixes or each.name.endswith(suffixes)]
    if path.exists():
        return [path]
    matches = [Path(match) for match in sorted(glob.glob(name, recursive=True))]
    if not any(match.is_file() for match in matches):
        raise ConfigError(f"--input {name}: no such file, directory or pattern")
    return [match for match in matches if match.is_file()]


def is_regular(path: Path) -> bool:
    """Return True for a file that can be read again from any place, unlike a pipe."""
    return stat.S_ISREG(os.stat(path).st_mode) and path != STDIN_PATH


def is_prose(path: Path) -> bool:
    """Return True if a file's name is that of a text that may hold many documents: .txt, or without a suffix."""
    return Path(_unpacked(path.name)).suffix in (".txt", "")


def _unpacked(name: str) -> str:
    for suffix in COMPRESSED_SUFFIXES:
        name = name.removesuffix(suffix)
    return name


def format_of(path: Path, input_format: str | None = None) -> str:
    """Return the format (one of FORMATS) of a file by its name; JSON lines for a pipe whose name says nothing."""
    if input_format is not None:
        return input_format
    name = _unpacked(path.name)
    if name.endswith(JSON_SUFFIXES):
        return "jsonl"
    return TABLE_SUFFIXES.get(Path(name).suffix, "text" if is_regular(path) else "jsonl")


def infer_document_unit(path: Path) -> tuple[str, str]:
    """Return (document unit of a text file, the reason), from its first megabyte."""
    with open_text(path) as file:
        lines = file.read(GUESS_BYTES).splitlines()
    num_lines = sum(bool(line.strip()) for line in lines)
    breaks = sum(not before.strip() and bool(line.strip()) for before, line in itertools.pairwise(lines))
    if breaks and breaks * LINES_PER_PARAGRAPH >= num_lines:
        return "blank-line", "it has blank lines"
    return ("line", "it has lines, and few or no blank ones") if num_lines > 1 else ("file", "it has one line")


def open_text(path: Path, start: int = 0) -> IO[bytes]:
    """Open a file at a byte of its text, which its first bytes show to be plain, gzip or zstd."""
    raw = open(path, "rb")  # noqa: SIM115 (the caller closes)
    magic = raw.peek(len(ZSTD_MAGIC))
    file = cast(IO[bytes], raw)
    if magic.startswith(GZIP_MAGIC):
        file = cast(IO[bytes], gzip.GzipFile(fileobj=raw))
    elif magic.startswith(ZSTD_MAGIC):
        file = cast(IO[bytes], io.BufferedReader(ZstdFile(raw, path), 1 << 20))
    elif not magic and path.name.endswith(COMPRESSED_SUFFIXES):
        raise EOFError("the file is empty, as no compressed file is")
    elif start:
        raw.seek(start)
        return file
    while start:
        skipped = len(file.read(min(start, 1 << 20)))
        if not skipped:
            raise EOFError(f"the text ends {start} bytes before the place where reading continues")
        start -= skipped
    return file


def read_records(
    files: Sequence[Path],
    document_unit: str = "file",
    *,
    keys: Sequence[str] = (TEXT_KEY,),
    input_format: str | None = None,
    start: Position | None = None,
    most_bytes: int = MOST_DOCUMENT_BYTES,
) -> Iterator[Record]:
    """Yield every document of the files, in order, from `start` on.

    document_unit: of plain text, one of DOCUMENT_UNITS. keys: the columns of tables. Of a file that is truncated or
    damaged, the last record says so, and of a document of more than `most_bytes` its record, which does not hold it.
    Raises DataError for a file that cannot be opened or lacks a column.
    """
    start = start or Position()
    for index in range(start.file, len(files)):
        path, begin = files[index], start if index == start.file else Position(index)
        kind = format_of(path, input_format)
        last = begin
        try:
            if kind in ("parquet", "arrow"):
                records = _rows(path, kind, keys, begin)
            elif kind == "text" and document_unit == "file":
                with open_text(path) as file:
                    whole = file.read(most_bytes + 1)
                records = iter([Record(str(path), 0, whole, False, 0, Position(index + 1))])
            else:
                records = _lines(path, kind == "jsonl", document_unit, begin, most_bytes)
            for record in records:
                last = record.end
                if record.num_bytes > most_bytes:
                    rule = f"the document has more than {most_bytes:,} bytes (--max-document-bytes)"
                    cells = None if record.cells is None else ()
                    record = record._replace(content=b"", cells=cells, damage=rule)
                yield record
        except (EOFError, zlib.error, gzip.BadGzipFile, DamagedFile) as error:
            cells = () if kind in ("parquet", "arrow") else None
            end = Position(index + 1)
            damage = f"the rest of the file cannot be read: {error}"
            yield Record(str(path), last.number + 1, b"", False, last.byte, end, cells, damage)
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror or error}") from None


def _rows(path: Path, kind: str, keys: Sequence[str], begin: Position) -> Iterator[Record]:
    for row, cells in read_rows(path, kind == "parquet", keys, begin.number):
        yield Record(str(path), row + 1, b"", False, 0, Position(begin.file, 0, row + 1), cells)


def _lines(path: Path, is_json: bool, document_unit: str, begin: Position, most_bytes: int) -> Iterator[Record]:
    """Yield the documents of a file by line or, of plain text, by blank lines."""
    name, byte, number = str(path), begin.byte, begin.number
    paragraph: list[bytes] = []
    first = Position()  # of the paragraph
    with open_text(path, begin.byte) as file:
        for line, size in itertools.chain(bounded_lines(file, most_bytes), [(b"", 0)]):
            place = Position(begin.file, byte, number)
            byte, number = byte + size, number + 1
            if not is_json and document_unit == "blank-line":
                if line.strip() or size > len(line):
                    first = first if paragraph else place
                    if byte - first.byte - size <= most_bytes:  # else it is too long already
                        paragraph.append(line)
                elif paragraph:
                    yield Record(name, first.number + 1, b"".join(paragraph), False, first.byte, place)
                    paragraph = []
            elif line.strip() or size > len(line):
                content = line if is_json or size > len(line) else line.rstrip(b"\r\n")
                yield Record(name, number, content, is_json, place.byte, Position(begin.file, byte, number))


def corpus_documents(source: str | Path | None = None, max_megabytes: float | None = None) -> list[str]:
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
        named = _tree(root, frozenset({".py"}), SKIPPED_FOLDERS)
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
    if format_of(path) != "text":
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


def write_jsonl(documents: list[str], path: Path) -> None:
    """Write one JSON object per line, {"text": document}, all or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps({"text": document}, ensure_ascii=False) + "\n" for document in documents)
    replace_file(path, "".join(lines).encode())
