"""How long a rank waits, for whom, and how long it reads data: what is left of a step is computation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from megapipe.monitor.record import Wait

READING = "reading data"
Cause = tuple[Wait, int | str]  # a peer's global rank, or a kind of group


class StepTimes(NamedTuple):
    """One step of one rank, in nanoseconds of its clock. waits: by what was waited for. reading: data, waits aside."""

    elapsed: int
    waits: Mapping[Cause, int]
    reading: int

    @property
    def waiting(self) -> int:
        return sum(self.waits.values())

    @property
    def computing(self) -> int:
        return max(0, self.elapsed - self.waiting - self.reading)


class WaitClock:
    """Adds up the waits of one thread. A beginning and an end cost about 0.2 us together; nothing is kept but sums. All times: nanoseconds
    of one clock."""

    __slots__ = ("_cause", "_reading", "_reading_since", "_since", "_step_began", "_waits")

    def __init__(self, now: int) -> None:
        self._step_began = now
        self._waits: dict[Cause, int] = {}
        self._cause: Cause | None = None
        self._since = 0
        self._reading = self._reading_since = 0

    def wait(self, cause: Cause, now: int) -> None:
        """The rank stands still from now on."""
        self._cause, self._since = cause, now

    def go_on(self, now: int) -> None:
        cause, self._cause = self._cause, None
        if cause is not None:
            self._waits[cause] = self._waits.get(cause, 0) + now - self._since

    def read(self, now: int) -> None:
        """Data are read from now on."""
        self._reading_since = now

    def has_read(self, now: int) -> None:
        self._reading += now - self._reading_since

    def turn(self, now: int) -> StepTimes:
        """A step ends and the next one begins."""
        times = StepTimes(now - self._step_began, self._waits, self._reading)
        self._step_began, self._waits, self._reading = now, {}, 0
        return times
