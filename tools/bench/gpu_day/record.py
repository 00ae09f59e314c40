"""docs/gpu_record.tsv: what ran on which device with which torch, and how it ended.

A row is replaced when the part runs again on the same device and torch. Figures are JSON; the log is a JSON string of
the last lines, for parts that failed.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

SCHEMA = 1
HEAD = "# What ran on which device. Written by tools/bench/first_day.py. schema="


class RecordError(Exception):
    """A file that is no record of this schema."""


@dataclass(frozen=True)
class Row:
    """How a part ended. command: a digest of its words, by which a part that has changed is run again."""

    part: str
    device: str
    torch: str
    commit: str
    date: str  # UTC, to the second
    result: str
    seconds: float
    command: str
    figures: Mapping[str, float] = field(default_factory=dict)
    log: str = ""

    @property
    def key(self) -> tuple[str, str, str]:
        return self.part, self.device, self.torch

    def line(self) -> str:
        values: dict[str, Any] = asdict(self) | {"seconds": f"{self.seconds:.1f}"}
        values["figures"] = json.dumps(dict(self.figures), separators=(",", ":")) if self.figures else ""
        values["log"] = json.dumps(self.log) if self.log else ""
        return "\t".join(
            " ".join(values[name].split()) if name not in ("figures", "log") else values[name] for name in COLUMNS
        )

    @classmethod
    def read(cls, line: str) -> Row:
        values: dict[str, Any] = dict(zip(COLUMNS, line.split("\t"), strict=True))
        figures = json.loads(values["figures"] or "{}")
        if not isinstance(figures, dict) or not all(isinstance(each, (int, float)) for each in figures.values()):
            raise ValueError("figures are not numbers by name")
        read = {"seconds": float(values["seconds"]), "figures": figures, "log": json.loads(values["log"] or '""')}
        return cls(**values | read)


COLUMNS = tuple(each.name for each in fields(Row))


class Record:
    """The rows of a file, in the order in which their parts first ran."""

    def __init__(self, rows: Iterable[Row] = ()) -> None:
        self._rows = {row.key: row for row in rows}

    def __iter__(self) -> Iterator[Row]:
        return iter(self._rows.values())

    def find(self, part: str, device: str, torch: str) -> Row | None:
        return self._rows.get((part, device, torch))

    def add(self, row: Row) -> None:
        self._rows[row.key] = row

    def merge(self, other: Record) -> int:
        """Take the rows of another record that are new or later, and return their number."""
        later = [row for row in other if row.key not in self._rows or self._rows[row.key].date < row.date]
        for row in later:
            self.add(row)
        return len(later)

    def text(self) -> str:
        return "".join(f"{line}\n" for line in (f"{HEAD}{SCHEMA}", "\t".join(COLUMNS), *(row.line() for row in self)))

    @classmethod
    def read(cls, file: Path) -> Record:
        """Return the record of a file, an empty one if there is no file. Raises RecordError."""
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            return cls()
        except (OSError, UnicodeDecodeError) as error:
            raise RecordError(f"{file}: {error}") from error
        if not lines or not lines[0].startswith(HEAD):
            raise RecordError(f"{file}: this is no record of first_day.py: its first line has no schema")
        schema = lines[0].removeprefix(HEAD)
        if schema != str(SCHEMA) or lines[1:2] != ["\t".join(COLUMNS)]:
            raise RecordError(
                f"{file}: this record has schema {schema} and columns {' '.join(lines[1:2]) or 'missing'}; this "
                f"version reads schema {SCHEMA} with {' '.join(COLUMNS)}. Name another file with --record"
            )
        rows = []
        for number, line in enumerate(lines[2:], 3):
            try:
                rows.append(Row.read(line))
            except (ValueError, TypeError) as error:
                raise RecordError(f"{file}: line {number} is damaged: {error}") from error
        return cls(rows)

    def write(self, *files: Path) -> None:
        for file in files:
            write_whole(file, self.text())


def write_whole(file: Path, content: str | bytes) -> None:
    """Replace a file: whoever reads it, also after a crash, sees the old content or the new one."""
    handle, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    try:
        with os.fdopen(handle, "wb") as temporary:
            temporary.write(content.encode() if isinstance(content, str) else content)
            temporary.flush()
            os.fsync(temporary.fileno())
        os.chmod(name, 0o644)
        os.replace(name, file)
    except BaseException:
        os.unlink(name)
        raise
