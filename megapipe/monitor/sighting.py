"""`Sighting`: one rank as others see it: its record, how long it has stood still, whether it answers."""

from __future__ import annotations

from dataclasses import dataclass

from megapipe.monitor.process import ProcessState
from megapipe.monitor.record import Record, Snapshot, Wait
from megapipe.monitor.roster import Member

LEFT = ("ended", "failed")  # last phases


@dataclass(frozen=True)
class Sighting:
    """snapshot: None where nothing of the rank can be read. age_seconds: since its record last changed. process: None on another host.

    answers: its watchdog runs; None where that is not known.
    """

    member: Member
    snapshot: Snapshot | None
    age_seconds: float = 0.0
    process: ProcessState | None = None
    answers: bool | None = None

    @property
    def record(self) -> Record | None:
        return None if self.snapshot is None else self.snapshot.record

    @property
    def waits(self) -> bool:
        return self.record is not None and self.record.wait is not Wait.NOTHING

    @property
    def has_left(self) -> bool:
        """It said so itself."""
        return self.record is not None and self.record.phase in LEFT

    @property
    def is_gone(self) -> bool:
        """Its process has ended without a word."""
        return self.process is not None and self.process.has_ended and not self.has_left

    @property
    def is_stopped(self) -> bool:
        return self.process is not None and self.process.is_stopped

    def is_still(self, limit_seconds: float) -> bool:
        """It has stood still for longer than it may: the limit, times the patience of what it is in."""
        patience = 1 if self.record is None else self.record.patience
        is_known = self.record is not None or self.answers is False
        return is_known and self.age_seconds >= limit_seconds * patience


def is_unreachable(sighting: Sighting) -> bool:
    """A rank of another host from which nothing comes any more."""
    return sighting.process is None and sighting.answers is False and not sighting.has_left
