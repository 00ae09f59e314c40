"""Heartbeats through a store.

Values published by one rank are read by the others, only one rank wins a claim, and losing the store breaks nothing
else.
"""

from __future__ import annotations

import time
from datetime import timedelta

import torch.distributed as dist

from megapipe.comm.store_exchange import StoreExchange
from megapipe.monitor.heartbeat import Heartbeat, read_snapshot


def until(question, seconds: float = 10.0) -> bool:  # type: ignore[no-untyped-def]
    end = time.monotonic() + seconds
    while not question() and time.monotonic() < end:
        time.sleep(0.05)
    return bool(question())


def test_ranks_see_each_others_records_and_one_gets_the_claim() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=5))
    heartbeats = [Heartbeat(("world",)) for _ in range(2)]
    exchanges = [StoreExchange(rank, "t", heartbeat.as_bytes, store) for rank, heartbeat in enumerate(heartbeats)]
    assert exchanges[0].fetch([0, 1]) == {}
    heartbeats[1].act(b"1F7")
    for exchange in exchanges:
        exchange.start()
    assert until(lambda: len(exchanges[0].fetch([0, 1])) == 2)
    seen = read_snapshot(exchanges[0].fetch([1])[1])
    assert seen is not None
    assert seen.record.action == "1F7"
    exchanges[1].publish_stack("7\n  here")
    assert exchanges[0].stack(1) == "7\n  here"
    assert exchanges[0].stack(0) == ""
    assert [exchange.claim() for exchange in exchanges] == [True, False]
    exchanges[0].set_reported()
    assert until(lambda: exchanges[1].is_reported)
    for exchange in exchanges:
        exchange.stop()


def test_a_dead_store_gives_no_answer_within_seconds() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=2))
    exchange = StoreExchange(
        0, "t", Heartbeat(("world",)).as_bytes, dist.TCPStore("127.0.0.1", store.port, is_master=False)
    )
    del store
    began = time.monotonic()
    assert exchange.fetch([1]) == {}
    assert time.monotonic() - began < 10
