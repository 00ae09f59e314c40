"""--profile-pipeline: every action of every rank in some steps, on one clock, next to the plan; see docs/profile.md."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from statistics import median
from typing import NamedTuple

import torch

from megapipe.assembly.runtime import TrainingRuntime
from megapipe.comm.collectives import gather_objects
from megapipe.comm.round_trips import round_trips
from megapipe.comm.trace import Event
from megapipe.gpu.device_clock import EventClock
from megapipe.monitor.process import available_cores, boot_id
from megapipe.profile.profile import (
    Clock,
    ClockOffset,
    ClockReading,
    LinkTime,
    MeasuredStep,
    PipelineSteps,
    Profile,
    RoundTrip,
    measured_row,
    profile_name,
    reading,
    schedule_as_run,
    trace_path,
    write_profile,
)
from megapipe.train.journal import Journal, run_folder
from megapipe.train.metrics import Observer

MOST_RANKS = 64  # recorded: of a larger world the first pipelines, as many as a viewer can show
ROUND_TRIPS = 16
NOT_REACHED = "the run did not reach step {} (--profile-step-start)"


class RecordedStep(NamedTuple):
    """One step on this rank's own clock. error_ns: of times from a GPU's events."""

    step: int
    num_microbatches: int
    events: tuple[Event, ...]
    error_ns: int = 0


class PipelineProfiler:
    """A recorder of the steps [profile_step_start, profile_step_end) on every rank, with --profile-pipeline.

    Rank 0 writes the profile, and the trace that the observer makes of it. On a GPU actions begin and end at events in
    its streams, read when a step is over, so no step synchronizes. now: this rank's clock.
    """

    def __init__(
        self,
        runtime: TrainingRuntime,
        journal: Journal,
        observer: Observer,
        now: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        logging = runtime.plan.config.logging
        self._runtime, self._say, self._observer, self._now = runtime, journal.say, observer, now
        self._active = logging.profile_pipeline
        self._start, self._end = logging.profile_step_start, logging.profile_step_end
        topology = runtime.plan.topology
        self._pipelines = topology.groups("pp")[: max(1, MOST_RANKS // topology.pp)]  # that are recorded
        self._ranks = sorted(rank for ranks in self._pipelines for rank in ranks)
        self._events = EventClock(runtime.device, now=now) if self._active and runtime.device.type == "cuda" else None
        self._recorded: list[RecordedStep] = []
        self._began: int | None = None  # start of the current step
        self._clocks: dict[int, ClockReading] = {}  # on rank 0, by global rank: readings at the start
        self._links: tuple[LinkTime, ...] = ()

    def before(self, step: int) -> None:
        """Begin to record before a step (the first is 0) of the span; a run resumed inside the span starts there."""
        if not self._active or not self._start <= step < self._end:
            return
        tracer = self._runtime.tracer
        assert tracer is not None, "a run with --profile-pipeline has a tracer"
        if not self._recorded:
            self._clocks, self._links = self._read_clocks(), self._time_links()
        if self._events is not None:
            self._events.begin()
            tracer.clock = self._events
        self._began = tracer.now()

    def after(self, step: int, num_microbatches: int) -> None:
        """Record a step that has ended; after the last one of the span write the profile."""
        if self._began is None:
            return
        tracer = self._runtime.tracer
        assert tracer is not None
        start, ended, error_ns = self._began, tracer.now(), 0
        self._began = None
        if self._events is not None:
            self._events.end()
            tracer.read()
            tracer.clock = None
            start, ended, error_ns = self._events.time_of(start), self._events.time_of(ended), self._events.error_ns
        events = (*(event for event in tracer.events if event.start_ns >= start), Event("step", "phase", start, ended))
        kept = tuple(event for event in events if event.kind in ("action", "wait", "phase"))
        self._recorded.append(RecordedStep(step + 1, num_microbatches, kept, error_ns))
        if step + 1 >= self._end:
            self._finish()

    def finish(self) -> None:
        """Write what there is when the run ends, or say that there is nothing."""
        if self._recorded:
            self._finish()
        elif self._active:
            self._say(f"--profile-pipeline: nothing was recorded: {NOT_REACHED.format(self._start)}")

    def _finish(self) -> None:
        self._active, world = False, self._runtime.groups.world
        after = self._read_clocks()
        recorded = gather_objects(self._recorded if world.global_rank in self._ranks else None, world, destination=0)
        links = gather_objects(self._links, world, destination=0)
        self._recorded = []
        if recorded:
            unique = sorted({link for some in links for link in some}, key=lambda link: link.pp_ranks)
            self._write(recorded, unique, after)

    def _write(self, recorded: list[list[RecordedStep]], links: list[LinkTime], after: dict[int, ClockReading]) -> None:
        """Write the profile and its trace, on rank 0. recorded: by global rank."""
        clocks = {rank: Clock(self._clocks.get(rank), after.get(rank)) for rank in self._ranks}
        profile = self._profile(recorded, links, clocks)
        steps = [step.step for step in profile.pipelines[0].steps]
        path = run_folder(self._runtime.plan.config) / profile_name(steps[0], steps[-1])
        text, trace = self._observer.on_profile(profile)
        try:
            write_profile(profile, path)
            if trace:
                trace_path(path).write_text(trace, encoding="utf-8")
        except OSError as error:  # training is worth more than its profile
            self._say(f"{text}\n  could not be written to {path}: {error.strerror}")
            return
        world = self._runtime.groups.world.size
        some = "" if len(clocks) == world else f"; the first {len(clocks)} of {world} ranks"
        with_trace = f" and {trace_path(path).name} (for ui.perfetto.dev)" if trace else ""
        self._say(f"{text}\n  written to {path}{with_trace}{some}")

    def _profile(self, recorded: list[list[RecordedStep]], links: list[LinkTime], clocks: dict[int, Clock]) -> Profile:
        plan, counts = self._runtime.plan, {step.num_microbatches for step in recorded[0]}
        schedules = {n: schedule_as_run(plan.schedule(n), self._runtime.engine(n).row) for n in counts}
        origin = min(
            clock.to_local(event.start_ns)
            for rank, clock in clocks.items()
            for step in recorded[rank]
            for event in step.events
        )

        def since_origin(rank: int, time_ns: int) -> int:
            return clocks[rank].to_local(time_ns) - origin

        pipelines = []
        for ranks in self._pipelines:
            steps = []
            for index, step in enumerate(recorded[ranks[0]]):
                schedule = schedules[step.num_microbatches]
                rows = (
                    measured_row(row, recorded[rank][index].events, partial(since_origin, rank), schedule.text)
                    for row, rank in zip(schedule.rows, ranks, strict=True)
                )
                steps.append(MeasuredStep(step.step, step.num_microbatches, tuple(rows)))
            place = plan.topology.coordinates(ranks[0])
            pipelines.append(PipelineSteps(place.tp_rank, place.dp_rank, ranks, tuple(steps)))
        notes = []
        for rank, clock in clocks.items():
            # the times of a GPU may be off from its rank's clock
            error_ns = clock.error_ns + max(step.error_ns for step in recorded[rank])
            offset_ns = 0 if clock.before is None else clock.before.offset_ns
            notes.append(ClockOffset(rank, offset_ns, error_ns, clock.is_shared))
        t, device = plan.topology, self._runtime.device
        about: dict[str, object] = {
            "schedule": plan.schedule_name,
            "grid": {"tp": t.tp, "pp": t.pp, "chunks": plan.num_chunks, "dp": t.dp},
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
            "dtype": plan.config.precision.dtype,
            "cores": available_cores(),
            "ranks_per_node": t.ranks_per_node or t.world_size,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "time": time.time(),
        }
        return Profile(about, schedules, plan.message_bytes, tuple(links), tuple(notes), tuple(pipelines))

    def _read_clocks(self) -> dict[int, ClockReading]:
        """Return on rank 0, for every recorded rank with another clock, how far its clock is ahead of rank 0's."""
        world, found = self._runtime.groups.world, {}
        # a rank whose system does not say is not known to share a clock with any other
        boots = gather_objects(boot_id() or f"rank {world.rank}", world)
        for rank in self._ranks[1:]:
            trips = round_trips(world, 0, rank, ROUND_TRIPS, self._runtime.device, now=self._now)
            if trips:
                read = reading([RoundTrip(*trip) for trip in trips])
                # ranks under one kernel share its clock, unless a container has its own time namespace
                if boots[rank] != boots[0] or abs(read.offset_ns) > read.error_ns:
                    found[rank] = read
        return found

    def _time_links(self) -> tuple[LinkTime, ...]:
        """Time messages between pipeline ranks; returns the links that this rank is to report."""
        runtime, pp, links = self._runtime, self._runtime.groups.pp, []
        directions = runtime.plan.placement.directions
        hops = {(min(pair), max(pair)) for ranks in directions for pair in pairwise(ranks) if pair[0] != pair[1]}
        for low, high in sorted(hops):
            seconds = []
            for size in (8, runtime.plan.message_bytes):
                trips = round_trips(pp, low, high, ROUND_TRIPS, runtime.device, size, self._now)
                seconds.append(median((back - sent) / 2e9 for sent, _, back in trips) if trips else 0.0)
            if pp.rank == low and runtime.coordinates.tp_rank == runtime.coordinates.dp_rank == 0:
                links.append(LinkTime((low, high), seconds[0], max(0.0, seconds[1] - seconds[0])))
        return tuple(links)
