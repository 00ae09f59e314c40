"""`DeviceWaits`: one step's waits as a GPU's streams have them, where the host, which runs ahead, knows nothing of them."""

from __future__ import annotations

from collections.abc import Iterable
from time import perf_counter_ns

from megapipe.comm.channels import Channel, MessageTime
from megapipe.gpu.device_clock import EventClock
from megapipe.monitor.wait_clock import Cause, StepTimes


class DeviceWaits:
    """A heartbeat's observer from its making to `finish`.

    A wait is what a stream stands still for between the kernels before and after it: there a collective or a message costs what is not
    hidden under computation. Reading data costs what a stream stands still for until the host goes on launching. What waits inside a CUDA
    graph is not seen, and counts as computation. channels: of this rank; the moments of their messages are noted.
    """

    def __init__(self, clock: EventClock, channels: Iterable[Channel]) -> None:
        self._clock, self._channels = clock, tuple(channels)
        self._spans: list[tuple[Cause | None, int, int]] = []  # None: data were read
        self._cause: Cause | None = None
        self._since = self._reading_since = 0
        clock.begin()
        for channel in self._channels:
            channel.message_times, channel.now = [], clock.mark
        self._began = clock.mark()

    def wait(self, cause: Cause) -> None:
        if not self._clock.is_stopped:
            self._cause, self._since = cause, self._clock.mark()

    def go_on(self) -> None:
        cause, self._cause = self._cause, None
        if cause is not None:
            self._spans.append((cause, self._since, self._clock.mark()))

    def read(self) -> None:
        self._reading_since = self._clock.mark()

    def has_read(self) -> None:
        self._spans.append((None, self._reading_since, self._clock.mark()))

    def finish(self) -> tuple[StepTimes, dict[str, list[MessageTime]]]:
        """(the step until now, moments of messages by channel), nanoseconds of the host's clock. Waits until the device is here."""
        clock, ended = self._clock, self._clock.mark()
        clock.end()
        waits: dict[Cause, int] = {}
        reading = 0
        for cause, begin, end in self._spans:
            took = clock.time_of(end) - clock.time_of(begin)
            if cause is None:
                reading += took
            else:
                waits[cause] = waits.get(cause, 0) + took
        moments = {
            str(each): [(clock.time_of(a), clock.time_of(b)) for a, b in each.message_times or ()]
            for each in self._channels
        }
        for channel in self._channels:
            channel.message_times, channel.now = None, perf_counter_ns
        return StepTimes(clock.time_of(ended) - clock.time_of(self._began), waits, reading), moments
