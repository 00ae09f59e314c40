"""Moments of a device's work in nanoseconds of the host's clock: `HostClock` where the host computes, `EventClock` on a GPU.

On a GPU a moment is an event in a stream: the device writes the time down when it comes there, and nobody waits until the times are asked
for. So what is timed runs as it does untimed. `device_clock` makes the one that a device has. EventClock has not run on a GPU so far.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter_ns
from typing import Any, Protocol

import torch

from megapipe.profile.clock import Clock, Reading, RoundTrip, reading

READINGS = 8  # of host and device, of which the closest counts


class DeviceClock(Protocol):
    """Moments are ints: as numbers, nanoseconds of the host's clock when they were asked for."""

    def mark(self, stream: Any = None) -> int:
        """The moment at which all that was launched on the stream, the current one if None, is done."""

    def seconds(self, begin: int, end: int) -> float:
        """Between two moments; waits until they have come."""


class HostClock:
    """What was launched is done."""

    def mark(self, stream: Any = None) -> int:
        return perf_counter_ns()

    def seconds(self, begin: int, end: int) -> float:
        return (end - begin) / 1e9


class Mark(int):
    """A moment in a stream of a GPU. As a number: when the host asked for it."""

    event: Any

    def __new__(cls, asked_ns: int, event: Any) -> Mark:
        mark = super().__new__(cls, asked_ns)
        mark.event = event
        return mark


class EventClock:
    """Times of events on the host's clock `now`.

    `begin` and `end` read the two clocks side by side: an event that the host records and waits for lies between two readings of the host's
    clock, and the shortest such trip gives the offset, as with another rank's clock (Cristian 1989). Times between the two readings lie on
    the line through both, which takes the drift out. Since CUDA tells the time between two events in fp32 milliseconds, begin anew for
    every step: after a second the last digit is some 60 ns, after an hour a quarter of a millisecond. One thread at a time.
    """

    def __init__(self, device: torch.device, cuda: Any = torch.cuda, now: Callable[[], int] = perf_counter_ns) -> None:
        self._device, self._cuda, self._now = device, cuda, now
        self._base: Any = None
        self._clock = Clock()

    @property
    def error_ns(self) -> int:
        """The most that a time can be wrong by on the host's clock."""
        return self._clock.error_ns

    @property
    def is_stopped(self) -> bool:
        """The current stream is being recorded as a CUDA graph: what is launched does not run, and a moment would never come."""
        return bool(self._cuda.is_current_stream_capturing())

    def mark(self, stream: Any = None) -> Mark:
        event = self._cuda.Event(enable_timing=True)
        event.record(self._cuda.current_stream(self._device) if stream is None else stream)
        return Mark(self._now(), event)

    def seconds(self, begin: int, end: int) -> float:
        return self._nanoseconds(_event(begin), _event(end)) / 1e9

    def begin(self) -> None:
        """From here on times can be told. Waits for the current stream, no other."""
        self._base = self.mark().event
        self._clock = Clock(self._reading())

    def end(self) -> None:
        """Waits for the current stream."""
        self._clock = Clock(self._clock.before, self._reading())

    def time_of(self, moment: int) -> int:
        """Nanoseconds of the host's clock; waits until the moment has come. What is no Mark is such a time already."""
        if not isinstance(moment, Mark):
            return moment
        return self._clock.to_here(self._nanoseconds(self._base, moment.event))

    def _reading(self) -> Reading:
        trips = []
        for _ in range(READINGS + 1):
            sent = self._now()
            event = self.mark().event
            event.synchronize()
            trips.append((sent, event, self._now()))
        # the first may have waited for what was launched before it
        return reading([RoundTrip(sent, self._nanoseconds(self._base, event), back) for sent, event, back in trips[1:]])

    def _nanoseconds(self, begin: Any, end: Any) -> int:
        for event in (begin, end):
            event.synchronize()
        return round(begin.elapsed_time(end) * 1e6)  # tells milliseconds


def _event(moment: int) -> Any:
    if not isinstance(moment, Mark):
        raise TypeError(f"{moment} is a time of the host, and the time between moments of a stream was asked for")
    return moment.event


def device_clock(device: torch.device) -> DeviceClock:
    """For times between moments; `begin` of an EventClock is not called."""
    return EventClock(device) if device.type == "cuda" else HostClock()
