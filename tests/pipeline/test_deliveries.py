"""Results that are on their way are sent when they are there, in order, while the row goes on."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from megapipe.monitor.heartbeat import Heartbeat, Wait
from megapipe.pipeline.deliveries import DirectDeliveries, StreamDeliveries, ThreadDeliveries, deliveries_for
from tests.pipeline.test_streams import FakeCuda

DEVICE: Any = torch.device("cpu")


@dataclass
class Late:
    """A result that is there when the test says so."""

    value: float
    there: threading.Event = field(default_factory=threading.Event)
    error: str = ""
    used_by: Any = None

    def record_stream(self, stream: Any) -> None:
        self.used_by = stream

    def wait(self) -> tuple[Tensor, ...]:
        assert self.there.wait(10)
        if self.error:
            raise RuntimeError(self.error)
        return (torch.tensor(self.value, requires_grad=True) * 2,)


def test_results_are_sent_in_order_and_not_waited_for() -> None:
    sent: list[Tensor] = []
    deliveries, first, second = ThreadDeliveries(), Late(1.0), Late(2.0)
    second.there.set()
    with torch.set_grad_enabled(True):
        for late in (first, second):
            deliveries.deliver(late, lambda tensors: sent.extend(tensors))
    assert sent == []  # the second one waits for the first
    first.there.set()
    deliveries.finish()
    assert [tensor.item() for tensor in sent] == [2.0, 4.0]
    assert all(tensor.requires_grad for tensor in sent)  # a thread starts with the grad mode of its own


def test_an_error_of_a_delivery_is_raised_by_the_row() -> None:
    deliveries, late = ThreadDeliveries(), Late(1.0, error="peer lost")
    late.there.set()
    deliveries.deliver(late, lambda tensors: None)
    with pytest.raises(RuntimeError, match="peer lost"):
        deliveries.finish()
    deliveries.cancel()
    deliveries.finish()


def test_waits_of_the_thread_are_not_waits_of_the_rank() -> None:
    heartbeat, seen = Heartbeat(("ep",)), []
    deliveries, late = ThreadDeliveries(heartbeat), Late(1.0)
    late.there.set()

    def send(tensors: tuple[Tensor, ...]) -> None:
        heartbeat.wait_for_peer(Wait.SEND, b"channel", 3)
        seen.append(heartbeat.snapshot().record.wait)
        heartbeat.end_wait()

    deliveries.deliver(late, send)
    deliveries.finish()
    assert seen == [Wait.NOTHING]
    heartbeat.wait_for_peer(Wait.SEND, b"channel", 3)
    assert heartbeat.snapshot().record.wait == Wait.SEND


def test_on_a_gpu_a_stream_waits_and_sends_instead_of_the_host() -> None:
    cuda = FakeCuda()
    deliveries, late = StreamDeliveries(DEVICE, cuda), Late(1.0)
    late.there.set()
    deliveries.deliver(late, lambda tensors: cuda.launch("send"))
    deliveries.finish()
    side = "stage 0"  # the fake's name of its first stream
    assert late.used_by is deliveries._stream  # which alone waits for the rows, allocated on the main stream
    assert cuda.log == [(side, "waits for", "main"), (side, "runs", "send"), ("main", "waits for", side)]


def test_the_meta_device_has_no_later() -> None:
    assert isinstance(deliveries_for(torch.device("meta"), None), DirectDeliveries)
    assert isinstance(deliveries_for(torch.device("cpu"), None), ThreadDeliveries)
