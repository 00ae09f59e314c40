"""`Deliveries`: sends of results that are still on their way, so that the row does not wait for them.

The output of a stage whose last part is the combine of experts exists once the all-to-all is complete. Meanwhile the
row continues with the next computation, as on the two resources of `schedule.parts`.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

import torch

from megapipe.monitor.heartbeat import Heartbeat
from megapipe.pipeline.stage import Pending, Tensors

Send = Callable[[Tensors], Any]


class Deliveries(Protocol):
    """The interface that the engine needs."""

    def deliver(self, pending: Pending, send: Send) -> None:
        """Send the result when it is there, in the order of the calls; return at once."""

    def finish(self) -> None:
        """Return when all have been sent. Raises the first error of a delivery."""

    def cancel(self) -> None:
        """Drop those that have not begun, after an error."""


class DirectDeliveries:
    """Waits for each result: on the meta device, where nothing takes time."""

    def deliver(self, pending: Pending, send: Send) -> None:
        send(pending.wait())

    def finish(self) -> None:
        """Do nothing: all have been sent."""

    def cancel(self) -> None:
        """Do nothing, as in `finish`."""


class ThreadDeliveries:
    """A thread that waits, completes the result and sends it: on CPUs, where a backend cannot send later.

    heartbeat: that of this rank; it does not record the waits of the thread, since the rank itself computes meanwhile.
    """

    def __init__(self, heartbeat: Heartbeat | None = None) -> None:
        self._heartbeat = heartbeat
        self._thread: ThreadPoolExecutor | None = None
        self._sent: list[Future[None]] = []

    def deliver(self, pending: Pending, send: Send) -> None:
        if self._thread is None:
            ignore = None if self._heartbeat is None else self._heartbeat.ignore_thread
            self._thread = ThreadPoolExecutor(1, "delivery", initializer=ignore)
        while self._sent and self._sent[0].done():
            self._sent.pop(0).result()
        self._sent.append(self._thread.submit(_deliver, pending, send, torch.is_grad_enabled()))

    def finish(self) -> None:
        while self._sent:
            self._sent.pop(0).result()

    def cancel(self) -> None:
        for sent in self._sent:
            sent.cancel()
        self._sent.clear()


def _deliver(pending: Pending, send: Send, has_grad: bool) -> None:
    with torch.set_grad_enabled(has_grad):  # grad mode belongs to a thread
        send(pending.wait())


class StreamDeliveries:
    """A stream that waits, completes the result and sends it: on GPUs, where the host does not wait.

    Autograd runs the backward of what is computed there on the same stream, and orders it after and before the stream
    that asks for the backward. Not yet run on a GPU.
    """

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device, self._cuda, self._stream = device, cuda, cuda.Stream(device)

    def deliver(self, pending: Pending, send: Send) -> None:
        self._stream.wait_stream(self._cuda.current_stream(self._device))
        pending.record_stream(self._stream)  # the row's stream, which owns the memory, does not wait
        with self._cuda.stream(self._stream):
            send(pending.wait())

    def finish(self) -> None:
        self._cuda.current_stream(self._device).wait_stream(self._stream)

    def cancel(self) -> None:
        self.finish()


def deliveries_for(device: torch.device, heartbeat: Heartbeat | None) -> Deliveries:
    """Return the deliveries of a device."""
    if device.type == "cuda":
        return StreamDeliveries(device)
    return DirectDeliveries() if device.type == "meta" else ThreadDeliveries(heartbeat)
