"""Medians with quartiles, and tables, as benchmarks print them."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass


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
