"""Clocks of other ranks from the messages of a ping-pong (Cristian 1989): offset, and the bound of its error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class RoundTrip(NamedTuple):
    """A message there and back: sent_ns and back_ns on the asking clock, there_ns read on the other clock between them."""

    sent_ns: int
    there_ns: int
    back_ns: int


class Reading(NamedTuple):
    """The other clock less this one, at a moment of this one. The true offset lies within offset_ns +- error_ns, however the time on the
    way was divided between the two directions."""

    at_ns: int
    offset_ns: int
    error_ns: int


def reading(round_trips: Sequence[RoundTrip]) -> Reading:
    """The reading of the shortest round trip: half of it is the most that the offset can be wrong by."""
    best = min(round_trips, key=lambda trip: trip.back_ns - trip.sent_ns)
    middle = (best.sent_ns + best.back_ns) // 2
    return Reading(middle, best.there_ns - middle, (best.back_ns - best.sent_ns + 1) // 2)


@dataclass(frozen=True)
class Clock:
    """From another rank's clock to this one. The offset runs on a straight line through the readings before and after the steps, since
    two quartz clocks drift by some 10 us a second. None, None: the same clock, which ranks of one machine share."""

    before: Reading | None = None
    after: Reading | None = None

    @property
    def error_ns(self) -> int:
        """The largest error of a time between the two readings, drift at a constant rate taken for granted."""
        return max((reading.error_ns for reading in (self.before, self.after) if reading is not None), default=0)

    @property
    def is_shared(self) -> bool:
        return self.before is None

    def to_here(self, there_ns: int) -> int:
        """A time of the other clock on this one."""
        if self.before is None:
            return there_ns
        here = there_ns - self.before.offset_ns  # the offset changes too little to matter for where on the line we are
        if self.after is None or self.after.at_ns == self.before.at_ns:
            return here
        part = (here - self.before.at_ns) / (self.after.at_ns - self.before.at_ns)
        return there_ns - self.before.offset_ns - round(part * (self.after.offset_ns - self.before.offset_ns))
