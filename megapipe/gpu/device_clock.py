"""Times of a device's work in nanoseconds of the host's clock: `HostClock` for a CPU, `EventClock` for a GPU.

On a GPU a moment is an event in a stream, for which the host waits only when the time is read, so that timing does not
change how the work runs. EventClock has not yet run on a GPU. `Timers` sums the seconds of the phases of steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import perf_counter_ns
from typing import Any

import torch

from megapipe.comm.trace import Tracer
from megapipe.monitor.heartbeat import Heartbeat
from megapipe.profile.profile import Clock, ClockReading, RoundTrip, reading
from megapipe.schedule.action import Op, stage_action

PHASE_LEVEL, ACTION_LEVEL = 1, 2

ACTION_NAMES = {
    Op.F: "forward",
    Op.B: "backward",
    Op.I: "backward-input",
    Op.W: "backward-weight",
    Op.SEND_F: "send",
    Op.SEND_B: "send",
    Op.RECV_F: "post-receive",
    Op.RECV_B: "post-receive",
    Op.REDUCE_GRAD: "start-reduce",
    Op.UNSHARD: "start-gather",
    Op.RESHARD: "free-weights",
    Op.RECOMPUTE: "recompute",
    Op.OFFLOAD: "free-activations",
    Op.RELOAD: "start-reload",
    Op.OVERLAP: "start-pair",
    Op.UPDATE: "update",
    Op.NORM: "start-norm",
}
WAITING = "wait"  # for messages and parameters; not part of the forward or backward it happens in

READINGS = 8  # paired readings of host and device clock; the fastest counts


class HostClock:
    """The clock of a CPU, on which launched work is done. Moments are ints: nanoseconds at the time of the call."""

    def mark(self, stream: Any = None) -> int:
        return perf_counter_ns()

    def seconds(self, begin: int, end: int) -> float:
        return (end - begin) / 1e9


class Mark(int):
    """A moment in a GPU stream. As a number: the host's time when it was requested."""

    event: Any

    def __new__(cls, requested_ns: int, event: Any) -> Mark:
        mark = super().__new__(cls, requested_ns)
        mark.event = event
        return mark


class EventClock:
    """Converts times of CUDA events to the host's clock `now`.

    `begin` and `end` read both clocks: an event that the host records and waits for is between two readings of the
    host's clock, and the shortest such round trip gives the offset (Cristian 1989), as with another rank's clock.
    Times in between are interpolated linearly, which removes the drift. Call `begin` in every step, since CUDA gives
    the time between two events in fp32 milliseconds: after a second the last digit is about 60 ns, after an hour a
    quarter of a millisecond. Not thread-safe.
    """

    def __init__(self, device: torch.device, cuda: Any = torch.cuda, now: Callable[[], int] = perf_counter_ns) -> None:
        self._device, self._cuda, self._now = device, cuda, now
        self._base: Any = None
        self._clock = Clock()

    @property
    def error_ns(self) -> int:
        """The largest error of a converted time."""
        return self._clock.error_ns

    @property
    def is_stopped(self) -> bool:
        """True while the current stream is captured into a CUDA graph: launched work does not run."""
        return bool(self._cuda.is_current_stream_capturing())

    def mark(self, stream: Any = None) -> Mark:
        """Return the moment at which all work launched on the stream (None: the current one) is done."""
        event = self._cuda.Event(enable_timing=True)
        event.record(self._cuda.current_stream(self._device) if stream is None else stream)
        return Mark(self._now(), event)

    def seconds(self, begin: int, end: int) -> float:
        """Return the seconds between two moments; waits until both have passed."""
        return self._nanoseconds(_event(begin), _event(end)) / 1e9

    def begin(self) -> None:
        """Start a period in which times can be converted. Waits for the current stream only."""
        self._base = self.mark().event
        self._clock = Clock(self._reading())

    def end(self) -> None:
        """End the period. Waits for the current stream."""
        self._clock = Clock(self._clock.before, self._reading())

    def time_of(self, moment: int) -> int:
        """Convert a moment to nanoseconds of the host's clock, waiting until it has passed; an int is one already."""
        if not isinstance(moment, Mark):
            return moment
        return self._clock.to_local(self._nanoseconds(self._base, moment.event))

    def _reading(self) -> ClockReading:
        trips = []
        for _ in range(READINGS + 1):
            sent = self._now()
            event = self.mark().event
            event.synchronize()
            trips.append((sent, event, self._now()))
        # without the first, which may have waited for earlier work
        return reading([RoundTrip(sent, self._nanoseconds(self._base, event), back) for sent, event, back in trips[1:]])

    def _nanoseconds(self, begin: Any, end: Any) -> int:
        for event in (begin, end):
            event.synchronize()
        return round(begin.elapsed_time(end) * 1e6)  # elapsed_time is in milliseconds


