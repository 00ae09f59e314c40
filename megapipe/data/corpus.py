"""A corpus out of real text that is already on the machine: by default the source of Python's own standard library.

Documents come in an order drawn from their names and places, so that a split by position gives train and valid parts of one
distribution, on every machine that has the same files.
"""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from megapipe.data.text_source import is_json_lines, read_records
from megapipe.errors import ConfigError, DataError

SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "__pycache__", "node_modules", "test", "tests", "idlelib"}
) | frozenset(
    {
        "encodings",
        "pydoc_data",
    }  # tables of characters and generated text, a fifth of the whole, which teach nothing about code
)
SUFFIX_NAMES = "py pyi txt md rst tex html css js ts c h cc cpp hpp cu java go rs rb sh sql toml yaml yml csv"
TEXT_SUFFIXES = frozenset(f".{name}" for name in SUFFIX_NAMES.split())
PIECE_CHARACTERS = 4000  # a single long text is cut into documents of about this length
MIN_DOCUMENTS = 20  # fewer cannot be split into train and valid


def corpus_documents(
    source: str | Path | None = None, max_megabytes: float | None = None, *, include_tests: bool = False
) -> list[str]:
    """Documents of a directory tree (one a text file), a JSON-lines file (one a line, key "text"), a text file (cut at blank lines into
    pieces), or of Python's standard library (None), up to `max_megabytes` of them.

    Files that are not UTF-8 text are left out. Raises ConfigError if the source does not exist, DataError if it holds too little text.
    """
    root = Path(sysconfig.get_path("stdlib")) if source is None else Path(source)
    if not root.exists():
        raise ConfigError(f"--corpus {root}: there is no such file or directory")
    suffixes = frozenset({".py"}) if source is None else TEXT_SUFFIXES
    skipped = (SKIPPED_FOLDERS - {"test", "tests"}) if include_tests else SKIPPED_FOLDERS
    named = _tree(root, suffixes, skipped if source is None else frozenset()) if root.is_dir() else _single(root)
    documents: list[str] = []
    budget = float("inf") if max_megabytes is None else max_megabytes * 1e6
    for _, text in sorted((hashlib.sha256(name.encode()).digest(), text) for name, text in named):
        size = len(text.encode("utf-8"))
        if size <= budget:  # one that does not fit is passed over, so that a huge file does not end the corpus
            documents.append(text)
            budget -= size
    if len(documents) < MIN_DOCUMENTS:
        raise DataError(
            f"{root} gives {len(documents)} documents of text; at least {MIN_DOCUMENTS} are needed to split off a validation part"
        )
    return documents


def _tree(root: Path, suffixes: frozenset[str], skipped: frozenset[str]) -> Iterator[tuple[str, str]]:
    """(path within the tree, text) of each text file."""
    for folder, subfolders, files in os.walk(root):
        subfolders[:] = sorted(name for name in subfolders if name not in skipped and not name.startswith("."))
        for name in sorted(files):
            path = Path(folder) / name
            if path.suffix.lower() in suffixes and (text := _text(path)):
                yield path.relative_to(root).as_posix(), text


def _single(path: Path) -> Iterator[tuple[str, str]]:
    """(number of the document, text) of one file."""
    if is_json_lines(path):
        for record in read_records([path]):
            yield record.origin.rpartition(" ")[2], record.texts(["text"])[0]
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
    """The text of a file, or None if it is empty, unreadable, binary or not UTF-8."""
    try:
        content = path.read_bytes()
        return None if not content.strip() or b"\0" in content else content.decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return None


def write_jsonl(documents: list[str], path: str | Path) -> None:
    """One JSON object a line, {"text": document}; written beside and renamed."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f"{target.name}.partial-{os.getpid()}")
    with open(partial, "w", encoding="utf-8") as file:
        for document in documents:
            file.write(json.dumps({"text": document}, ensure_ascii=False) + "\n")
    os.replace(partial, target)
