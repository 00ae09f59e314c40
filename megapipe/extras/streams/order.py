"""`find_races`: accesses to one memory that the streams, events and messages of a run leave unordered.
`computed_meanwhile`: what is launched between a collective and the wait for it.

A log is what one rank did, in the order in which its host did it. A queue is a stream, the internal stream of an NCCL
communicator, or HOST. Work of a queue runs in order, and after everything that the host had waited for when it was
launched. A `Wait` orders a queue after a `Mark`, as an event does. A receive is ordered after the send that it matches,
on another rank; no other order between ranks is used, so a run may not depend on one.

Vector clocks as in FastTrack (Flanagan & Freund 2009): entry q of a queue's clock is the number of operations of queue
q that are complete before its next operation begins.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

HOST, COMMUNICATOR = "host", "NCCL's stream of "
PRODUCTS = ("mm ", "addmm ", "addmm_ ", "bmm ", "baddbmm ", "_scaled_mm ", "_grouped_mm ", "_scaled_dot_product_")
Span = tuple[int, int, int]  # (storage, first byte, byte after the last)


class Operation(NamedTuple):
    """Work launched on a queue. sends, receives: the message that it is an end of, if any."""

    queue: str
    place: str
    reads: tuple[Span, ...] = ()
    writes: tuple[Span, ...] = ()
    sends: str | None = None
    receives: str | None = None


class Mark(NamedTuple):
    """An event recorded in a queue."""

    event: str
    queue: str


class Wait(NamedTuple):
    """The queue's later work waits for the event's last mark; on HOST, the host does."""

    queue: str
    event: str


class Free(NamedTuple):
    """From now on, work of `queue`, on which the storage was allocated, may use its memory for other tensors.

    after: events for which the allocator waits first, of the queues named to record_stream. No later entry has the
    storage's number.
    """

    storage: int
    queue: str
    place: str
    after: tuple[str, ...] = ()


Entry = Operation | Mark | Wait | Free
Clock = dict[str, int]


class Access(NamedTuple):
    """One operation's access to bytes of a storage."""

    first: int
    stop: int
    writes: bool
    queue: str
    number: int  # of the operation on its queue
    position: int  # in the log
    place: str

    def __str__(self) -> str:
        return f"{'write' if self.writes else 'read'} on {self.queue} by {self.place}"


class Race(NamedTuple):
    """Two unordered accesses, as text."""

    earlier: str
    later: str

    def __str__(self) -> str:
        return f"{self.earlier}  <->  {self.later}"


class NeverBeginsError(ValueError):
    """Work that never begins: a receive without a send, or ranks that wait for each other."""


def find_races(logs: Sequence[Iterable[Entry]]) -> list[Race]:
    """Return the races of all ranks' logs, each pair of places once.

    Raises NeverBeginsError.
    """
    sent: dict[str, Clock] = {}
    ranks = [_Rank(f"{rank} ", log, sent) for rank, log in enumerate(logs)]
    while sum(rank.advance() for rank in ranks):
        pass
    stuck = [f"rank {rank.name}{queue[0].entry}" for rank in ranks for queue in rank.queues.values() if queue]
    if stuck:
        raise NeverBeginsError(f"never begins: {'; '.join(stuck)}")
    return list(dict.fromkeys(race for rank in ranks for race in rank.races))


def computed_meanwhile(log: Iterable[Entry]) -> dict[str, list[int]]:
    """Return, for each place that launches collectives or messages, the products between each launch and its wait.

    The end of one is the mark that follows it on its queue; what is never waited for is left out.
    """
    launched: dict[str, tuple[str, int]] = {}  # queue of a communicator -> place, products before the launch
    ends: dict[str, tuple[str, int]] = {}  # the same by the event of its end
    found: dict[str, list[int]] = {}
    products = 0
    for entry in log:
        if isinstance(entry, Operation) and entry.queue.startswith(COMMUNICATOR):
            launched[entry.queue] = entry.place, products
        elif isinstance(entry, Operation):
            products += entry.place.startswith(PRODUCTS)
        elif isinstance(entry, Mark) and entry.queue in launched:
            ends[entry.event] = launched.pop(entry.queue)
        elif isinstance(entry, Wait) and entry.event in ends:
            place, before = ends.pop(entry.event)
            found.setdefault(place, []).append(products - before)
    return found


class Launched(NamedTuple):
    """An entry in its queue. What the host had done before: its number of operations and of waits."""

    entry: Any  # an Entry
    position: int  # in the log
    host_operations: int
    host_waits: int
    marks: tuple[int, ...]  # the position of a Mark, or of those that a Wait or Free is for


