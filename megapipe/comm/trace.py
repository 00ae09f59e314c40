"""A record of what ran when: collectives and messages here, actions in the engine. No tracer, no cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Any, NamedTuple, Protocol


class Event(NamedTuple):
    """Something with a start and an end. Nanoseconds of time.perf_counter_ns: one clock for all ranks of a machine."""

    name: str  # "replicas reduce_scatter", "boundary 1 activation", "2F0"
    kind: str  # 'collective', 'send', 'receive' from launch to completion; 'wait' while a rank stands still; 'action'; 'phase'
    start_ns: int
    end_ns: int


class MomentClock(Protocol):
    """pipeline.device_clock.EventClock: moments in streams, whose times are known later."""

    def mark(self, stream: Any = None) -> int: ...
    def time_of(self, moment: int) -> int: ...


@dataclass
class Tracer:
    """Events in the order in which they ended.

    A collective ends when the backend says so, where it does (gloo's all-reduce and all-gather), else when its wait returns. On a GPU
    these are times of the host: a wait there only orders streams. Actions, phases and waits for messages get true times in one of two ways.
    settle (torch.cuda.synchronize): called before every reading of the clock, at the price of all overlap. clock: notes moments in the
    streams, which `read` turns into times once they have come.
    """

    events: list[Event] = field(default_factory=list)
    settle: Callable[[], None] | None = None
    clock: MomentClock | None = None

    def now(self, stream: Any = None) -> int:
        """Nanoseconds, for starts and ends of actions. stream: of a GPU, on which the moment comes; None for the current one."""
        if self.settle is not None:
            self.settle()
        return perf_counter_ns() if self.clock is None else self.clock.mark(stream)

    def read(self) -> None:
        """Give all events the times of the device; waits for the last of them. Nothing to do without a clock."""
        if self.clock is not None:
            time_of = self.clock.time_of
            self.events[:] = [
                event._replace(start_ns=time_of(event.start_ns), end_ns=time_of(event.end_ns)) for event in self.events
            ]

    def event(self, name: str, kind: str, start_ns: int, end_ns: int | None = None) -> None:
        """Record one event; it ends now unless end_ns is given. May be called from a backend's thread."""
        self.events.append(Event(name, kind, start_ns, perf_counter_ns() if end_ns is None else end_ns))

    def of_kind(self, *kinds: str) -> list[Event]:
        """The events of some kinds, by start."""
        return sorted((event for event in self.events if event.kind in kinds), key=lambda event: event.start_ns)

    @contextmanager
    def aside(self, first: int) -> Iterator[list[Event]]:
        """Inside the block `events` ends before event number `first`; the later ones, given to the block, come back after it, even if it
        clears the others."""
        later = self.events[first:]
        del self.events[first:]
        try:
            yield later
        finally:
            self.events.extend(later)

    def clear(self) -> None:
        """Forget all events."""
        self.events.clear()
