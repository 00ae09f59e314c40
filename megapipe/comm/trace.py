"""A record of what ran when: collectives and messages here, actions in the pipeline engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Any, NamedTuple, Protocol


class Event(NamedTuple):
    """A named interval in nanoseconds of time.perf_counter_ns, which all ranks of a machine share."""

    name: str  # "replicas reduce_scatter", "boundary 1 activation", "2F0"
    # 'collective', 'send', 'receive': launch to completion; 'wait': while a rank is blocked; 'action'; 'phase'; 'row'
    kind: str
    start_ns: int
    end_ns: int


class MomentClock(Protocol):
    """gpu.device_clock.EventClock: marks in CUDA streams, whose times are known later."""

    def mark(self, stream: Any = None) -> int: ...
    def time_of(self, moment: int) -> int: ...


@dataclass
class Tracer:
    """Events in the order in which they ended.

    A collective ends when the backend reports it, where it does (gloo's all-reduce and all-gather), else when its wait
    returns. On a GPU these are host times, because a wait only orders streams. Actions, phases and waits for messages
    get true device times in one of two ways:
    settle (torch.cuda.synchronize) is called before every reading of the clock, which costs all overlap;
    clock marks moments in the streams, which `read` converts to times once the streams have reached them.
    """

    events: list[Event] = field(default_factory=list)
    settle: Callable[[], None] | None = None
    clock: MomentClock | None = None

    def now(self, stream: Any = None) -> int:
        """Return the start or end of an action in nanoseconds. stream: the CUDA stream to mark, or the current."""
        if self.settle is not None:
            self.settle()
        return perf_counter_ns() if self.clock is None else self.clock.mark(stream)

    def read(self) -> None:
        """Replace the marks of a clock in all events by device times, waiting for the last of them."""
        if self.clock is not None:
            time_of = self.clock.time_of
            self.events[:] = [
                event._replace(start_ns=time_of(event.start_ns), end_ns=time_of(event.end_ns)) for event in self.events
            ]

    def event(self, name: str, kind: str, start_ns: int, end_ns: int | None = None) -> None:
        """Record one event, which ends now unless end_ns is given. May be called from a backend's thread."""
        self.events.append(Event(name, kind, start_ns, perf_counter_ns() if end_ns is None else end_ns))

    def of_kind(self, *kinds: str) -> list[Event]:
        """Return the events of these kinds, sorted by start."""
        return sorted((event for event in self.events if event.kind in kinds), key=lambda event: event.start_ns)
