"""The meeting of a job's ranks at a store: who has come, what a process knows to be wrong, and whether all agree on the
facts of the run; if not, which ranks differ.

Keys of the store; each start has its own prefix:

megapipe start          rank 0's `Opening`: the name of the start, its world size, what ranks look up in folders
rank R                  counts the processes that come as rank R
process R               who that is, with the digest of its facts
arrived                 counts the places that are filled
failures, failure N     what a process cannot start with
answer TOKEN            rank 0's answer to one process: go, details (send your facts) or verdict
details R               the facts of a rank, asked of one rank of each digest and only if digests differ
verdict                 why the ranks do not start
left                    counts those that have read it

A rank makes about seven requests and sends about 300 bytes, however large the world is. torchrun's agents keep one
store across restarts (torch 2.13: with a static rendezvous, always; with c10d, as long as its store lives), so a rank
can find the opening of an earlier start; it gets no answer there and reads again. Counting restarts does not help: each
agent has its own count, which leaves out the restarts that a joining node causes.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta

import torch.distributed as dist

from megapipe.errors import CommunicationError, DisagreementError
from megapipe.formatting import count_text, ranges_text
from megapipe.monitor.process import process_space, process_state

START_KEY = "megapipe start"
POLL_SECONDS = 0.02
RANKS_PER_POLL_SECOND = 8192  # a rank polls at most this often per second and rank of the world
RANKS_PER_REQUEST = 1024
QUIET_SECONDS = 5.0  # after a failure, without another arrival, rank 0 answers those who have come
REFUSED_SECONDS = 60.0  # the same where rank 0 itself cannot start
VERDICT_SECONDS = 5.0  # for rank 0 to reach its own time limit, and for the others to read its verdict
MOST_FAILURES, MOST_SIDES = 16, 8  # that are looked at
MOST_MISSING = 16  # hosts named of ranks that came
GO, DETAILS, VERDICT = "go", "details", "verdict"

Notes = Mapping[str, str]  # what rank 0 has written or found in folders, for the others to look up
MOST_KEYS, MOST_VALUES = 8, 4  # listed one by one
MOST_CHARACTERS = 300  # of a value


@dataclass(frozen=True)
class Process:
    """A process that joins the meeting."""

    rank: int | None  # None if it does not know
    world_size: int
    host: str
    pid: int
    ticks: int | None
    space: str = field(default_factory=process_space)  # of its process id
    place: str = ""  # node and local rank, which no other process may have
    device: str = ""  # the same of its GPU; "" if it may be shared

    def __str__(self) -> str:
        known = "a process that knows no rank" if self.rank is None else f"rank {self.rank}"
        return f"{known} (process {self.pid} on {self.host})"

    def has_ended(self) -> bool:
        """Return True if this is known, from the same host."""
        return self.space == process_space() and process_state(self.pid, self.ticks).has_ended


@dataclass(frozen=True)
class Opening:
    """The announcement of rank 0."""

    start: str
    world_size: int
    where: str  # rank 0, for messages
    notes: Notes


@dataclass(frozen=True)
class Arrival:
    """A process at the meeting. text: why it cannot start, "" if it can."""

    process: Process
    token: str
    digest: str = ""
    text: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: bytes) -> Arrival:
        values = json.loads(text)
        return cls(**values | {"process": Process(**values["process"])})


def attend(store: dist.Store, own: Process, facts_of: FactsOf, timeout_seconds: float, text: str = "") -> dist.Store:
    """Meet rank 0 and return the store of this start, which no earlier one has written to. For all but rank 0.

    text: why this process cannot start. Raises DisagreementError with rank 0's verdict, CommunicationError at the time
    limit, RuntimeError (torch's) if the store is lost.
    """
    store.wait([START_KEY], timedelta(seconds=timeout_seconds))
    deadline = time.monotonic() + timeout_seconds
    opening, room, arrival = None, store, Arrival(own, "")
    facts: Facts = {}
    pause, longest = POLL_SECONDS, max(10 * POLL_SECONDS, own.world_size / RANKS_PER_POLL_SECOND)
    while time.monotonic() < deadline:
        newest = Opening(**json.loads(store.get(START_KEY)))
        if newest != opening:
            opening, pause = newest, POLL_SECONDS
            deadline = time.monotonic() + timeout_seconds + VERDICT_SECONDS
            room = dist.PrefixStore(f"megapipe {opening.start}", store)
            facts = {} if text else facts_of(opening.notes)
            arrival = _announce(room, opening, Arrival(own, secrets.token_hex(8), digest_of(facts), text))
        if room.check([f"answer {arrival.token}"]):
            answer = room.get(f"answer {arrival.token}").decode()
            if answer == GO:
                return room
            if answer == DETAILS:
                room.set(f"details {own.rank}", to_json(facts))
            kind, text = json.loads(room.get("verdict"))
            room.add("left", 1)
            raise (DisagreementError if kind == DisagreementError.__name__ else CommunicationError)(text)
        time.sleep(pause)
        pause = min(2 * pause, longest)
    raise CommunicationError(f"rank 0 did not answer {own} within {timeout_seconds:g} s")


def _announce(room: dist.Store, opening: Opening, arrival: Arrival) -> Arrival:
    """Report to rank 0 that this process has arrived, or why it cannot start; return the report."""
    own, text, taken = arrival.process, arrival.text, 0
    fills = own.world_size == opening.world_size and own.rank != 0  # one of the places that rank 0 waits for
    if not text and not fills:
        text = f"it was started with WORLD_SIZE {own.world_size}, but {opening.where} with {opening.world_size}"
    if not text:
        taken = room.add(f"rank {own.rank}", 1) - 1
        other = Arrival.from_json(room.get(f"process {own.rank}")).process if taken else own
        if taken and not other.has_ended():  # else it was started again
            text, fills = f"its rank is taken by process {other.pid} on {other.host}", False
    arrival = Arrival(own, arrival.token, arrival.digest, text)
    if text:
        room.set(f"failure {room.add('failures', 1)}", arrival.to_json())
    else:
        room.set(f"process {own.rank}", arrival.to_json())
    if fills and not (taken and not text):
        room.add("arrived", 1)  # last: rank 0 looks for failures after it has counted
    return arrival


def chair(
    store: dist.Store, own: Process, facts: Facts, notes: Notes, timeout_seconds: float, text: str = ""
) -> dist.Store:
    """Meet all other ranks, compare them and answer; return the store of this start. For rank 0.

    text: why this process cannot start. Raises DisagreementError, or CommunicationError if ranks do not come.
    """
    opening = Opening(secrets.token_hex(8), own.world_size, str(own), notes)
    room = dist.PrefixStore(f"megapipe {opening.start}", store)
    mine = Arrival(own, secrets.token_hex(8), digest_of(facts), text)
    room.add("rank 0", 1)
    room.set("process 0", mine.to_json())
    room.add("arrived", 1)
    store.set(START_KEY, json.dumps(asdict(opening)))
    num_failures = _await(store, room, opening, timeout_seconds, bool(text))
    arrivals: list[Arrival] = []  # of the ranks that can start
    for first in range(0, own.world_size, RANKS_PER_REQUEST):
        keys = [f"process {rank}" for rank in range(first, min(own.world_size, first + RANKS_PER_REQUEST))]
        if not room.check(keys):
            keys = [key for key in keys if room.check([key])]
        arrivals += map(Arrival.from_json, _get(room, keys))
    failed = [Arrival.from_json(room.get(f"failure {n}")) for n in range(1, min(num_failures, MOST_FAILURES) + 1)]
    if text:
        failed.insert(0, mine)
    reason, asked = _reason(arrivals, failed, num_failures + bool(text), own.world_size, timeout_seconds)
    others = [one for one in [*arrivals, *failed] if one.token != mine.token]
    if not reason and not asked:
        _answer(room, others, GO)
        return room
    error: type[Exception] = DisagreementError if failed or len(arrivals) == own.world_size else CommunicationError
    if asked:
        _answer(room, [arrival for arrival, _ in asked if arrival.process.rank], DETAILS)
        sides = [_side(room, arrival, ranks, facts) for arrival, ranks in asked]
        reason = disagreement(sides, own.world_size)
    room.set("verdict", json.dumps([error.__name__, reason]))
    told = {arrival.token for arrival, _ in asked}
    _answer(room, [arrival for arrival in others if arrival.token not in told], VERDICT)
    deadline = time.monotonic() + VERDICT_SECONDS
    while room.add("left", 0) < len(others) and time.monotonic() < deadline:  # the store ends with this process
        time.sleep(POLL_SECONDS)
    raise error(reason)


def _await(store: dist.Store, room: dist.Store, opening: Opening, timeout_seconds: float, is_refused: bool) -> int:
    """Wait until all places are filled, or after a failure no other rank arrives, or for the time limit.

    Returns the number of failures. Raises CommunicationError if another process has taken rank 0.
    """
    now = time.monotonic()
    deadline, quiet = now + timeout_seconds, REFUSED_SECONDS if is_refused else QUIET_SECONDS
    seen, since, pause = (0, 0), now, POLL_SECONDS
    while True:
        found = room.add("arrived", 0), room.add("failures", 0)
        now = time.monotonic()
        if found != seen:
            seen, since = found, now
        arrived, failures = found
        fails = bool(failures) or is_refused
        if arrived >= opening.world_size or now >= deadline or (fails and now >= since + quiet):
            return failures
        if Opening(**json.loads(store.get(START_KEY))).start != opening.start:
            raise CommunicationError(
                "another process has started as rank 0 of this job: it takes the place of this one"
            )
        time.sleep(pause)
        pause = min(2 * pause, 10 * POLL_SECONDS)


def _reason(
    arrivals: Sequence[Arrival],
    failed: Sequence[Arrival],
    num_failures: int,
    world_size: int,
    timeout_seconds: float,
) -> tuple[str, list[tuple[Arrival, tuple[int, ...]]]]:
    """Return why the ranks cannot start, or of each digest one rank with all that have it, to be asked; or nothing."""
    if failed:
        by_text: dict[str, list[Arrival]] = {}
        for one in failed:
            by_text.setdefault(one.text, []).append(one)
        lines = [
            f"{who[0].process}{f' and {len(who) - 1} more' if len(who) > 1 else ''}: {text}"
            for text, who in by_text.items()
        ]
        if num_failures > len(failed):
            lines.append(f"and {num_failures - len(failed)} more processes")
        return "\n  ".join(["some ranks cannot start, so none does:", *lines]), []
    came = [arrival.process.rank or 0 for arrival in arrivals]
    if len(came) < world_size:
        return _missing(arrivals, came, world_size, timeout_seconds), []
    for what in ("place", "device"):
        holders: dict[str, Process] = {}
        for process in (arrival.process for arrival in arrivals):
            held = getattr(process, what)
            if held and held in holders:
                return f"{holders[held]} and {process} are both on {held}; {WAYS_OUT[what]}", []
            holders[held] = process
    by_digest: dict[str, list[Arrival]] = {}
    for arrival in arrivals:
        by_digest.setdefault(arrival.digest, []).append(arrival)
    if len(by_digest) == 1:
        return "", []
    largest_first = sorted(by_digest.values(), key=len, reverse=True)
    asked = largest_first[:1] + largest_first[1:][-(MOST_SIDES - 1) :]  # the majority and the smallest minorities
    return "", [(group[0], tuple(one.process.rank or 0 for one in group)) for group in asked]


WAYS_OUT = {
    "place": "their launcher must give each process of a node another LOCAL_RANK",
    "device": "start at most one rank per GPU, let ranks share GPUs with --ranks-per-gpu or --distributed-backend gloo "
    "(slow, for tests), or use --device cpu",
}


def _missing(arrivals: Sequence[Arrival], came: Sequence[int], world_size: int, timeout_seconds: float) -> str:
    missing = sorted(set(range(world_size)) - set(came))
    noun, came_noun = ("rank" if len(ranks) == 1 else "ranks" for ranks in (missing, came))
    hosts = list(dict.fromkeys(arrival.process.host for arrival in arrivals))
    listed = ", ".join(hosts[:MOST_MISSING]) + (
        f" and {len(hosts) - MOST_MISSING} more" if hosts[MOST_MISSING:] else ""
    )
    return (
        f"{noun} {ranges_text(missing)} did not arrive within {timeout_seconds:g} s; {came_noun} {ranges_text(came)} "
        f"did, from {listed}. A missing process was not started, has ended, or was given another MASTER_ADDR, "
        "MASTER_PORT or RANK (--distributed-timeout-minutes waits longer)"
    )


def _side(room: dist.Store, arrival: Arrival, ranks: tuple[int, ...], own: Facts) -> Side:
    rank = arrival.process.rank
    return Side(ranks, arrival.process.host, from_json(room.get(f"details {rank}")) if rank else own)


def _answer(room: dist.Store, arrivals: Sequence[Arrival], answer: str) -> None:
    keys = [f"answer {arrival.token}" for arrival in arrivals]
    for first in range(0, len(keys), RANKS_PER_REQUEST):
        some = keys[first : first + RANKS_PER_REQUEST]
        if room.has_extended_api():  # type: ignore[attr-defined]  # missing in torch's stubs
            room.multi_set(some, [answer] * len(some))  # type: ignore[attr-defined]
        else:
            for key in some:
                room.set(key, answer)


def _get(room: dist.Store, keys: Sequence[str]) -> list[bytes]:
    if keys and room.has_extended_api():  # type: ignore[attr-defined]
        return list(room.multi_get(list(keys)))  # type: ignore[attr-defined]
    return [room.get(key) for key in keys]


@dataclass(frozen=True)
class Fact:
    """One thing that must be the same on all ranks."""

    shown: str  # in a message
    compared: str | None = None  # None: what is shown

    @property
    def value(self) -> str:
        return self.shown if self.compared is None else self.compared


Facts = Mapping[str, Fact]  # by flag or name
FactsOf = Callable[[Notes], Facts]


@dataclass(frozen=True)
class Side:
    """Ranks whose facts have one digest."""

    ranks: tuple[int, ...]  # ascending
    host: str  # of the first of them
    facts: Facts


def digest_of(facts: Facts) -> str:
    """Return a digest of what is compared."""
    values = {key: fact.value for key, fact in facts.items()}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:32]


def to_json(facts: Facts) -> str:
    return json.dumps({key: [fact.shown, fact.compared] for key, fact in facts.items()})


def from_json(text: str | bytes) -> dict[str, Fact]:
    return {key: Fact(*values) for key, values in json.loads(text).items()}


def disagreement(sides: Sequence[Side], world_size: int) -> str:
    """Return the message that names, for each key that differs, ranks, host and values, the minority first."""
    keys = list(dict.fromkeys(key for side in sides for key in side.facts))
    lines = [line for key in keys if (line := _difference(key, sides))]
    compared = sum(len(side.ranks) for side in sides)
    if len(lines) > MOST_KEYS:
        lines[MOST_KEYS:] = [f"and {len(lines) - MOST_KEYS} more"]
    if compared < world_size:
        lines.append(f"{count_text(world_size - compared, 'more rank')} differ in other ways")
    return "\n  ".join(
        [
            "the ranks disagree, so nothing was started:",
            *lines,
            "Give all ranks the same flags, files and versions (what may differ: docs/reliability.md)",
        ]
    )


def _difference(key: str, sides: Sequence[Side]) -> str:
    """Return the line of one key, "" if all have the same value."""
    by_value: dict[str | None, list[Side]] = {}
    for side in sides:
        fact = side.facts.get(key)
        by_value.setdefault(None if fact is None else fact.value, []).append(side)
    if len(by_value) == 1:
        return ""
    sizes = {value: sum(len(side.ranks) for side in of_value) for value, of_value in by_value.items()}
    fewest_first = sorted(by_value, key=lambda value: (sizes[value], by_value[value][0].ranks))
    texts = []
    for value in fewest_first[: MOST_VALUES - 1] + fewest_first[MOST_VALUES - 1 :][-1:]:
        of_value = by_value[value]
        ranks = sorted(rank for side in of_value for rank in side.ranks)
        first = min(of_value, key=lambda side: side.ranks)
        fact = first.facts.get(key)
        shown = "unset" if fact is None else fact.shown
        noun = "rank" if len(ranks) == 1 else "ranks"
        where = first.host if len(ranks) == 1 else f"the first on {first.host}"
        texts.append(f"{shown[:MOST_CHARACTERS]} on {noun} {ranges_text(ranks)} ({where})")
    return f"{key}: {', but '.join(texts)}"
