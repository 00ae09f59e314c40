"""`timed`: how much each launch of a rank's log adds to its step, by a simulation of the queues with given durations.

Kernels of all streams share the device, one after another; each communicator has a queue of its own beside it. What a
collective adds is the time for which the device is idle because a stream waits for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from megapipe.extras.streams.order import COMMUNICATOR, HOST, Launched, Mark, Wait, queues_of


class _Moment(NamedTuple):
    """A time in a queue, and the position of the collective that ended then, if one did."""

    seconds: float = 0.0
    cause: int | None = None


def timed(log: Iterable[Any], seconds: Callable[[Any], float]) -> list[tuple[Any, float]]:
    """Return each launch with the seconds that it adds: of a kernel its own, of a collective those that nothing hides.

    log: launches (with a `queue`), Mark and Wait. A wait for an event without a mark does nothing.
    """
    entries = list(log)
    simulated = _Simulation(entries, seconds)
    while simulated.run_kernel():
        pass
    return [(each, simulated.added[at]) for at, each in enumerate(entries) if not isinstance(each, Mark | Wait)]


class _Simulation:
    """The queues of a rank and how far each has run."""

    def __init__(self, entries: list[Any], seconds: Callable[[Any], float]) -> None:
        self.added = [0.0] * len(entries)
        self._seconds, self._queues = seconds, queues_of(entries)
        self._clocks = dict.fromkeys(self._queues, _Moment())
        self._marked: dict[int, _Moment] = {}
        self._host = [_Moment()]  # after each of its waits
        self._free = 0.0  # when the device is

    def run_kernel(self) -> bool:
        """Run what needs no device, then the kernel that can start first. Returns False if there is none."""
        while any(self._advance(name) for name in self._queues):
            pass
        heads = ((name, queue[0]) for name, queue in self._queues.items() if queue)
        kernels = [
            (self._start(name, head), head.position, name)
            for name, head in heads
            if head.host_waits < len(self._host) and not isinstance(head.entry, Wait)
        ]
        if not kernels:
            return False
        start, position, name = min(kernels, key=lambda each: (max(each[0].seconds, self._free), each[1]))
        if start.cause is not None:
            self.added[start.cause] += max(0.0, start.seconds - self._free)
        self.added[position] = self._seconds(self._queues[name].popleft().entry)
        self._free = max(self._free, start.seconds) + self.added[position]
        self._clocks[name] = _Moment(self._free)
        return True

    def _start(self, name: str, launched: Launched) -> _Moment:
        return max(self._clocks[name], self._host[launched.host_waits], key=lambda moment: moment.seconds)

    def _advance(self, name: str) -> bool:
        """Run a queue until a kernel, or a wait for what has not ended. Returns False if nothing ran."""
        queue, has_run = self._queues[name], False
        while queue and queue[0].host_waits < len(self._host):
            entry, position, start = queue[0].entry, queue[0].position, self._start(name, queue[0])
            if isinstance(entry, Wait):
                if (mark := queue[0].marks[0]) not in self._marked:
                    break
                start = max(start, self._marked[mark], key=lambda moment: moment.seconds)
                self._host += [start] * (name == HOST)
            elif isinstance(entry, Mark):
                self._marked[position] = start
            elif name.startswith(COMMUNICATOR):
                start = _Moment(start.seconds + self._seconds(entry), position)
            elif name != HOST:
                break
            self._clocks[name] = start
            queue.popleft()
            has_run = True
        return has_run
