"""Heartbeat records: a reader gets what was written at any moment, and detects a torn record."""

from __future__ import annotations

import threading
import time
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

from hypothesis import given
from hypothesis import strategies as st

from megapipe.monitor.heartbeat import (
    FILE_BYTES,
    PATIENCE,
    READING,
    SLOT_AT,
    SLOT_BYTES,
    Heartbeat,
    Wait,
    pack_slot,
    read_slot,
    read_snapshot,
)

TEXTS = st.text(st.characters(codec="ascii", exclude_categories=("Cc",)), max_size=18)
FIELDS = st.tuples(
    st.integers(1, 2**63), st.integers(0, 2**63), st.integers(-1, 2**31), st.integers(0, 255), st.sampled_from(Wait),
    st.integers(-1, 2**31 - 1), st.integers(0, 2**63), TEXTS, TEXTS, TEXTS,
)  # fmt: skip


@given(FIELDS)
def test_a_slot_reads_as_it_was_written(fields: tuple[int, int, int, int, Wait, int, int, str, str, str]) -> None:
    *numbers, phase, action, what = fields
    assert read_slot(pack_slot(*numbers, phase.encode(), action.encode(), what.encode())) == fields


@given(FIELDS, FIELDS, st.data())
def test_a_slot_that_is_part_of_one_record_and_part_of_the_next_is_noticed(
    first: tuple, second: tuple, data: st.DataObject
) -> None:  # type: ignore[type-arg]
    old, new = (pack_slot(*f[:7], *(text.encode() for text in f[7:])) for f in (first, second))
    cut = data.draw(st.integers(0, len(old)))
    torn = new[:cut] + old[cut:]
    assert read_slot(torn) in ((None,) if torn not in (old, new) else (read_slot(old), read_slot(new)))


@given(st.integers(1, 20), st.integers(0, SLOT_BYTES - 1), st.integers(1, 255))
def test_while_a_slot_is_damaged_the_record_before_it_counts(num_beats: int, byte: int, change: int) -> None:
    heartbeat = Heartbeat(("tp",))
    for step in range(num_beats):
        heartbeat.step(step)
    data = bytearray(heartbeat.as_bytes())
    newest = heartbeat.snapshot().record
    start = SLOT_AT + SLOT_BYTES * (newest.beat & 1)
    data[start + byte] ^= change
    seen = read_snapshot(bytes(data))
    assert seen is not None
    assert seen.record == newest or seen.record.beat == newest.beat - 1


def test_a_reader_sees_only_whole_records_while_another_thread_writes(tmp_path: Path) -> None:
    """The writer puts the same number into four fields of a record, and the reader checks that they agree."""
    heartbeat, path = Heartbeat(("world",)), tmp_path / "rank_00000"
    heartbeat.share(path)
    done, seen = threading.Event(), 0

    def write() -> None:
        n = 0
        while not done.is_set():
            heartbeat.step(n)
            heartbeat.act(b"%dF%d" % (n, n))
            heartbeat.wait_for_all("world", "all_reduce", n)
            heartbeat.end_wait()
            n += 1

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    deadline = time.monotonic() + 60
    try:
        while seen < 200 and time.monotonic() < deadline:
            snapshot = read_snapshot(path.read_bytes())
            if snapshot is None:
                continue
            record = snapshot.record
            seen += 1
            if record.wait is Wait.COLLECTIVE:
                assert record.number == record.step
                assert record.action == f"{record.step}F{record.step}"
    finally:
        done.set()
        writer.join()
    assert seen == 200


def test_phases_nest_and_the_longest_patience_holds() -> None:
    heartbeat = Heartbeat(("tp",))
    with heartbeat.phase("saving", PATIENCE):
        with heartbeat.phase("reading data"):
            assert (heartbeat.snapshot().record.phase, heartbeat.snapshot().record.patience) == (
                "reading data",
                PATIENCE,
            )
        assert heartbeat.snapshot().record.phase == "saving"
    assert (heartbeat.snapshot().record.phase, heartbeat.snapshot().record.patience) == ("", 1)


def test_collectives_are_counted_by_kind_of_group() -> None:
    heartbeat = Heartbeat(("tp", "dp"))
    assert [heartbeat.count_launch("dp"), heartbeat.count_launch("dp"), heartbeat.count_launch("tp")] == [1, 2, 1]
    assert heartbeat.snapshot().counts[:2] == (1, 2)


def test_bytes_that_are_not_a_record_read_as_none() -> None:
    assert read_snapshot(b"") is None
    assert read_snapshot(bytes(FILE_BYTES)) is None


@given(st.lists(st.tuples(st.sampled_from(["compute", "wait", "read"]), st.integers(1, 10**9)), max_size=30))
def test_a_step_is_the_sum_of_waiting_reading_and_computing(parts: list[tuple[str, int]]) -> None:
    now, sums = 0, {"compute": 0, "wait": 0, "read": 0}
    with patch("megapipe.monitor.heartbeat.time.time_ns", lambda: now):
        heartbeat = Heartbeat(("tp",))
        heartbeat.step(1)
        for kind, nanoseconds in parts:
            if kind == "wait":
                heartbeat.wait_for_all("tp", "all_reduce", 1)
            with heartbeat.phase(READING) if kind == "read" else nullcontext():
                now += nanoseconds
            sums[kind] += nanoseconds
            heartbeat.end_wait()
        heartbeat.step(2)
        times = heartbeat.last_step
        assert times is not None
        assert (times.elapsed, times.computing, times.waiting, times.reading) == (
            now,
            sums["compute"],
            sums["wait"],
            sums["read"],
        )
        heartbeat.step(3)
    assert heartbeat.last_step is not None and heartbeat.last_step.elapsed == 0


def test_the_record_holds_the_last_whole_step() -> None:
    heartbeat = Heartbeat(("tp",))
    heartbeat.step(1)
    first = read_snapshot(heartbeat.as_bytes())
    heartbeat.wait_for_all("tp", "all_reduce", heartbeat.count_launch("tp"))
    heartbeat.end_wait()
    heartbeat.step(2)
    second = read_snapshot(heartbeat.as_bytes())
    assert first is not None and second is not None and heartbeat.last_step is not None
    assert first.elapsed_ns == 0 < second.elapsed_ns == heartbeat.last_step.elapsed
    assert 0 < second.computing_ns < second.elapsed_ns
    assert second.counts[0] == 1
