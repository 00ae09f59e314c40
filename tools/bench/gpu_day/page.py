"""The table of docs/gpu.md, and what pages say of GPUs, from docs/gpu_record.tsv."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from bench_table import as_markdown, with_text

from gpu_day.parts import PARTS, Part
from gpu_day.record import Record, Row, write_whole
from gpu_day.running import PASSED, SKIPPED

REPOSITORY = Path(__file__).resolve().parents[3]
RECORD, PAGE = Path("docs/gpu_record.tsv"), Path("docs/gpu.md")
NO = "no"


class Area(NamedTuple):
    """A row of the table, and of areas.csv. name: by which parts of the day say that they prove it."""

    name: str
    what: str
    on_cpus: str  # how it is tested on a CPU
    tests: str  # that need a GPU


with Path(__file__).with_name("areas.csv").open(encoding="utf-8", newline="") as file:
    AREAS = tuple(map(Area._make, [*csv.reader(file)][1:]))
HEADER = ("part", "tested on a CPU by", "tests for a GPU", "has run on a GPU")


class State(NamedTuple):
    """An area on the devices of a record: parts that passed, parts that ended otherwise, and those that never ran."""

    passed: list[Row]
    others: list[Row]
    missing: list[str]

    @property
    def is_proved(self) -> bool:
        return bool(self.passed) and not self.others and not self.missing

    @property
    def has_run(self) -> bool:
        return bool(self.passed)

    def text(self) -> str:
        """Return the last column of the table."""
        lines = []
        if self.passed:
            where = ", ".join(sorted({f"{row.device}, torch {row.torch}" for row in self.passed}))
            days = sorted(row.date[:10] for row in self.passed)
            in_part = f"yes in part ({_names(row.part for row in self.passed)})"
            lines.append(f"{'**yes**' if self.is_proved else in_part}: {where}, {days[-1]}")
        for result in sorted({row.result for row in self.others}):
            lines.append(f"**{result}**: {_names(row.part for row in self.others if row.result == result)}")
        if self.missing and lines:
            lines.append(f"not yet: {_names(self.missing)}")
        return "; ".join(lines) or NO


def _names(parts: Iterator[str] | Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in dict.fromkeys(parts))


def on_gpus(record: Record) -> list[Row]:
    """Return the rows that ran on a GPU."""
    return [row for row in record if row.device != "CPU" and row.result != SKIPPED]


def states(record: Record, parts: Sequence[Part] = PARTS) -> dict[str, State]:
    """Return what the record shows of each area. A part that passed on one device has run, whatever others say; where
    it never passed, its latest failure stands."""
    by_part: dict[str, Row] = {}
    for row in sorted(on_gpus(record), key=lambda row: (row.result == PASSED, row.date)):
        by_part[row.part] = row
    found = {}
    for area in AREAS:
        names = [part.name for part in parts if area.name in part.proves]
        rows = [by_part[name] for name in names if name in by_part]
        passed, others = ([row for row in rows if (row.result == PASSED) is wanted] for wanted in (True, False))
        found[area.name] = State(passed, others, [name for name in names if name not in by_part])
    return found


def table(record: Record, parts: Sequence[Part] = PARTS) -> str:
    """Return the table of docs/gpu.md: every area, how it is tested, and what has run."""
    known = states(record, parts)
    rows = [HEADER]
    for area in AREAS:
        tests = ", ".join(f"`tests/cuda/{name}`" for name in area.tests.split()) or "start a run"
        rows.append((area.what, area.on_cpus, tests, known[area.name].text()))
    return as_markdown(rows)


def _counts(record: Record, parts: Sequence[Part]) -> str:
    known = states(record, parts).values()
    devices = ", ".join(sorted({row.device for row in on_gpus(record)}))
    whole, some = sum(state.is_proved for state in known), sum(state.has_run and not state.is_proved for state in known)
    return f"On {devices}: {whole} of {len(AREAS)} rows have passed, {some} in part, {len(AREAS) - whole - some} not."


def sentences(record: Record, parts: Sequence[Part] = PARTS) -> Mapping[str, str]:
    """Return what pages say between <!-- gpu --> and <!-- /gpu -->, by page."""
    ran = bool(on_gpus(record))
    counts = _counts(record, parts) if ran else ""
    place = "#what-has-run-on-a-gpu"
    return {
        "README.md": f"{counts} [This table](docs/gpu.md{place}) says which, and how the others were tested."
        if ran
        else f"**Nothing has run on a GPU yet**; [this table](docs/gpu.md{place}) says how each part was tested.",
        "docs/index.md": counts if ran else "nothing yet",
        "docs/gpu.md": f"{counts} [The table]({place}) says which, and how the others were tested."
        if ran
        else f"**Nothing on this page has run on a GPU yet**; [the table]({place}) says how each part was tested.",
        "docs/roadmap.md": f"{counts}" if ran else "Nothing has run on a GPU:",
    }


def pages(root: Path = REPOSITORY) -> dict[Path, str]:
    """Return the pages that follow from the record of a checkout, as they should be."""
    record = Record.read(root / RECORD)
    found = {
        root / name: with_text((root / name).read_text(encoding="utf-8"), "gpu", sentence)
        for name, sentence in sentences(record).items()
    }
    found[root / PAGE] = with_text(found[root / PAGE], "gpu table", f"\n{table(record)}\n")
    return found


def write(root: Path = REPOSITORY) -> list[Path]:
    """Write the pages that have changed, and return them."""
    changed = [
        file for file, text in pages(root).items() if not file.exists() or file.read_text(encoding="utf-8") != text
    ]
    for file, text in pages(root).items():
        if file in changed:
            write_whole(file, text)
    return changed
