"""From what the ranks do to the one that the others wait for, and the report of it.

A rank that is stuck in a wait points at those it waits for: the peer of a message, or the members of its group that
have not launched the collective. A rank that others point at and that points at no other is missing. A rank whose
process is dead, stopped or silent is missing whatever its last record says. If all pointers form circles, the ranks are
in different operations, and none of them will end.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megapipe.monitor.heartbeat import Record, Wait
from megapipe.monitor.roster import LEFT, Roster, Sighting

Edges = Mapping[int, tuple[int, ...]]  # waiting rank -> the ranks it waits for
MOST_WAITS = 8  # listed one by one
MOST_CULPRITS = 4  # whose stacks are shown


class Fault(enum.Enum):
    """The kinds of hangs, worst first, in the words of the report."""

    GONE = "the process died without an error message (kill -9, or the system ran out of memory)"
    STOPPED = "the process is stopped"
    LEFT = "the rank has left the run"
    SILENT = "the rank does not answer: native code holds Python's lock, or its host is down or cut off"
    STUCK = "the rank makes no progress and waits for no other"
    MISMATCH = "ranks wait for each other in operations that do not match"
    NO_END = "all ranks of a group have joined a collective and it does not end (the network, or the backend)"


@dataclass(frozen=True)
class Diagnosis:
    """The cause of a hang. culprits: global ranks. edges: waits by rank."""

    fault: Fault
    culprits: tuple[int, ...]
    edges: Edges

    def chain(self, rank: int) -> tuple[int, ...]:
        """Return the shortest chain of waits from a rank to a culprit, (rank,) if there is no such chain."""
        chains: list[tuple[int, ...]] = [(rank,)]
        seen = {rank}
        for chain in chains:
            if chain[-1] in self.culprits and (len(chain) > 1 or rank in self.culprits):
                return chain
            for following in self.edges.get(chain[-1], ()):
                if following not in seen:
                    seen.add(following)
                    chains.append((*chain, following))
        return (rank,)


def waits_for(sighting: Sighting, sightings: Sequence[Sighting], roster: Roster) -> tuple[int, ...]:
    """Return the ranks that this one's wait depends on, () if it does not wait or if all have joined and are alive."""
    record = sighting.record
    if record is not None and record.wait in (Wait.RECEIVE, Wait.SEND):
        return (record.peer,)
    if record is None or record.wait is Wait.NOTHING or record.group not in roster.groups:
        return ()
    rank, place = sighting.member.rank, list(roster.groups).index(record.group)  # of the group in a record's counts
    ranks = roster.partners[record.group].get(rank, ())
    partners = [sightings[other] for other in ranks if other != rank]
    absent = [other for other in partners if other.snapshot is None or other.snapshot.counts[place] < record.number]
    lost = [other for other in partners if other.is_gone or other.is_stopped or other.answers is False]
    return tuple(other.member.rank for other in absent or lost)


def diagnose(sightings: Sequence[Sighting], roster: Roster, limit_seconds: float) -> Diagnosis | None:
    """Return who is missing, or None if no rank is or the awaited ranks still make progress. sightings: by rank."""
    stuck = {sighting.member.rank for sighting in sightings if sighting.is_stuck(limit_seconds)}
    edges = {s.member.rank: waits_for(s, sightings, roster) for s in sightings if s.waits}
    awaited = {target for rank, targets in edges.items() if rank in stuck for target in targets}
    found: dict[Fault, list[int]] = {}
    for sighting in sightings:
        rank, fault = sighting.member.rank, None
        if sighting.is_gone:  # stuck for the limit or not: it never comes back
            fault = Fault.GONE
        elif sighting.has_left:
            fault = Fault.LEFT if rank in awaited else None
        elif rank in stuck and sighting.is_stopped:
            fault = Fault.STOPPED
        elif rank in stuck and sighting.answers is False:
            fault = Fault.SILENT
        elif rank in stuck and not sighting.waits:
            fault = Fault.STUCK
        if fault is not None:
            found.setdefault(fault, []).append(rank)
    for fault in Fault:  # worst first
        if fault in found:
            return Diagnosis(fault, tuple(found[fault]), edges)
    if any(target not in stuck for target in awaited):
        return None  # a rank that others wait for makes progress: slow, not stuck
    without_end = tuple(sorted(rank for rank, targets in edges.items() if rank in stuck and not targets))
    if without_end:
        return Diagnosis(Fault.NO_END, without_end, edges)
    stuck_edges = {rank: targets for rank, targets in edges.items() if rank in stuck}
    if not stuck_edges:
        return None
    # every stuck rank waits for another stuck one, so following the waits ends in a circle
    chain = [min(stuck_edges)]
    while (following := min(stuck_edges[chain[-1]])) not in chain:
        chain.append(following)
    return Diagnosis(Fault.MISMATCH, tuple(chain[chain.index(following) :]), edges)


def doing(record: Record) -> str:
    """Return what a rank does apart from waiting, as in 'in 3F3, reading data'; "" if that has no name."""
    if record.phase in LEFT:
        return "has left" if record.phase == "ended" else "has left after its own error"
    action = f"in {record.action}" if record.action else ""
    phase = record.phase if record.phase and (record.phase != "forward-backward" or not action) else ""
    return ", ".join(part for part in (action, phase) if part)


