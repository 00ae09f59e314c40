"""Figures from the ranks' records: the replay of a schedule with its real durations, and the time lost beyond it."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bench_table import Quartiles

from megapipe.schedule.action import COMPUTE_OPS, Op, parse_action
from megapipe.schedule.costs import Costs
from megapipe.schedule.schedule import Schedule
from megapipe.schedule.simulate import simulate

if TYPE_CHECKING:
    from megapipe.comm.trace import Tracer

Durations = dict[tuple[int, str], list[float]]  # seconds of actions by (stage, op value)


@dataclass(frozen=True)
class RankStep:
    """One step of one contender on one rank, on the machine's monotonic clock.

    end_ns: of the last action of an emulated device; with real computation, when the step returned. cpu_seconds: of all
    threads. durations: of the actions of a pipeline without waits, where they were measured.
    """

    start_ns: int
    end_ns: int
    cpu_seconds: float
    durations: Durations = field(default_factory=dict)


@dataclass(frozen=True)
class StepFigures:
    """One step of one contender, all ranks. replay_seconds: 0 where no actions were measured."""

    measured_seconds: float
    replay_seconds: float
    cpu_seconds: float

    @classmethod
    def of(cls, ranks: Sequence[RankStep], schedule: Schedule, replays: bool = False) -> StepFigures:
        durations = mean_durations((rank.durations for rank in ranks), replays)
        measured_ns = max(rank.end_ns for rank in ranks) - min(rank.start_ns for rank in ranks)
        replay = replay_seconds(schedule, durations) if durations else 0.0
        return cls(measured_ns / 1e9, replay, sum(rank.cpu_seconds for rank in ranks))

    @property
    def loss(self) -> float:
        """The time beyond a perfect replay of the step's own durations, as a share of that."""
        return self.measured_seconds / self.replay_seconds - 1


@dataclass(frozen=True)
class Figures:
    """One contender in one case.

    Times are lower quartiles over steps. actions: the most computing actions of a rank (a B is one).
    """

    steps: tuple[StepFigures, ...]
    actions: int

    @property
    def loss(self) -> float:
        return Quartiles.of([step.loss for step in self.steps]).low

    @property
    def measured_seconds(self) -> float:
        return Quartiles.of([step.measured_seconds for step in self.steps]).low

    @property
    def replay_seconds(self) -> float:
        return statistics.median(step.replay_seconds for step in self.steps)

    @property
    def seconds_an_action(self) -> float:
        """The seconds for each action of a rank, for stages that cost nothing."""
        return self.measured_seconds / self.actions


def mean_durations(ranks: Iterable[Durations], replays: bool = False) -> dict[tuple[int, Op], float]:
    """Return the mean seconds of the actions of each stage, of B as I and W where it was not measured itself. replays:
    of an emulated device, whose backwards repeat a forward.
    """
    seconds: Durations = defaultdict(list)
    for durations in ranks:
        for key, found in durations.items():
            seconds[key] += found
    means = {(stage, Op(op)): statistics.fmean(found) for (stage, op), found in seconds.items()}
    for stage in {stage for stage, _ in means}:
        if replays:
            means[stage, Op.RECOMPUTE] = means[stage, Op.F]
            means[stage, Op.I] += means[stage, Op.F]
        means.setdefault((stage, Op.B), means.get((stage, Op.I), 0.0) + means.get((stage, Op.W), 0.0))
    return means


def action_seconds(tracer: Tracer) -> Durations:
    """Return the durations of computing actions, without their waits for messages."""
    waits = tracer.of_kind("wait")
    found: Durations = defaultdict(list)
    for event in tracer.of_kind("action"):
        action = parse_action(event.name)
        if action.op in COMPUTE_OPS:
            waited = sum(
                w.end_ns - w.start_ns for w in waits if event.start_ns <= w.start_ns and w.end_ns <= event.end_ns
            )
            found[action.stage, action.op.value].append((event.end_ns - event.start_ns - waited) / 1e9)
    return dict(found)


def replay_seconds(schedule: Schedule, seconds: dict[tuple[int, Op], float]) -> float:
    """Return the schedule's makespan with these durations and free messages."""
    return simulate(schedule, Costs(seconds)).makespan_seconds


def count_actions(schedule: Schedule) -> list[int]:
    """Return the number of F, B, I and W of each rank."""
    return [sum(action.op in COMPUTE_OPS for action in row) for row in schedule.rows]
