"""--log-straggler on real ranks: it names the slow rank with the cause, and a slow link with both of its ends."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megapipe.comm.channels import Channel
from megapipe.data.dataset import SyntheticDataset
from megapipe.gpu.device_clock import EventClock
from megapipe.model.stage import GPTStage
from megapipe.monitor.heartbeat import Heartbeat, Wait
from megapipe.monitor.process import host
from megapipe.topology import GROUP_NAMES
from megapipe.train import stragglers
from megapipe.train.metrics import Observer
from megapipe.train.stragglers import StragglerLog, Way, both_ways
from tests.harness import RankPool
from tests.pipeline.fake_device import FakeDevice
from tests.train.jobs import job_on_rank

Pools = Callable[[int], RankPool]
SLOWNESS = 0.2  # seconds added to a forward, a sample or a message: far above the noise of ranks that share cores


def slow_stage(rank: int, where: int) -> None:
    forward = GPTStage.forward

    def slowed(self: GPTStage, *arguments: Any) -> Any:
        time.sleep(SLOWNESS)
        return forward(self, *arguments)

    if rank == where:
        GPTStage.forward = slowed  # type: ignore[method-assign]


def slow_reader(rank: int, where: int) -> None:
    read = SyntheticDataset.__getitem__

    def slowed(self: SyntheticDataset, index: int) -> Any:
        time.sleep(SLOWNESS)
        return read(self, index)

    if rank == where:
        SyntheticDataset.__getitem__ = slowed  # type: ignore[method-assign]


def slow_link(rank: int, low: int, high: int) -> None:
    """Delay messages between two ranks in both directions."""
    wait_for = Channel.wait_for

    def waited_for(self: Channel, handle: Any, *arguments: Any) -> None:
        is_slow = not self.sends and {rank, self.peer} == {low, high}
        wait_for(self, _Arriving(handle) if is_slow else handle, *arguments)

    Channel.wait_for = waited_for  # type: ignore[method-assign]


class _Arriving:
    """A posted receive whose message is delayed."""

    def __init__(self, handle: Any) -> None:
        self._handle = handle

    def wait(self) -> None:
        self._handle.wait()
        time.sleep(SLOWNESS)


CASES: dict[str, tuple[int, str, tuple[Any, ...], str]] = {
    "rank_among_replicas": (2, "", (slow_stage, 1), "rank 1 (dp 1) on {host} is slow: it computes "),
    "rank_of_a_pipeline": (2, "--pipeline-model-parallel-size 2", (slow_stage, 0),
    "rank 0 (pp 0) on {host} is slow: it computes "),
    "reader": (2, "", (slow_reader, 0), "rank 0 (dp 0) on {host} is slow: it reads data "),
    "only_link": (2, "--pipeline-model-parallel-size 2", (slow_link, 0, 1),
    "{host} and rank 1 (pp 1) on {host} is slow"),
    "link_of_three": (4, "--pipeline-model-parallel-size 4", (slow_link, 1, 2),
    "rank 1 (pp 1) on {host} and rank 2 (pp 2) on {host} is"),
}  # fmt: skip


@pytest.mark.parametrize(("world", "grid", "fault", "words"), CASES.values(), ids=CASES.keys())
def test_the_slow_rank_or_link_is_named(
    rank_pools: Pools, tmp_path: Path, world: int, grid: str, fault: tuple[Any, ...], words: str
) -> None:
    flags = f"{grid} --train-iters 6 --log-interval 6 --log-straggler --save {tmp_path}/run"
    pool = rank_pools(world)
    answers = pool.run(job_on_rank, flags, *fault)
    pool.close()  # its slowness
    assert [answer[1] for answer in answers] == [""] * world, answers
    records = [json.loads(line) for line in (tmp_path / "run" / "run.jsonl").read_text().splitlines()]
    (found,) = [record for record in records if record["kind"] == "stragglers"]
    assert words.format(host=host()) in found["told"][0], found["told"]
    assert found["told"][0] in answers[0][0] and "stragglers, the 4 steps before step 6: longest rank" in answers[0][0]
    if fault[0] is slow_stage:
        assert f"longest rank {fault[1]} " in answers[0][0]


def test_ways_there_and_back_cancel_the_difference_of_clocks() -> None:
    offset, way = 10**12, 3_000_000
    there = Way.of([(100, 100), (200, 200)], [(offset, 100 + way + offset), (offset, 200 + 2 * way + offset)])
    back = Way.of([(offset, offset)], [(50, way)])
    assert there is not None and back is not None
    assert both_ways(there, back) == pytest.approx(2 * way / 1e9, abs=1e-6)
    assert Way.of([], []) is None


def test_a_link_takes_no_longer_than_its_receivers_wait() -> None:
    late, noise = 300_000_000, 50_000  # the receiver asks when the message is there, and is interrupted
    there = Way.of([(0, 0), (10, 10)], [(late, late + noise), (late + noise, late + noise + 10)])
    back = Way.of([(0, 0)], [(0, 1_000_000)])
    assert there is not None and back is not None
    assert both_ways(there, back) == pytest.approx((noise + 1_000_000) / 1e9)


MILLISECOND = 1_000_000


class FakeChannel:
    """A receiving end whose message arrives `nanoseconds` after the preceding work."""

    message_times: list[tuple[int, int]] | None = None
    now: Callable[[], int]

    def receive(self, device: FakeDevice, heartbeat: Heartbeat, nanoseconds: int) -> None:
        heartbeat.wait_for_peer(Wait.RECEIVE, b"activation", 1)
        begun = self.now() if self.message_times is not None else 0
        device.launch(nanoseconds)
        if self.message_times is not None:
            self.message_times.append((begun, self.now()))
        heartbeat.end_wait()

    def __str__(self) -> str:
        return "activation from stage 0 to 1"


def a_step(device: FakeDevice, heartbeat: Heartbeat, channel: FakeChannel) -> None:
    """Run 40 ms of computation with waits of 20 and 7 ms, and 200 ms of reading data on the host.

    The device has 57 ms of work queued when the host starts to read.
    """
    device.launch(30 * MILLISECOND)
    heartbeat.wait_for_all("tp", "all_reduce", 1)
    device.launch(20 * MILLISECOND)
    heartbeat.end_wait()
    channel.receive(device, heartbeat, 7 * MILLISECOND)
    device.records_a_graph = True  # a collective inside a graph is waited for here
    heartbeat.wait_for_all("tp", "all_reduce", 2)
    heartbeat.end_wait()
    device.records_a_graph = False
    with heartbeat.phase("reading data"):
        device.host_ns += 200 * MILLISECOND
    device.launch(10 * MILLISECOND)


def test_on_a_gpu_the_last_whole_step_has_the_times_of_its_streams(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device, heartbeat, channel = FakeDevice(), Heartbeat(GROUP_NAMES), FakeChannel()
    monkeypatch.setattr(stragglers, "EventClock", lambda real: EventClock(real, device, device.now))
    config = SimpleNamespace(logging=SimpleNamespace(log_interval=4, straggler_minmax_count=1, log_straggler=True))
    groups = SimpleNamespace(world=SimpleNamespace(size=2))
    runtime = SimpleNamespace(
        plan=SimpleNamespace(config=config),
        groups=groups,
        device=torch.device("cuda"),
        channels={0: channel},
        heartbeat=heartbeat,
    )
    log = StragglerLog(runtime, SimpleNamespace(), Observer())  # type: ignore[arg-type]
    for step in range(1, 5):
        heartbeat.step(step)
        log.begins(step)
        assert (heartbeat.observer is not None) is (step == 3) and (channel.message_times is not None) is (step == 3)
        a_step(device, heartbeat, channel)
    (times,) = log.steps
    waits = {cause: nanoseconds / MILLISECOND for cause, nanoseconds in times.waits.items()}
    assert waits == {(Wait.COLLECTIVE, "tp"): pytest.approx(20, abs=0.1), (Wait.RECEIVE, 1): pytest.approx(7, abs=0.1)}
    assert times.reading / MILLISECOND == pytest.approx(200 - 57, abs=0.1)
    assert times.computing / MILLISECOND == pytest.approx(40, abs=0.1)
    ((begun, arrived),) = log.moments[str(channel)]
    assert arrived - begun == pytest.approx(7 * MILLISECOND, rel=0.01) and type(arrived) is int