def queues_of(log: Iterable[Any]) -> dict[str, deque[Launched]]:
    """Return the entries of a log by queue, without waits for events that have no mark: these do nothing."""
    queues: dict[str, deque[Launched]] = {}
    latest: dict[str, int] = {}  # event -> its last mark
    operations = waits = 0
    for position, entry in enumerate(log):
        if isinstance(entry, Mark):
            latest[entry.event] = position
        elif isinstance(entry, Wait) and entry.event not in latest:
            continue
        events = (entry.event,) if isinstance(entry, Mark | Wait) else getattr(entry, "after", ())
        marks = tuple(latest[event] for event in events)
        queues.setdefault(entry.queue, deque()).append(Launched(entry, position, operations, waits, marks))
        if entry.queue == HOST:
            operations += isinstance(entry, Operation)
            waits += isinstance(entry, Wait)
    return queues


class _Rank:
    """One rank's queues, each run as far as events and messages allow."""

    def __init__(self, name: str, log: Iterable[Entry], sent: dict[str, Clock]) -> None:
        self.name = name
        self.races: list[Race] = []
        self._sent = sent  # by message, of all ranks
        self.queues = queues_of(log)
        self._clocks: dict[str, Clock] = {}  # by queue
        self._marks: dict[int, Clock] = {}
        self._host: list[Clock] = [{}]  # what the host knows after each of its waits
        self._frees: list[tuple[Launched, Clock]] = []  # until their events have happened
        self._accesses: dict[int, list[Access]] = {}  # by storage

    def advance(self) -> bool:
        """Run every queue until it has to wait. Returns False if nothing ran."""
        has_run = False
        for name, queue in self.queues.items():
            while queue and self._can_begin(queue[0]):
                self._run(name, queue.popleft())
                has_run = True
        for free, clock in [each for each in self._frees if self._are_marked(each[0].marks)]:
            self._frees.remove((free, clock))
            for mark in free.marks:
                _join(clock, self._marks[mark])
            self._reuse(free, clock)
        return has_run

    def _can_begin(self, launched: Launched) -> bool:
        entry = launched.entry
        host_operations = self._clocks.get(HOST, {}).get(self.name + HOST, 0)
        if launched.host_waits >= len(self._host) or launched.host_operations > host_operations:
            return False
        if isinstance(entry, Operation):
            return entry.receives is None or entry.receives in self._sent
        return not isinstance(entry, Wait) or self._are_marked(launched.marks)

    def _are_marked(self, marks: Iterable[int]) -> bool:
        return all(mark in self._marks for mark in marks)

    def _run(self, queue: str, launched: Launched) -> None:
        entry, clock, name = launched.entry, self._clocks.setdefault(queue, {}), self.name + queue
        if queue != HOST:
            _join(clock, self._host[launched.host_waits])
            clock[self.name + HOST] = launched.host_operations
        if isinstance(entry, Mark):
            self._marks[launched.position] = dict(clock)
        elif isinstance(entry, Wait):
            _join(clock, self._marks[launched.marks[0]])
            if queue == HOST:
                self._host.append(dict(clock))
        elif isinstance(entry, Free):
            clock[name] = clock.get(name, 0) + 1
            self._frees.append((launched, dict(clock)))
        else:
            self._operate(entry, launched.position, clock, name)

    def _reuse(self, launched: Launched, clock: Clock) -> None:
        free = launched.entry
        assert isinstance(free, Free)
        place = f"use of its memory for other tensors, after it was freed in {free.place}"
        number = clock[self.name + free.queue]
        self._access(free.storage, Access(0, sys.maxsize, True, free.queue, number, launched.position, place), clock)

    def _operate(self, operation: Operation, position: int, clock: Clock, name: str) -> None:
        if operation.receives is not None:
            _join(clock, self._sent[operation.receives])
        number = clock[name] = clock.get(name, 0) + 1
        for spans, writes in ((operation.reads, False), (operation.writes, True)):
            for storage, first, stop in spans:
                access = Access(first, stop, writes, operation.queue, number, position, operation.place)
                self._access(storage, access, clock)
        if operation.sends is not None:
            self._sent[operation.sends] = dict(clock)

    def _access(self, storage: int, new: Access, clock: Mapping[str, int]) -> None:
        kept = []
        for old in self._accesses.get(storage, ()):
            ordered = old.queue == new.queue or old.number <= clock.get(self.name + old.queue, 0)
            if not ordered and (old.writes or new.writes) and old.first < new.stop and new.first < old.stop:
                self.races.append(Race(*map(str, sorted((old, new), key=lambda access: access.position))))
            # whatever conflicts with an access that this one follows and covers conflicts with this one too
            if not (ordered and new.writes >= old.writes and new.first <= old.first and old.stop <= new.stop):
                kept.append(old)
        self._accesses[storage] = [*kept, new]


def _join(clock: Clock, other: Mapping[str, int]) -> None:
    for queue, number in other.items():
        if number > clock.get(queue, 0):
            clock[queue] = number
