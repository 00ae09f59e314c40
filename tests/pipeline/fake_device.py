"""A fake of torch.cuda with streams and events on a simulated clock: work takes a given time."""

from __future__ import annotations

import struct
from typing import Any

from tests.pipeline.current_stream import CurrentStream

LOOK_NS = 1_000  # duration of one reading of the host's clock
WAKING_NS = 5_000  # delay between the end of what the host waited for and its return


class FakeStream:
    """A stream that is busy until `busy_until` on the host's clock."""

    def __init__(self) -> None:
        self.busy_until = 0

    def wait_stream(self, other: FakeStream) -> None:
        self.busy_until = max(self.busy_until, other.busy_until)


class FakeDevice(CurrentStream[FakeStream]):
    """A device with one main stream and a simulated host clock.

    drift: how much faster than the host's clock its own clock runs, as a fraction. `now` returns the host's clock in
    nanoseconds.
    """

    def __init__(self, drift: float = 0.0) -> None:
        self.host_ns, self.drift = 10**15, drift
        self.main = FakeStream()
        super().__init__(self.main)
        self.records_a_graph = False

    def now(self) -> int:
        self.host_ns += LOOK_NS
        return self.host_ns

    def is_current_stream_capturing(self) -> bool:
        return self.records_a_graph

    def launch(self, nanoseconds: int) -> None:
        """Launch work on the current stream without blocking the host."""
        self._current.busy_until = max(self._current.busy_until, self.host_ns) + nanoseconds

    def Stream(self, device: Any = None) -> FakeStream:
        return FakeStream()

    def Event(self, enable_timing: bool = False) -> FakeEvent:
        assert enable_timing, "an event that knows no time"
        return FakeEvent(self)


class FakeEvent:
    """An event of the fake device.

    at: its time on the host's clock, which only the tests read.
    """

    def __init__(self, device: FakeDevice) -> None:
        self._device = device
        self.at: int | None = None

    def record(self, stream: FakeStream) -> None:
        assert not self._device.records_a_graph, "an event of a graph has no time"
        self.at = max(stream.busy_until, self._device.host_ns)

    def synchronize(self) -> None:
        assert self.at is not None
        if self.at > self._device.host_ns:
            self._device.host_ns = self.at + WAKING_NS

    def elapsed_time(self, end: FakeEvent) -> float:
        """Return fp32 milliseconds, like CUDA; both events must have completed."""
        assert self.at is not None and end.at is not None and max(self.at, end.at) <= self._device.host_ns, (
            "still under way"
        )
        milliseconds = (end.at - self.at) * (1 + self._device.drift) / 1e6
        return struct.unpack("f", struct.pack("f", milliseconds))[0]  # type: ignore[no-any-return]
