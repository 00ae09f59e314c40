"""Medians with quartiles, tables as benchmarks print them, and their places in pages."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from bench_processes import BenchError


@dataclass(frozen=True)
class Quartiles:
    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Quartiles:
        if len(values) == 1:
            return cls(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(low, median, high)

    def text(self, form: str) -> str:
        return f"{self.median:{form}} [{self.low:{form}}, {self.high:{form}}]"


def as_markdown(rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def with_text(page: str, mark: str, text: str) -> str:
    """Return a page with another text between its marks. Raises BenchError if it does not have them once."""
    marks = f"<!-- {mark} -->", f"<!-- /{mark} -->"
    between = rf"(?s)(?<={re.escape(marks[0])}).*?(?={re.escape(marks[1])})"
    made, count = re.subn(between, lambda _: text, page)
    if count != 1:
        raise BenchError(f"a page has {count} pairs of the marks {marks[0]} and {marks[1]}, not one")
    return made