def _event(moment: int) -> Any:
    if not isinstance(moment, Mark):
        raise TypeError(f"{moment} is a host time, not a Mark: seconds() takes the moments of a stream")
    return moment.event


DeviceClock = HostClock | EventClock


def device_clock(device: torch.device) -> DeviceClock:
    """Return the clock of a device. `begin` is not called on an EventClock: it only gives seconds between moments."""
    return EventClock(device) if device.type == "cuda" else HostClock()


class Timers:
    """Seconds by phase since the last `take`, in order of first use.

    level: --timing-log-level; 0 times the step, 1 its phases, 2 its actions too. On a GPU, level 1 records events in
    the stream and reads them at the log line; level 2 synchronizes at every reading (the tracer's `settle`), which
    costs overlap. tracer, heartbeat: get each phase. marks: opened around each phase. clock: None for the device's.
    """

    def __init__(
        self,
        level: int,
        device: torch.device,
        tracer: Tracer | None = None,
        heartbeat: Heartbeat | None = None,
        marks: Callable[[str], AbstractContextManager[Any]] | None = None,
        clock: DeviceClock | None = None,
    ) -> None:
        self.level = level
        self._tracer, self._heartbeat, self._marks = tracer, heartbeat, marks or (lambda name: nullcontext())
        self._clock = clock or device_clock(device)
        self._spans: list[tuple[str, int, int]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase of the step. Costs nothing below level 1 and without a tracer or heartbeat."""
        tracer, is_timed = self._tracer, self.level >= PHASE_LEVEL
        with self._marks(name), nullcontext() if self._heartbeat is None else self._heartbeat.phase(name):
            start = 0 if tracer is None else tracer.now()
            begin = self._clock.mark() if is_timed else 0
            try:
                yield
            finally:
                if tracer is not None:
                    tracer.event(name, "phase", start, tracer.now())
                if is_timed:
                    self._spans.append((name, begin, self._clock.mark()))

    def take(self, num_steps: int) -> dict[str, float]:
        """Return seconds per step of each phase, and at level 2 of each kind of action; clears the phases."""
        spans, self._spans = self._spans, []
        taken: dict[str, float] = {}
        for name, begin, end in spans:
            taken[name] = taken.get(name, 0.0) + self._clock.seconds(begin, end)
        if self.level >= ACTION_LEVEL and self._tracer is not None:
            taken |= action_seconds(self._tracer)
        return {name: seconds / max(num_steps, 1) for name, seconds in taken.items()}


def action_seconds(tracer: Tracer) -> dict[str, float]:
    """Return seconds by kind of action; waits inside a forward or backward are counted separately."""
    seconds: dict[str, float] = {}
    waits = tracer.of_kind("wait")
    position = 0
    for event in tracer.of_kind("action"):
        waited = 0
        while position < len(waits) and waits[position].start_ns < event.end_ns:
            if waits[position].start_ns >= event.start_ns:
                waited += waits[position].end_ns - waits[position].start_ns
            position += 1
        name = ACTION_NAMES[stage_action(event.name).op]
        seconds[name] = seconds.get(name, 0.0) + (event.end_ns - event.start_ns - waited) / 1e9
        if waited:
            seconds[WAITING] = seconds.get(WAITING, 0.0) + waited / 1e9
    return seconds
