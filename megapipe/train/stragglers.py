"""--log-straggler: gather the times of all ranks at log lines, for the observer to name what is slow."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from statistics import median
from time import perf_counter_ns
from typing import NamedTuple

import torch

from megapipe.assembly.runtime import TrainingRuntime
from megapipe.comm.channels import Channel, MessageTime
from megapipe.comm.collectives import all_gather, gather_objects
from megapipe.formatting import seconds_text
from megapipe.gpu.device_clock import EventClock
from megapipe.monitor.heartbeat import READ, Cause, RankPace, StepTimes, Wait
from megapipe.monitor.process import host
from megapipe.schedule.simulate import simulate
from megapipe.topology import GROUP_NAMES
from megapipe.train.journal import Journal
from megapipe.train.metrics import Observer
from megapipe.train.watch import rank_text

CAUSES = ("messages", *GROUP_NAMES)  # of waits: messages between stages, and collectives by kind of group
MOST_MESSAGES = 16  # compared per step and channel
Moments = dict[str, list[MessageTime]]  # by channel


class StragglerLog:
    """Times collected on every rank while steps run and reported at log lines, with --log-straggler.

    On a CPU every step since the last line counts; on a GPU the last whole one before a line, timed by events in its
    streams.
    """

    def __init__(self, runtime: TrainingRuntime, journal: Journal, observer: Observer) -> None:
        logging = runtime.plan.config.logging
        self._runtime, self._heartbeat, self._journal = runtime, runtime.heartbeat, journal
        self._observer = observer
        self._interval, self._count = logging.log_interval, logging.straggler_minmax_count
        self._active = logging.log_straggler and runtime.groups.world.size > 1
        self._events = EventClock(runtime.device) if self._active and runtime.device.type == "cuda" else None
        self._observed: DeviceWaits | None = None
        self._has_begun = False
        self.steps: list[StepTimes] = []
        self.moments: Moments = {}
        self._hosts: list[str] = []

    def begins(self, step: int) -> None:
        """Note that step `step` (from 1) begins, after `heartbeat.step`. The first of this process is not counted."""
        if not self._active:
            return
        last_step, channels = self._heartbeat.last_step, self._runtime.channels.values()
        has_begun, self._has_begun = self._has_begun, last_step is not None
        records = (step + 1) % self._interval == 0 or self._interval == 1  # the last whole step before a log line
        if self._events is not None:
            if self._observed is not None:
                times, self.moments = self._observed.finish()
                self.steps.append(times)
            self._observed = DeviceWaits(self._events, channels) if records and self._has_begun else None
            self._heartbeat.observer = self._observed
            return
        if last_step is not None and has_begun:
            self.steps.append(last_step)
        if any(channel.message_times is not None for channel in channels):
            self.moments = {str(channel): channel.message_times or [] for channel in channels}
        for channel in channels:
            channel.message_times = [] if records else None

    def report(self, step: int, num_microbatches: int) -> None:
        """Gather the times of all ranks and report who is slow, at a log line."""
        if not self._active or not self.steps:
            return
        runtime, world, topology = self._runtime, self._runtime.groups.world, self._runtime.plan.topology
        own = torch.tensor([*_medians(self.steps), *self._slowest_link()], dtype=torch.float64, device=runtime.device)
        whole = own.new_empty(world.size * own.numel())
        all_gather(whole, own, world)
        work = simulate(runtime.plan.schedule(num_microbatches), runtime.plan.stage_costs).work_seconds
        places = [topology.coordinates(rank).pp_rank for rank in range(world.size)]
        paces = []
        for rank, row in enumerate(whole.view(world.size, -1).tolist()):
            seconds, computing, reading, *waits, peer, link_seconds = row
            by_cause, own_work = dict(zip(CAUSES, waits, strict=True)), work[places[rank]]
            same = tuple(other for other in range(world.size) if other != rank and places[other] == places[rank])
            paces.append(RankPace(rank, seconds, computing, reading, by_cause, own_work, same, int(peer), link_seconds))
        steps, self.steps, self.moments = len(self.steps), [], {}
        self._hosts = self._hosts or gather_objects(host(), world)
        names = [f"{rank_text(topology, rank)} on {host}" for rank, host in enumerate(self._hosts)]
        groups = {name: topology.groups(name) for name in ("tp", "cp", "replicas")}
        several = {kind: ranks for kind, ranks in groups.items() if len(ranks[0]) > 1}
        sentences = self._observer.on_paces(paces, several, names)
        span = f"the {steps} steps before" if steps > 1 else "the step before"
        listed = "".join(f"\n  {text}" for text in sentences)
        self._journal.say(f"stragglers, {span} step {step}: {extremes_text(paces, self._count)}{listed}")
        if sentences:
            slowest = sorted(paces, key=lambda pace: -pace.computing)[: self._count]
            self._journal.record("stragglers", step=step, told=sentences, slowest=[asdict(pace) for pace in slowest])

    def _slowest_link(self) -> tuple[int, float]:
        """Return (global rank, seconds both ways) of the slowest link to a higher pipeline rank, or (-1, 0)."""
        pp = self._runtime.groups.pp
        if pp.size == 1:
            return -1, 0.0
        everyone = gather_objects({name: times[:MOST_MESSAGES] for name, times in self.moments.items()}, pp)
        there: dict[int, Way] = {}
        back: dict[int, Way] = {}
        for channel in self._runtime.channels.values():
            place = pp.ranks.index(channel.peer)
            here, other = self.moments.get(str(channel), []), everyone[place].get(str(channel), [])
            way = Way.of(here, other) if channel.sends else Way.of(other, here)
            if way is not None and place > pp.rank:
                (there if channel.sends else back)[channel.peer] = way
        found = [(both_ways(there[peer], back[peer]), peer) for peer in there if peer in back]
        seconds, peer = max(found, default=(0.0, -1))
        return peer, seconds


def extremes_text(paces: Sequence[RankPace], count: int) -> str:
    """Name the ranks that compute longest and shortest, `count` of each."""
    ordered = sorted(paces, key=lambda pace: (-pace.computing, pace.rank))
    count = min(count, max(1, len(ordered) // 2))
    longest, shortest = (
        ", ".join(f"rank {p.rank} {seconds_text(p.computing)} (waits {seconds_text(p.waiting)})" for p in some)
        for some in (ordered[:count], ordered[-count:][::-1])
    )
    return f"longest {longest}; shortest {shortest}"


class DeviceWaits:
    """One step's waits on a GPU's streams; the host, which runs ahead, does not see them. An observer of the heartbeat
    until `finish`.

    A wait is the time that a stream idles between the kernels before and after it: the part of a collective or message
    that is not hidden under computation. Reading data counts the time that a stream idles until the host launches more.
    Waits inside a CUDA graph are not seen, and count as computation. channels: of this rank; the moments of their
    messages are recorded.
    """

    def __init__(self, clock: EventClock, channels: Iterable[Channel]) -> None:
        self._clock, self._channels = clock, tuple(channels)
        self._spans: list[tuple[Cause, int, int]] = []
        self._cause: Cause | None = None
        self._since = 0
        clock.begin()
        for channel in self._channels:
            channel.message_times, channel.now = [], clock.mark
        self._began = clock.mark()

    def begin(self, cause: Cause) -> None:
        if cause == READ or not self._clock.is_stopped:
            self._cause, self._since = cause, self._clock.mark()

    def end(self) -> None:
        cause, self._cause = self._cause, None
        if cause is not None:
            self._spans.append((cause, self._since, self._clock.mark()))

    def finish(self) -> tuple[StepTimes, Moments]:
        """Return (the step until now, moments of messages by channel) in nanoseconds of the host's clock.

        Synchronises with the device.
        """
        clock, ended = self._clock, self._clock.mark()
        clock.end()
        waits: dict[Cause, int] = {}
        for cause, begin, end in self._spans:
            waits[cause] = waits.get(cause, 0) + clock.time_of(end) - clock.time_of(begin)
        reading = waits.pop(READ, 0)
        moments: Moments = {}
        for channel in self._channels:
            times = channel.message_times or ()
            moments[str(channel)] = [(clock.time_of(begun), clock.time_of(arrived)) for begun, arrived in times]
            channel.message_times, channel.now = None, perf_counter_ns
        return StepTimes(clock.time_of(ended) - clock.time_of(self._began), waits, reading), moments


class Way(NamedTuple):
    """The time of a channel's messages in a step, in seconds."""

    transit: float  # least from a send to its arrival, on two clocks: right only in sum with the way back
    wait: float  # longest of the receiver

    @classmethod
    def of(cls, sent: Sequence[MessageTime], received: Sequence[MessageTime]) -> Way | None:
        """Return None without messages."""
        transits = [arrived - begun for (begun, _), (_, arrived) in zip(sent, received, strict=False)]
        waits = [arrived - asked for asked, arrived in received]
        return cls(min(transits) / 1e9, max(waits) / 1e9) if transits else None


def both_ways(there: Way, back: Way) -> float:
    """Return the seconds that a message there and one back delay the ranks at the ends of a link.

    A message that arrives before its receiver asks is seen when the receiver asks, which the link is not to blame for.
    So a link takes at most as long as its receivers waited.
    """
    return min(there.transit + back.transit, there.wait + back.wait)


def _medians(steps: Sequence[StepTimes]) -> list[float]:
    """Return seconds of the step, computing, reading data, and waiting for each of CAUSES: medians over steps."""
    rows = []
    for step in steps:
        by_cause = dict.fromkeys(CAUSES, 0)
        for (wait, cause), nanoseconds in step.waits.items():
            by_cause[str(cause) if wait is Wait.COLLECTIVE else "messages"] += nanoseconds
        rows.append((step.elapsed, step.computing, step.reading, *by_cause.values()))
    return [median(column) / 1e9 for column in zip(*rows, strict=True)]