def wait_text(record: Record, missing: Sequence[int]) -> str:
    """Return what a rank waits for, "" if for nothing. missing: ranks of its group that it waits for."""
    if record.wait is Wait.RECEIVE:
        return f"for the {record.what} from rank {record.peer}"
    if record.wait is Wait.SEND:
        return f"until rank {record.peer} receives the {record.what}"
    if record.wait is Wait.COLLECTIVE:
        absent = f"{_ranks(missing)} {'is' if len(missing) == 1 else 'are'} missing"
        who = absent if missing else "all ranks have joined"
        return f"in {record.what}, number {record.number} of this group, where {who}"
    return ""


def report_text(
    diagnosis: Diagnosis, sightings: Sequence[Sighting], stacks: Mapping[int, str], limit_seconds: float
) -> str:
    """Return the whole message: who is missing, the waits, stacks or what is known instead."""
    step = max((s.record.step for s in sightings if s.record is not None), default=-1)
    culprits = [sightings[rank] for rank in diagnosis.culprits]
    lines = [f"{_headline(diagnosis, culprits, sightings)} (step {step})"]
    # a line for each waiting rank, those that wait for a culprit directly first
    left_out = diagnosis.culprits if diagnosis.fault not in (Fault.MISMATCH, Fault.NO_END) else ()
    waiting = [rank for rank in diagnosis.edges if rank not in left_out]
    waiting.sort(key=lambda rank: (len(diagnosis.chain(rank)) == 1, len(diagnosis.chain(rank)), rank))
    for rank in waiting[:MOST_WAITS]:
        sighting = sightings[rank]
        assert sighting.record is not None
        waits = wait_text(sighting.record, diagnosis.edges[rank])
        where = f", {what}," if (what := doing(sighting.record)) else ""
        lines.append(f"  {sighting.member}{where} waits {sighting.age_seconds:.1f} s {waits}")
    if len(waiting) > MOST_WAITS:
        lines.append(f"  and {len(waiting) - MOST_WAITS} more ranks wait for these, directly or indirectly")
    for culprit in culprits[:MOST_CULPRITS]:
        rank, stack = culprit.member.rank, stacks.get(culprit.member.rank)
        if stack:
            lines += [f"  stack of rank {rank}, innermost last:", *(f"    {line}" for line in stack.splitlines())]
        elif not culprit.is_unreachable:
            why = culprit.process or f"{culprit.member.host} does not answer"
            lines.append(f"  no stack of rank {rank}: {why}")
    if more := diagnosis.culprits[MOST_CULPRITS:]:
        lines.append(f"  and {len(more)} more ranks: {_ranks(more)}")
    lines.append(f"All ranks were terminated; saved checkpoints are intact. (--hang-timeout-seconds {limit_seconds:g})")
    return "\n".join(lines)


def silent_hosts(sightings: Sequence[Sighting]) -> str:
    """Name the hosts none of whose ranks answer, and who says so; "" if some of their ranks answer."""
    silent = [s.member for s in sightings if s.is_unreachable]
    hosts = list(dict.fromkeys(member.host for member in silent))
    others = list(dict.fromkeys(s.member.host for s in sightings if not s.is_unreachable))
    if not hosts or set(hosts) & set(others):
        return ""
    ranks = _ranks([member.rank for member in silent])
    seen_from = _listed(others) if len(others) <= MOST_CULPRITS else f"{len(others)} other hosts"
    who = f"{_listed(hosts)} ({ranks})"
    if len(hosts) == 1:
        return f"host {who} no longer answers {seen_from}: it is down or cut off, or its ranks are stopped"
    if len(others) > 1:
        return f"hosts {who} no longer answer {seen_from}: they are down or cut off, or their ranks are stopped"
    network = f"the network of {others[0]} is cut, or they are down"
    return f"no other host ({_listed(hosts)}; {ranks}) answers {seen_from} any more: {network}"


def _headline(diagnosis: Diagnosis, culprits: Sequence[Sighting], sightings: Sequence[Sighting]) -> str:
    names = "; ".join(f"{c.member} on {c.member.host}, process {c.member.pid}" for c in culprits[:MOST_CULPRITS])
    if diagnosis.fault in (Fault.MISMATCH, Fault.NO_END):
        return f"training hangs: {diagnosis.fault.value}: {names}"
    if diagnosis.fault is Fault.SILENT and (hosts := silent_hosts(sightings)):
        return f"training hangs: {hosts}"
    first = culprits[0]
    parts = [] if first.record is None else [f"{doing(first.record) or 'between phases'} for {first.age_seconds:.1f} s"]
    if diagnosis.fault is not Fault.STUCK:
        parts.append(str(first.process) if diagnosis.fault is Fault.STOPPED else diagnosis.fault.value)
    return f"training hangs on {names}: {', '.join(parts)}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {_listed([str(rank) for rank in ranks])}"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names if len(names) <= 6 else [*names[:5], f"... ({len(names)} in all)"])
