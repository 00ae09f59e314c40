"""A diagnosis and a table of sightings as text for a person."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from megapipe.monitor.diagnosis import Diagnosis, Fault
from megapipe.monitor.record import Record, Wait
from megapipe.monitor.sighting import LEFT, Sighting, is_unreachable

MOST_WAITS = 8  # told one by one
MOST_CULPRITS = 4  # whose stacks are told


def doing(record: Record) -> str:
    """ "in 3F3, reading data"; what a rank does apart from waiting, "" if that is nothing with a name."""
    if record.phase in LEFT:
        return "has left" if record.phase == "ended" else "has left after an error of its own"
    where = f"in {record.action}" if record.action else ""
    phase = record.phase if record.phase and (record.phase != "forward-backward" or not where) else ""
    return ", ".join(part for part in (where, phase) if part)


def waiting(record: Record, missing: Sequence[int]) -> str:
    """What a rank waits for, "" if for nothing. missing: those of its group."""
    if record.wait is Wait.RECEIVE:
        return f"for the {record.what} from rank {record.peer}"
    if record.wait is Wait.SEND:
        return f"until rank {record.peer} takes the {record.what}"
    if record.wait is Wait.COLLECTIVE:
        who = f"{_ranks(missing)} {'is' if len(missing) == 1 else 'are'} missing" if missing else "all have come"
        return f"in {record.what}, number {record.number} of this group, where {who}"
    return ""


def report_text(
    diagnosis: Diagnosis, sightings: Sequence[Sighting], stacks: Mapping[int, str], limit_seconds: float
) -> str:
    """The whole message: who is missing, who waits for whom, stacks or what is known instead."""
    step = max((s.record.step for s in sightings if s.record is not None), default=-1)
    culprits = [sightings[rank] for rank in diagnosis.culprits]
    lines = [f"{_headline(diagnosis, culprits, sightings)} (step {step})"]
    lines += _waits(diagnosis, sightings)
    for culprit in culprits[:MOST_CULPRITS]:
        if not is_unreachable(culprit):
            lines += _stack(culprit, stacks.get(culprit.member.rank, ""))
    if len(culprits) > MOST_CULPRITS:
        lines.append(
            f"  and {len(culprits) - MOST_CULPRITS} more ranks: {_ranks([c.member.rank for c in culprits[MOST_CULPRITS:]])}"
        )
    lines.append(f"All ranks are ended; what is saved stays. (--hang-timeout-seconds {limit_seconds:g})")
    return "\n".join(lines)


def silent_hosts(sightings: Sequence[Sighting]) -> str:
    """Whole hosts from which nothing comes any more, and who says so; "" if some ranks of theirs answer."""
    silent = [s.member for s in sightings if is_unreachable(s)]
    answering = [s.member for s in sightings if not is_unreachable(s)]
    hosts, others = (list(dict.fromkeys(member.host for member in some)) for some in (silent, answering))
    if not hosts or set(hosts) & set(others):
        return ""
    ranks = _ranks([member.rank for member in silent])
    seen_from = (
        f"seen from {_listed(others)}" if len(others) <= MOST_CULPRITS else f"seen from {len(others)} other hosts"
    )
    if len(hosts) == 1:
        return f"nothing comes any more from host {hosts[0]} ({ranks}), {seen_from}: it is down or cut off, or its ranks are stopped"
    if len(others) == 1:
        return (
            f"nothing comes any more from any other host ({_listed(hosts)}; {ranks}), {seen_from}: the network of {others[0]} is cut, or "
            "they are down"
        )
    return f"nothing comes any more from hosts {_listed(hosts)} ({ranks}), {seen_from}: they are down or cut off, or their ranks are stopped"


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names if len(names) <= 6 else [*names[:5], f"... ({len(names)} in all)"])


def _headline(diagnosis: Diagnosis, culprits: Sequence[Sighting], sightings: Sequence[Sighting]) -> str:
    names = "; ".join(f"{c.member} on {c.member.host}, process {c.member.pid}" for c in culprits[:MOST_CULPRITS])
    if diagnosis.fault is Fault.MISMATCH:
        return f"training hangs: ranks wait for each other, in operations that do not belong together: {names}"
    if diagnosis.fault is Fault.NO_END:
        return f"training hangs: all ranks of a group have come and the operation does not end (the network, or the backend): {names}"
    if diagnosis.fault is Fault.SILENT and (hosts := silent_hosts(sightings)):
        return f"training hangs: {hosts}"
    first = culprits[0]
    state = {
        Fault.GONE: "its process has ended without a word (kill -9, or the system ran out of memory)",
        Fault.SILENT: "it does not answer: native code holds Python's lock, or its host is down or cut off",
        Fault.LEFT: "it has left the run",
    }.get(diagnosis.fault, "")
    if diagnosis.fault is Fault.STOPPED:
        state = f"{first.process}"
    what = "" if first.record is None else f"{doing(first.record) or 'between phases'} for {first.age_seconds:.1f} s"
    told = ", ".join(part for part in (what, state) if part)
    return f"training hangs on {names}: {told}"


def _waits(diagnosis: Diagnosis, sightings: Sequence[Sighting]) -> list[str]:
    """One line a rank that waits, nearest to the culprit first: those that wait for it directly, then those that wait for these."""
    cannot = diagnosis.culprits if diagnosis.fault not in (Fault.MISMATCH, Fault.NO_END) else ()
    ranks = [rank for rank in diagnosis.edges if rank not in cannot]
    ranks.sort(key=lambda rank: (len(diagnosis.chain(rank)) == 1, len(diagnosis.chain(rank)), rank))
    lines = []
    for rank in ranks[:MOST_WAITS]:
        sighting = sightings[rank]
        assert sighting.record is not None
        waits = waiting(sighting.record, diagnosis.edges[rank])
        where = f", {what}," if (what := doing(sighting.record)) else ""
        lines.append(f"  {sighting.member}{where} waits {sighting.age_seconds:.1f} s {waits}")
    if len(ranks) > MOST_WAITS:
        lines.append(f"  and {len(ranks) - MOST_WAITS} more ranks wait, directly or not, for these")
    return lines


def _stack(culprit: Sighting, stack: str) -> list[str]:
    if stack:
        return [
            f"  stack of rank {culprit.member.rank}, innermost last:",
            *(f"    {line}" for line in stack.splitlines()),
        ]
    if culprit.process is None:
        return [f"  no stack of rank {culprit.member.rank}: nothing comes from {culprit.member.host}"]
    return [f"  no stack of rank {culprit.member.rank}: {culprit.process}"]


def _ranks(ranks: Sequence[int]) -> str:
    shown = [str(rank) for rank in ranks]
    listed = ", ".join(shown if len(shown) <= 6 else [*shown[:5], f"... ({len(shown)} in all)"])
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {listed}"


def summary(name: str, sightings: Sequence[Sighting]) -> str:
    """One line above the table."""
    counts = {
        "alive": sum(s.process is not None and not s.process.has_ended and not s.has_left for s in sightings),
        "stopped": sum(s.is_stopped for s in sightings),
        "gone": sum(s.is_gone for s in sightings),
        "left": sum(s.has_left for s in sightings),
        "on other hosts": sum(s.process is None and not s.has_left for s in sightings),
    }
    told = ", ".join(f"{count} {word}" for word, count in counts.items() if count)
    return f"{name}: {len(sightings)} rank{'s' if len(sightings) > 1 else ''}, {told}"


def table(sightings: Sequence[Sighting], edges: Mapping[int, Sequence[int]]) -> list[str]:
    """`megapipe status`: one line a rank. computes: seconds of the last whole step in which it neither waited nor read data."""
    rows = [("rank", "where", "step", "computes", "for", "does")]
    for sighting in sightings:
        member, record = sighting.member, sighting.record
        if record is None:
            rows.append(
                (
                    str(member.rank),
                    member.place,
                    "",
                    "",
                    "",
                    f"nothing is known of it (process {member.pid} on {member.host})",
                )
            )
            continue
        waits = waiting(record, edges.get(member.rank, ()))
        does = (
            ", ".join(part for part in (doing(record), f"waits {waits}" if waits else "") if part) or "between phases"
        )
        if sighting.is_gone or sighting.is_stopped:
            does += f"; {sighting.process}"
        step = str(record.step) if record.step >= 0 else ""
        rows.append((str(member.rank), member.place, step, _computing(sighting), seconds(sighting.age_seconds), does))
    rank, where, step_, computes, age = (max(len(row[column]) for row in rows) for column in range(5))
    return [
        f"{row[0]:>{rank}}  {row[1]:<{where}}  {row[2]:>{step_}}  {row[3]:>{computes}}  {row[4]:>{age}}  {row[5]}"
        for row in rows
    ]


def _computing(sighting: Sighting) -> str:
    snapshot = sighting.snapshot
    if snapshot is None or not snapshot.elapsed_ns:
        return ""
    return f"{snapshot.computing_ns / 1e9:.2f} of {snapshot.elapsed_ns / 1e9:.2f} s"


def seconds(value: float) -> str:
    """0.3 s, 14 s, 12 min, 3 h."""
    for limit, unit, divisor in ((10.0, "s", 1.0), (120.0, "s", 1.0), (7200.0, "min", 60.0)):
        if value < limit:
            return f"{value / divisor:.{1 if limit == 10.0 else 0}f} {unit}"
    return f"{value / 3600.0:.0f} h"
