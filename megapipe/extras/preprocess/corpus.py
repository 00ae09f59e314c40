"""`Corpus`: the files that a user names, and how documents are read from them."""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from megapipe.errors import ConfigError
from megapipe.extras.preprocess.text_source import (
    DOCUMENT_UNITS,
    STDIN_PATH,
    TEXT_KEY,
    Position,
    Problem,
    Record,
    find_files,
    format_of,
    infer_document_unit,
    is_prose,
    is_regular,
    read_records,
)


class Corpus(NamedTuple):
    """Files of documents. document_unit: of those of plain text. keys: of the others. input_format: None: by names."""

    files: list[Path]
    document_unit: str
    keys: Sequence[str]
    input_format: str | None

    @property
    def pipe(self) -> str | None:
        """The first input that can be read only once, None if there is none."""
        found = next((path for path in self.files if not is_regular(path)), None)
        return None if found is None else "standard input" if found == STDIN_PATH else str(found)

    def states(self) -> list[str]:
        """Return path, size and time of each file: as long as these are the same, its content is taken to be."""
        found = []
        for path in self.files:
            state = os.stat(path)
            modified = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(state.st_mtime))
            modified += f".{state.st_mtime_ns % 10**9:09}"
            found.append(f"{os.path.realpath(path)} ({state.st_size:,} bytes of {modified})")
        return found

    def records(self, start: Position, most_bytes: int) -> Iterator[Record]:
        """Yield the documents from a position on. most_bytes: of a document, else it is a bad record."""
        return read_records(
            self.files,
            self.document_unit,
            keys=self.keys,
            input_format=self.input_format,
            start=start,
            most_bytes=most_bytes,
        )

    def beginnings(self, most_bytes: float, counts: Counter[str]) -> Iterator[str]:
        """Yield texts from the beginning of each file, up to most_bytes in all, and count documents, bytes, files and
        bad records.

        A file may give an equal share of what the files before it have left.
        """
        left = most_bytes
        for index, path in enumerate(self.files):
            share = left / (len(self.files) - index)
            begun = counts["documents"]
            for record in read_records([path], self.document_unit, keys=self.keys, input_format=self.input_format):
                found = record.parse(self.keys)
                if isinstance(found, Problem):
                    counts["bad"] += 1
                    continue
                counts["documents"] += 1
                for text in found:
                    size = len(text.encode("utf-8"))
                    taken = min(size, math.ceil(share))
                    counts["bytes"] += taken
                    share, left = share - taken, left - taken
                    yield text if taken == size else text.encode("utf-8")[:taken].decode("utf-8", errors="ignore")
                if share <= 0:
                    break
            counts["files"] += counts["documents"] > begun


def find_corpus(
    inputs: Sequence[str],
    suffixes: Sequence[str],
    keys: Sequence[str],
    input_format: str | None,
    document_unit: str | None,
) -> tuple[Corpus, str]:
    """Return the files that `inputs` name, and a remark if the unit of their documents was inferred.

    suffixes: of the files in directories. Raises ConfigError.
    """
    files = find_files(inputs, suffixes)
    texts = [path for path in files if format_of(path, input_format) == "text"]
    if texts and list(keys) != [TEXT_KEY]:
        raise ConfigError(
            f"--json-keys {' '.join(keys)}: {texts[0]} is plain text, which has the key {TEXT_KEY!r} only"
        )
    if document_unit is not None:
        return Corpus(files, document_unit, keys, input_format), ""
    pipe = next((path for path in texts if not is_regular(path)), None)
    if pipe is not None:
        raise ConfigError(f"--input-format text from {pipe} needs --document-unit ({', '.join(DOCUMENT_UNITS)})")
    if len(files) != 1 or not texts or not is_prose(files[0]):
        return Corpus(files, DOCUMENT_UNITS[0], keys, input_format), ""
    unit, reason = infer_document_unit(files[0])
    others = " or ".join(each for each in DOCUMENT_UNITS if each != unit)
    remark = f"{files[0]}: --document-unit {unit} is taken, because {reason}; or give {others}"
    return Corpus(files, unit, keys, input_format), remark
