"""`SkippedSamples`: ranges of a dataset that training passes over, and the numbering of the samples that are left."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class SkippedSamples:
    """Skipped ranges of a dataset.

    windows: (first, past the last), ascending, neither overlapping nor adjacent; use `of` and `plus` to construct. A
    sample has an index in the dataset, and a number among the samples that are not skipped.
    """

    windows: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, windows: Iterable[Iterable[int]]) -> SkippedSamples:
        """Merge windows given in any order; empty ones are dropped."""
        merged: list[tuple[int, int]] = []
        for first, past in sorted((first, past) for first, past in windows):
            if merged and first <= merged[-1][1]:
                merged[-1] = merged[-1][0], max(merged[-1][1], past)
            elif past > first:
                merged.append((first, past))
        return cls(tuple(merged))

    def plus(self, first: int, past: int) -> SkippedSamples:
        """Add a window."""
        return SkippedSamples.of((*self.windows, (first, past)))

    def index(self, number: int) -> int:
        """Return the dataset index of the sample with this number."""
        for first, past in self.windows:
            if number < first:
                break
            number += past - first
        return number

    def number(self, index: int) -> int | None:
        """Return the number of the sample at a dataset index, or None if it is skipped."""
        before = 0
        for first, past in self.windows:
            if index < first:
                break
            if index < past:
                return None
            before += past - first
        return index - before
