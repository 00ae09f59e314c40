"""Event times in streams and times of a row's actions on the host's clock, against the true times of a fake device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from megapipe.comm.trace import Tracer
from megapipe.gpu.device_clock import ACTION_NAMES, EventClock, HostClock, Mark
from megapipe.gpu.streams import StageStreams
from megapipe.profile.profile import measured_row
from megapipe.schedule.action import Op
from megapipe.schedule.families import build_lowered
from tests.pipeline.fake_device import FakeDevice
from tests.pipeline.test_engine import run_lowered

CPU = torch.device("cpu")
SECOND = 1_000_000_000


def clock_of(device: FakeDevice) -> EventClock:
    return EventClock(CPU, device, device.now)


@pytest.mark.parametrize("drift", [0.0, 1e-4, -1e-4])
def test_an_events_time_on_the_hosts_clock_is_within_its_bound(drift: float) -> None:
    device = FakeDevice(drift)
    clock = clock_of(device)
    device.launch(SECOND // 10)  # work of the previous step
    clock.begin()
    marks = []
    for milliseconds in (0, 1, 250, 500):
        device.launch(milliseconds * SECOND // 1000)
        marks.append(clock.mark())
    clock.end()
    rounding = 100  # fp32 milliseconds, after one second
    assert clock.error_ns < 10_000
    for mark in marks:
        assert abs(clock.time_of(mark) - mark.event.at) <= clock.error_ns + rounding
    assert clock.seconds(marks[0], marks[2]) == pytest.approx(0.251 * (1 + drift), abs=1e-5)


def test_marking_a_moment_does_not_block_the_host() -> None:
    device = FakeDevice()
    clock = clock_of(device)
    clock.begin()
    began = device.host_ns
    for _ in range(10):
        device.launch(SECOND)
        assert int(clock.mark()) == device.host_ns
    assert device.host_ns - began < SECOND // 1000
    assert device.main.busy_until - began >= 10 * SECOND


def test_both_runtimes_measure_the_same_times() -> None:
    host, device = HostClock(), FakeDevice()
    begin = host.mark()
    assert host.seconds(begin, host.mark()) >= 0
    clock = clock_of(device)
    clock.begin()
    assert clock.time_of(12345) == 12345, "a time of the host stays what it is"
    with pytest.raises(TypeError, match="12345 is a host time"):
        clock.seconds(12345, clock.mark())


class Computing(StageStreams):
    """Streams on which each computation occupies the device for the time of its stage."""

    def __init__(self, device: FakeDevice, nanoseconds: dict[int, int]) -> None:
        super().__init__(nanoseconds, CPU, device)
        self._fake, self._nanoseconds = device, nanoseconds

    @contextmanager
    def computing(self, stage: int) -> Iterator[None]:
        with super().computing(stage):
            self._fake.launch(self._nanoseconds[stage])
            yield


def test_actions_have_times_of_their_streams_and_pair_halves_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    """dualpipe-v on one rank, which holds both stages; stage 1 computes three times as long as stage 0."""
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    device, took = FakeDevice(drift=1e-5), {0: SECOND // 100, 1: 3 * SECOND // 100}
    clock = clock_of(device)
    tracer = Tracer(clock=clock)
    schedule = build_lowered("dualpipe-v", 1, 2, 4)
    clock.begin()
    began = device.host_ns
    run_lowered(0, 1, schedule, Computing(device, took), tracer)
    assert device.host_ns - began < SECOND // 100, "the host was never held up"
    assert any(isinstance(event.end_ns, Mark) for event in tracer.events)
    clock.end()
    tracer.read()
    assert all(type(moment) is int for event in tracer.events for moment in event[2:])
    near = pytest.approx
    halves = {event.name: event.end_ns - event.start_ns for event in tracer.of_kind("action")}
    row, pairs, alone = schedule.rows[0], 0, 0
    measured = measured_row(row, tracer.events)
    for slot, action in enumerate(row):
        length = measured.ends_ns[slot] - measured.starts_ns[slot]
        if action.op is Op.OVERLAP:
            pairs += 1
            assert length == near(took[1], rel=1e-2), "both together"
            assert sorted(halves[str(half)] for half in row[slot + 1 : slot + 3]) == near(
                sorted(took.values()), rel=1e-2
            )
        elif action.op in (Op.F, Op.B) and Op.OVERLAP not in (before.op for before in row[max(0, slot - 2) : slot]):
            alone += 1
            assert length == near(took[action.stage], rel=1e-2)
    assert pairs > 2 and alone > 2


def test_every_action_has_a_name_among_the_timers() -> None:
    assert set(ACTION_NAMES) == set(Op)
