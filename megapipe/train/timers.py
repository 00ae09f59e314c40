"""Phase timers: level 0 times the step, level 1 its phases, level 2 its actions too.

On a GPU, level 1 records events in the stream and reads them at the log line; level 2 synchronises with the device at
every reading (the tracer's `settle`), which costs overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from megapipe.comm.trace import Tracer
from megapipe.gpu.device_clock import DeviceClock, device_clock
from megapipe.monitor.heartbeat import Heartbeat
from megapipe.schedule.action import Op, parse_action

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
    Op.OVERLAP: "start-pair",
}
WAITING = "wait"  # for messages and parameters; not part of the forward or backward it happens in


class Timers:
    """Seconds by phase since the last `take`, in order of first use.

    tracer: gets each phase as an event. heartbeat: gets each phase. marks: opened around each phase, for profilers.
    clock: the device's own if None.
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
        self._marks = marks or (lambda name: nullcontext())
        self._heartbeat = heartbeat
        self._tracer = tracer
        self._clock = clock or device_clock(device)
        self._spans: list[tuple[str, int, int]] = []

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase of the step. Costs nothing below level 1 and without a tracer or heartbeat."""
        with self._marks(name), nullcontext() if self._heartbeat is None else self._heartbeat.phase(name):
            if self.level < PHASE_LEVEL and self._tracer is None:
                yield
            else:
                yield from self._timed(name)

    def _timed(self, name: str) -> Iterator[None]:
        start = 0 if self._tracer is None else self._tracer.now()
        begin = self._clock.mark()
        try:
            yield
        finally:
            if self._tracer is not None:
                self._tracer.event(name, "phase", start, self._tracer.now())
            if self.level >= PHASE_LEVEL:
                self._spans.append((name, begin, self._clock.mark()))

    def take(self, tracer: Tracer | None, num_steps: int) -> dict[str, float]:
        """Return seconds per step of each phase, and at level 2 of each kind of action, over num_steps steps.

        Clears the phases.
        """
        spans, self._spans = self._spans, []
        taken: dict[str, float] = {}
        for name, begin, end in spans:
            taken[name] = taken.get(name, 0.0) + self._clock.seconds(begin, end)
        if self.level >= ACTION_LEVEL and tracer is not None:
            taken |= action_seconds(tracer)
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
        name = ACTION_NAMES[parse_action(event.name).op]
        seconds[name] = seconds.get(name, 0.0) + (event.end_ns - event.start_ns - waited) / 1e9
        if waited:
            seconds[WAITING] = seconds.get(WAITING, 0.0) + waited / 1e9
    return seconds
