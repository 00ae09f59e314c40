"""Clocks of other ranks, from the round trips of messages (Cristian 1989): their offset and a bound of its error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class RoundTrip(NamedTuple):
    """A message there and back: sent_ns and back_ns on the local clock, remote_ns on the other clock between them."""

    sent_ns: int
    remote_ns: int
    back_ns: int


class Reading(NamedTuple):
    """The offset of another clock from the local one, at a local time.

    The true offset is within offset_ns +- error_ns, however unequal the two directions of the round trip were.
    """

    at_ns: int
    offset_ns: int
    error_ns: int


def reading(round_trips: Sequence[RoundTrip]) -> Reading:
    """Return the offset by the shortest round trip, which is wrong by at most half of it."""
    best = min(round_trips, key=lambda trip: trip.back_ns - trip.sent_ns)
    middle = (best.sent_ns + best.back_ns) // 2
    return Reading(middle, best.remote_ns - middle, (best.back_ns - best.sent_ns + 1) // 2)


@dataclass(frozen=True)
class Clock:
    """Conversion from another rank's clock to the local one.

    The offset is interpolated linearly between the readings before and after the steps, since two quartz clocks drift
    apart by some 10 us a second. None, None: the same clock, which ranks of one machine share.
    """

    before: Reading | None = None
    after: Reading | None = None

    @property
    def error_ns(self) -> int:
        """The largest error of a time between the two readings, assuming a constant drift."""
        return max((reading.error_ns for reading in (self.before, self.after) if reading is not None), default=0)

    @property
    def is_shared(self) -> bool:
        return self.before is None

    def to_local(self, remote_ns: int) -> int:
        """Return the local time at a time of the other clock."""
        if self.before is None:
            return remote_ns
        local = remote_ns - self.before.offset_ns  # exact enough to interpolate at: the offset changes very little
        if self.after is None or self.after.at_ns == self.before.at_ns:
            return local
        share = (local - self.before.at_ns) / (self.after.at_ns - self.before.at_ns)
        return remote_ns - self.before.offset_ns - round(share * (self.after.offset_ns - self.before.offset_ns))
