"""Heartbeats through a store.

Values published by one rank are read by the others, only one rank wins a claim, and losing the store breaks nothing
else.
"""

from __future__ import annotations

import os
import time
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch.distributed as dist

from megapipe.comm.store_exchange import StoreExchange
from megapipe.monitor.heartbeat import Heartbeat, read_snapshot
from megapipe.monitor.process import process_space, start_ticks
from megapipe.monitor.roster import Member, record_path, records_of, speaks
from tests.comm.test_meeting import CountingStore


def until(question, seconds: float = 10.0) -> bool:  # type: ignore[no-untyped-def]
    end = time.monotonic() + seconds
    while not question() and time.monotonic() < end:
        time.sleep(0.05)
    return bool(question())


def test_ranks_see_each_others_records_and_one_gets_the_claim() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=5))
    heartbeats = [Heartbeat(("world",)) for _ in range(2)]
    exchanges = [
        StoreExchange(rank, "t", [[0], [1]], heartbeat.as_bytes, lambda: True, store)
        for rank, heartbeat in enumerate(heartbeats)
    ]
    assert exchanges[0].fetch([0, 1]) == {}
    heartbeats[1].act(b"1F7")
    for exchange in exchanges:
        exchange.start()
    assert until(lambda: len(exchanges[0].fetch([0, 1])) == 2)
    seen = read_snapshot(exchanges[0].fetch([1])[1])
    assert seen is not None
    assert seen.record.action == "1F7"
    exchanges[1].publish_stack("7\n  here")
    assert until(lambda: exchanges[0].stack(1) == "7\n  here")  # a store answers no write
    assert exchanges[0].stack(0) == ""
    assert [exchange.claim() for exchange in exchanges] == [True, False]
    exchanges[0].set_reported()
    assert until(lambda: exchanges[1].is_reported)
    for exchange in exchanges:
        exchange.stop()


def test_a_dead_store_gives_no_answer_within_seconds() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=2))
    lost = dist.TCPStore("127.0.0.1", store.port, is_master=False)
    exchange = StoreExchange(0, "t", [[0], [1]], Heartbeat(("world",)).as_bytes, lambda: True, lost)
    del store
    began = time.monotonic()
    assert exchange.fetch([1]) == {}
    assert time.monotonic() - began < 10


def test_one_rank_publishes_for_its_host_and_another_takes_over(tmp_path: Path) -> None:
    pid, store = os.getpid(), CountingStore()
    members = [Member(rank, "a", pid, start_ticks(pid), process_space(), "", ()) for rank in range(8)]
    heartbeats = [Heartbeat(("world",)) for _ in members]
    for rank, heartbeat in enumerate(heartbeats):
        heartbeat.share(record_path(tmp_path, rank))
        heartbeat.pulse()
        heartbeat.act(f"{rank}F0".encode())
    exchanges = [
        StoreExchange(
            member.rank,
            "t",
            [range(8), range(8, 16)],
            partial(records_of, members, tmp_path),
            partial(speaks, members, member.rank, tmp_path),
            store,
        )
        for member in members
    ]
    for exchange in exchanges:
        exchange._publish()
    assert store.requests == {"set": 1} and store.connections == 1
    reader = StoreExchange(8, "t", [range(8), range(8, 16)], bytes, lambda: True, store)
    found = reader.fetch(range(8))
    records = [read_snapshot(found[rank]).record for rank in range(8)]
    assert [record.action for record in records] == [f"{rank}F0" for rank in range(8)]
    assert store.requests == {"set": 1, "check": 1, "multi_get": 1}, "however many ranks"
    heartbeats[0].leave("ended")
    heartbeats[1]._cells[0] -= 10**10  # its pulse: this rank has not answered for ten seconds
    assert [exchange._speaks() for exchange in exchanges[1:4]] == [True, True, False], "as seen by itself, too"
    assert exchanges[2]._publish() is None and store.requests["set"] == 2
    left = read_snapshot(reader.fetch([0])[0])
    assert left is not None and left.record.phase == "ended"
