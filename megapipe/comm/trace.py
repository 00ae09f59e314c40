"""A record of what ran when: collectives and messages here, actions in the engine. No tracer, no cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import NamedTuple


class Event(NamedTuple):
    """Something with a start and an end. Nanoseconds of time.perf_counter_ns: one clock for all ranks of a machine."""

    name: str  # "replicas reduce_scatter", "boundary 1 activation", "2F0"
    kind: str  # 'collective', 'send', 'receive' from launch to completion; 'wait' while a rank stands still; 'action'; 'phase'
    start_ns: int
    end_ns: int


@dataclass
class Tracer:
    """Events in the order in which they ended.

    A collective ends when the backend says so, where it does (gloo's all-reduce and all-gather), else when its wait returns. On a GPU
    these are times of the host: a wait there only orders streams. settle: called before every reading of an action's clock, so that there
    actions get true times (torch.cuda.synchronize), at the price of all overlap.
    """

    events: list[Event] = field(default_factory=list)
    settle: Callable[[], None] | None = None

    def now(self) -> int:
        """Nanoseconds, for starts and ends of actions."""
        if self.settle is not None:
            self.settle()
        return perf_counter_ns()

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
