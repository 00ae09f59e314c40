"""From what the ranks do to the one that the others wait for.

A rank that stands still in a wait points at those it waits for: the peer of a message, the members of its group that have not launched the
collective. Whoever is pointed at and points at nobody is missing. A rank whose process is gone, stopped or silent is missing whatever its
last record says. If all pointers run in circles, the ranks are in different operations, and none of them will end.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megapipe.monitor.record import Wait
from megapipe.monitor.roster import Roster
from megapipe.monitor.sighting import Sighting

Edges = Mapping[int, tuple[int, ...]]  # rank -> those it waits for; only of ranks that wait


class Fault(enum.Enum):
    """What keeps a run from going on."""

    GONE = "its process has ended without a word"
    STOPPED = "its process is stopped"
    LEFT = "it has left the run"
    SILENT = "it does not answer"  # its host is down or cut off, or native code holds Python's lock
    STUCK = "it does not get on"  # and waits for no other rank
    MISMATCH = "they wait for each other"
    NO_END = "all have come, and it does not end"  # a link, or the backend


@dataclass(frozen=True)
class Diagnosis:
    """fault: what is wrong with `culprits`, global ranks. edges: who waits for whom."""

    fault: Fault
    culprits: tuple[int, ...]
    edges: Edges

    def chain(self, rank: int) -> tuple[int, ...]:
        """From a rank to a culprit, along those each waits for; the shortest, (rank,) where none leads there."""
        trails: list[tuple[int, ...]] = [(rank,)]
        seen = {rank}
        for trail in trails:
            if trail[-1] in self.culprits and (len(trail) > 1 or rank in self.culprits):
                return trail
            for following in self.edges.get(trail[-1], ()):
                if following not in seen:
                    seen.add(following)
                    trails.append((*trail, following))
        return (rank,)


def waits_for(sighting: Sighting, sightings: Sequence[Sighting], roster: Roster) -> tuple[int, ...]:
    """The ranks without which this one's wait cannot end; empty if it does not wait, or if all have come and can take part."""
    record = sighting.record
    if record is None or record.wait is Wait.NOTHING:
        return ()
    if record.wait is not Wait.COLLECTIVE:
        return (record.peer,)
    place = roster.place_of(record.group)
    if place is None:
        return ()
    partners = [
        sightings[rank] for rank in roster.partners(sighting.member.rank, record.group) if rank != sighting.member.rank
    ]
    absent = tuple(
        other.member.rank
        for other in partners
        if other.snapshot is None or other.snapshot.counts[place] < record.number
    )
    return absent or tuple(
        other.member.rank for other in partners if other.is_gone or other.is_stopped or other.answers is False
    )


def diagnose(sightings: Sequence[Sighting], roster: Roster, limit_seconds: float) -> Diagnosis | None:
    """Who is missing; None while nobody is, or while those that are waited for still get on. sightings: by global rank."""
    still = {sighting.member.rank for sighting in sightings if sighting.is_still(limit_seconds)}
    edges = {s.member.rank: waits_for(s, sightings, roster) for s in sightings if s.waits}
    for fault, found in _missing(sightings, still, edges).items():
        if found:
            return Diagnosis(fault, found, edges)
    of_still = {rank: followers for rank, followers in edges.items() if rank in still}
    if any(follower not in still for followers in of_still.values() for follower in followers):
        return None  # somebody that others wait for gets on: slow, not stuck
    without_end = tuple(sorted(rank for rank, followers in of_still.items() if not followers))
    if without_end:
        return Diagnosis(Fault.NO_END, without_end, edges)
    return Diagnosis(Fault.MISMATCH, _circle(of_still), edges) if of_still else None


def _missing(sightings: Sequence[Sighting], still: set[int], edges: Edges) -> dict[Fault, tuple[int, ...]]:
    """Ranks that wait for nobody and yet do not get on, worst first. One that is gone need not have been still for the limit: it never
    comes back."""
    waited_for = {follower for rank, followers in edges.items() if rank in still for follower in followers}
    found: dict[Fault, list[int]] = {fault: [] for fault in Fault}
    for sighting in sightings:
        rank = sighting.member.rank
        fault = _fault_of(sighting, rank in still, rank in waited_for)
        if fault is not None:
            found[fault].append(rank)
    return {fault: tuple(ranks) for fault, ranks in found.items()}


def _fault_of(sighting: Sighting, is_still: bool, is_waited_for: bool) -> Fault | None:
    if sighting.is_gone:
        return Fault.GONE
    if sighting.has_left:
        return Fault.LEFT if is_waited_for else None
    if not is_still:
        return None
    if sighting.is_stopped:
        return Fault.STOPPED
    if sighting.answers is False:
        return Fault.SILENT
    return None if sighting.waits else Fault.STUCK


def _circle(edges: Edges) -> tuple[int, ...]:
    """Ranks that wait for each other in a circle, in its order. Every rank in edges waits for some other that is in edges too."""
    trail = [min(edges)]
    while (following := min(edges[trail[-1]])) not in trail:
        trail.append(following)
    return tuple(trail[trail.index(following) :])
