"""--log-straggler: times of all ranks are gathered at every log line, and who is slow is named."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from statistics import median

import torch

from megapipe.assembly.training_runtime import TrainingRuntime
from megapipe.comm.channels import MessageTime
from megapipe.comm.collectives import all_gather, gather_objects
from megapipe.gpu.device_clock import EventClock
from megapipe.monitor.heartbeat import Heartbeat
from megapipe.monitor.process import host
from megapipe.monitor.record import Wait
from megapipe.monitor.stragglers import RankPace, extremes, sentence, stragglers
from megapipe.monitor.wait_clock import StepTimes
from megapipe.schedule.simulate import simulate
from megapipe.topology import GROUP_NAMES
from megapipe.train.device_waits import DeviceWaits
from megapipe.train.writers import Writers

MESSAGES = "messages"  # of the pipeline, among the causes of waits
CAUSES = (MESSAGES, *GROUP_NAMES)
MOST_MESSAGES = 16  # of a step and a channel that are compared
LEAST_WAIT_NS = 20_000  # of a receiver for whom a message was under way, and not there already
Moments = dict[str, list[MessageTime]]  # by channel


class StragglerLog:
    """Collects while steps run, tells at log lines. Does nothing without --log-straggler. Called alike on every rank.

    On a CPU every step since the last line counts. On a GPU the last whole one before a line does, by events in its streams.
    """

    def __init__(self, runtime: TrainingRuntime, heartbeat: Heartbeat, writers: Writers) -> None:
        logging = runtime.plan.config.logging
        self._runtime, self._heartbeat, self._writers = runtime, heartbeat, writers
        self._interval, self._count = logging.log_interval, logging.straggler_minmax_count
        self._active = logging.log_straggler and runtime.groups.world.size > 1
        self._events = EventClock(runtime.device) if self._active and runtime.device.type == "cuda" else None
        self._observed: DeviceWaits | None = None
        self._has_begun = False
        self._steps: list[StepTimes] = []
        self._moments: Moments = {}
        self._hosts: list[str] = []

    def begins(self, step: int) -> None:
        """Step number `step` begins (the first of all is 1), after `heartbeat.step`. The first of this process is not counted."""
        if not self._active:
            return
        has_begun, self._has_begun = self._has_begun, self._heartbeat.last_step is not None
        records = (step + 1) % self._interval == 0 or self._interval == 1  # the last whole step before a log line
        if self._events is not None:
            self._observe(self._events, records and self._has_begun)
            return
        if self._heartbeat.last_step is not None and has_begun:
            self._steps.append(self._heartbeat.last_step)
        channels = self._runtime.channels.values()
        if any(channel.message_times is not None for channel in channels):
            self._moments = {str(channel): channel.message_times or [] for channel in channels}
        for channel in channels:
            channel.message_times = [] if records else None

    def _observe(self, clock: EventClock, records: bool) -> None:
        """End the observation of the step before, if there was one, and begin one if this step is to be recorded."""
        if self._observed is not None:
            times, self._moments = self._observed.finish()
            self._steps.append(times)
        self._observed = self._heartbeat.observer = (
            DeviceWaits(clock, self._runtime.channels.values()) if records else None
        )

    def report(self, step: int, num_microbatches: int) -> None:
        """Gather and tell, at a log line."""
        if not self._active or not self._steps:
            return
        paces = self._gathered(num_microbatches)
        steps, self._steps, self._moments = len(self._steps), [], {}
        names = self._names()
        topology = self._runtime.plan.topology
        groups = {name: topology.groups(name) for name in ("tp", "cp", "replicas")}
        told = [
            sentence(found, paces, names)
            for found in stragglers(paces, {k: v for k, v in groups.items() if len(v[0]) > 1})
        ]
        last = f"the {steps} steps before" if steps > 1 else "the step before"
        self._writers.say(
            f"stragglers, {last} step {step}: {extremes(paces, self._count)}" + "".join(f"\n  {text}" for text in told)
        )
        if told:
            self._writers.stragglers(
                step, told, [asdict(pace) for pace in sorted(paces, key=lambda p: -p.computing)[: self._count]]
            )

    def _gathered(self, num_microbatches: int) -> list[RankPace]:
        runtime, world = self._runtime, self._runtime.groups.world
        peer, seconds = self._slowest_link()
        own = torch.tensor([*_medians(self._steps), peer, seconds], dtype=torch.float64, device=runtime.device)
        whole = own.new_empty(world.size * own.numel())
        all_gather(whole, own, world)
        work = simulate(runtime.plan.schedule(num_microbatches), runtime.plan.stage_costs).work_seconds
        return [self._pace(rank, row, work) for rank, row in enumerate(whole.view(world.size, -1).tolist())]

    def _pace(self, rank: int, row: Sequence[float], work: Sequence[float]) -> RankPace:
        topology = self._runtime.plan.topology
        pp_rank = topology.coordinates(rank).pp_rank
        peers = tuple(r for r in range(topology.world_size) if r != rank and topology.coordinates(r).pp_rank == pp_rank)
        step, computing, reading, *waits = row[:-2]
        return RankPace(
            rank,
            step,
            computing,
            reading,
            dict(zip(CAUSES, waits, strict=True)),
            work[pp_rank],
            peers,
            int(row[-2]),
            row[-1],
        )

    def _slowest_link(self) -> tuple[int, float]:
        """(global rank, seconds there and back) of the link to a higher pipeline rank that takes longest; (-1, 0) if none is known."""
        pp = self._runtime.groups.pp
        if pp.size == 1:
            return -1, 0.0
        shown = {name: [list(moment) for moment in moments[:MOST_MESSAGES]] for name, moments in self._moments.items()}
        everyone = gather_objects(shown, pp)
        there: dict[int, float] = {}
        back: dict[int, float] = {}
        for channel in self._runtime.channels.values():
            place = pp.ranks.index(channel.peer)
            ends = self._moments.get(str(channel), []), [tuple(m) for m in everyone[place].get(str(channel), [])]
            sent, received = ends if channel.sends else ends[::-1]
            taken = transit(sent, received)
            if taken is not None and place > pp.rank:
                (there if channel.sends else back)[channel.peer] = taken
        found = [(there[peer] + back[peer], peer) for peer in there if peer in back]
        seconds, peer = max(found, default=(0.0, -1))
        return peer, seconds

    def _names(self) -> list[str]:
        if not self._hosts:
            self._hosts = gather_objects(host(), self._runtime.groups.world)
        topology = self._runtime.plan.topology
        sizes = {"pp": topology.pp, "dp": topology.dp, "cp": topology.cp, "tp": topology.tp}
        names = []
        for rank, where in enumerate(self._hosts):
            coordinates = topology.coordinates(rank)
            place = ", ".join(
                f"{axis} {getattr(coordinates, axis + '_rank')}" for axis, size in sizes.items() if size > 1
            )
            names.append(f"rank {rank} ({place}) on {where}")
        return names


def transit(sent: Sequence[MessageTime], received: Sequence[MessageTime]) -> float | None:
    """Least seconds from a send to its arrival, on two clocks: right only in sum with the way back, where their difference cancels.

    Of messages that the receiver stood waiting for; None where there was none: then the link cost nobody anything.
    """
    ways = [
        arrived - begun
        for (begun, _), (waited, arrived) in zip(sent, received, strict=False)
        if arrived - waited > LEAST_WAIT_NS
    ]
    return min(ways) / 1e9 if ways else None


def _medians(steps: Sequence[StepTimes]) -> list[float]:
    """Seconds: of the step, computing, reading data, waiting for each of CAUSES; medians over steps."""
    waits: dict[str, list[int]] = defaultdict(list)
    for step in steps:
        by_cause = dict.fromkeys(CAUSES, 0)
        for (wait, cause), nanoseconds in step.waits.items():
            by_cause[str(cause) if wait is Wait.COLLECTIVE else MESSAGES] += nanoseconds
        for name, nanoseconds in by_cause.items():
            waits[name].append(nanoseconds)
    columns = [
        [s.elapsed for s in steps],
        [s.computing for s in steps],
        [s.reading for s in steps],
        *(waits[name] for name in CAUSES),
    ]
    return [median(column) / 1e9 for column in columns]
