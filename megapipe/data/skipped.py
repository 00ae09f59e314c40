"""`SkippedSamples`: windows of a data set that training passes over, and what is left as one row of numbers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class SkippedSamples:
    """windows: (first, past the last) in ascending order; they neither overlap nor touch. Made by `of` and `plus`.

    A sample has a number, its turn among those that are not skipped, and a place in the data set.
    """

    windows: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, windows: Iterable[Iterable[int]]) -> SkippedSamples:
        """Of windows in any order; empty ones vanish."""
        merged: list[tuple[int, int]] = []
        for first, past in sorted((first, past) for first, past in windows):
            if merged and first <= merged[-1][1]:
                merged[-1] = merged[-1][0], max(merged[-1][1], past)
            elif past > first:
                merged.append((first, past))
        return cls(tuple(merged))

    def plus(self, first: int, past: int) -> SkippedSamples:
        return SkippedSamples.of((*self.windows, (first, past)))

    def behind(self, place: int) -> SkippedSamples:
        """What of the windows lies at `place` or behind it."""
        return SkippedSamples.of((max(first, place), max(past, place)) for first, past in self.windows)

    def place(self, number: int) -> int:
        """Where in the data set the sample with this number lies."""
        for first, past in self.windows:
            if number < first:
                break
            number += past - first
        return number

    def number(self, place: int) -> int | None:
        """The turn of the sample at a place of the data set; None if it is skipped."""
        before = 0
        for first, past in self.windows:
            if place < first:
                break
            if place < past:
                return None
            before += past - first
        return place - before
