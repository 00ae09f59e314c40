"""The automatic scheduler: a zero-bubble schedule on linear stages for given times and a memory limit.

It solves the problem of Qi et al. 2023, section 3 (arXiv:2401.10241); ZB-1p and ZB-2p answer it for p and 2 p
microbatches.

Each candidate simulates ranks that follow one rule: the number of microbatches in flight that a rank aims for, the
shortest gap that it fills with a W although that delays what comes next, and the idle time after which it fills every
gap. The parameters of the rule are searched, first on a coarse grid, then around the best; the hand-made schedules that
fit into memory compete too.
"""

from __future__ import annotations

import heapq
import math
from dataclasses import replace
from itertools import product
from random import Random
from typing import NamedTuple

from megapipe.errors import ConfigError
from megapipe.schedule.action import COMPUTE_OPS, Action, Op
from megapipe.schedule.costs import AutoGoal, Costs, Shape
from megapipe.schedule.generate.split_backward import zb_h1, zb_h2
from megapipe.schedule.lifetimes import Held, peak_held
from megapipe.schedule.placement import loop
from megapipe.schedule.schedule import Row, Schedule
from megapipe.schedule.simulate import simulate

_UNKNOWN = math.inf
_OPS = (Op.F, Op.I, Op.W, Op.SEND_F, Op.SEND_B)  # whose times matter


class _Rule(NamedTuple):
    """A rule that ranks follow: see the module's docstring."""

    in_flight: tuple[int, ...]  # of each rank
    least_gap: float  # as a fraction of the time of W
    idle_seconds: float  # above this, every gap is filled


# the coarse grid: microbatches in flight grow by `slope` per rank from the `offset` of the last rank to the first
_SLOPES = (1.0, 1.5, 2.0, 2.125, 2.25, 2.5, 3.0)
_OFFSETS = (1.5, 1.99)
# (least gap in W, fraction of the time to fill the pipeline that a rank may idle before it fills every gap)
_GAPS = ((0.0, 0.0), (0.25, 0.5), (0.5, 0.25), (0.75, 0.125), (1.0, 0.5), (1.0, math.inf))


def automatic(shape: Shape) -> tuple[Row, ...]:
    """Return the best rows found for shape.goal (default: F = I = W, p microbatches).

    The search runs on at most 4 p microbatches, beyond which only the steady phase grows; the best rules are then
    compared on all. Raises ConfigError for a limit of less than one microbatch.
    """
    goal = shape.goal or AutoGoal(Costs.equal(shape.num_ranks, 1.0, 1.0, 1.0), shape.num_ranks)
    if goal.max_microbatches < 1:
        raise ConfigError(
            f"a memory limit of {goal.max_microbatches} microbatches per rank does not hold one; use 1 or more"
        )
    costs = goal.costs
    if costs.rank_speeds:  # stage s is on rank s: fold the speeds of the ranks into the seconds of the stages
        seconds = {
            (stage, op): value / costs.rank_speeds[stage] if op in COMPUTE_OPS else value
            for (stage, op), value in costs.seconds.items()
        }
        costs = replace(costs, seconds=seconds, rank_speeds=())
    goal = replace(goal, costs=replace(costs, overlap=True))  # rows hold no messages, so none can block a rank

    def score(rows: tuple[Row, ...]) -> tuple[float, float]:
        timeline = simulate(Schedule("candidate", loop(shape.num_ranks, 1), shape.num_microbatches, rows), goal.costs)
        own = max(work + idle for work, idle in zip(timeline.work_seconds, timeline.chained_idle_seconds, strict=True))
        return timeline.makespan_seconds, own

    found = _search(shape._replace(num_microbatches=min(shape.num_microbatches, 4 * shape.num_ranks)), goal)
    kept = {Held.ACTIVATIONS: 1.0, Held.DEFERRED: goal.kept_for_weights}
    candidates = [_follow(rule, shape, goal)[0] for rule in found]
    for rows in (zb_h1(shape), zb_h2(shape)):
        if max(peak_held(row, kept) for row in rows) <= goal.max_microbatches:
            candidates.append(rows)
    of_ops = {op: [goal.costs.seconds.get((stage, op), 0.0) for stage in range(shape.num_ranks)] for op in _OPS}
    if any(len(set(times)) > 1 for times in of_ops.values()):  # what is found for equal stages may be better by chance
        means = {(stage, op): sum(times) / len(times) for op, times in of_ops.items() for stage in range(len(times))}
        equal = replace(goal, costs=replace(goal.costs, seconds=means))
        candidates.append(automatic(shape._replace(goal=equal)))
    return min(candidates, key=score)


def _search(shape: Shape, goal: AutoGoal) -> list[_Rule]:
    """Return the best dozen rules: from a coarse grid, then steps of one parameter at a time away from the best."""
    scores: dict[_Rule, tuple[float, float]] = {}

    def score(rule: _Rule) -> tuple[float, float]:
        if rule not in scores:
            scores[rule] = _follow(rule, shape, goal)[1]
        return scores[rule]

    p, seconds = shape.num_ranks, goal.costs.seconds
    fill = (p - 1) * sum(seconds[stage, op] for stage in range(p) for op in (Op.F, Op.I, Op.W)) / p
    targets = [[offset + slope * (p - 1 - rank) for rank in range(p)] for slope, offset in product(_SLOPES, _OFFSETS)]
    targets += [[offset + count for count in _until_first_gradient(p, goal.costs)] for offset in (0.0, 0.5, 0.999, 1.5)]
    for counts, (gap, share) in product(targets, _GAPS):
        in_flight = tuple(max(1, int(min(goal.max_microbatches, count))) for count in counts)
        score(_Rule(in_flight, gap, share * fill if fill else 0.0))
    best = min(scores, key=score)
    random = Random(0)  # the same goal always gets the same schedule
    tries = max(100, min(800, 600_000 // (p * shape.num_microbatches))) if goal.tries is None else goal.tries
    for _ in range(tries):
        rule = _neighbour(best, random, goal, fill)
        if score(rule) <= score(best):
            best = rule
    return sorted(scores, key=score)[:12]


def _until_first_gradient(num_ranks: int, costs: Costs) -> list[float]:
    """Return for each rank how many forwards fit between the arrivals of the first microbatch and of its gradient."""
    seconds, counts, away = costs.seconds, [1.0] * num_ranks, 0.0
    for stage in reversed(range(num_ranks)):
        forward = seconds[stage, Op.F]
        counts[stage] = (away + forward) / forward if forward else float(num_ranks)
        if stage:
            messages = seconds.get((stage - 1, Op.SEND_F), 0.0) + seconds.get((stage, Op.SEND_B), 0.0)
            away += forward + seconds[stage, Op.I] + (messages + 2 * costs.latency_seconds)
    return counts


def _neighbour(rule: _Rule, random: Random, goal: AutoGoal, fill: float) -> _Rule:
    """Change one parameter: the gap, the idle limit, or the microbatches in flight of a stretch of ranks."""
    kind = random.randrange(4)
    if kind == 0:
        return rule._replace(least_gap=random.random())
    if kind == 1:
        return rule._replace(idle_seconds=random.random() * 0.3 * fill)
    first = random.randrange(len(rule.in_flight))
    last = first if kind == 2 else random.randrange(first, len(rule.in_flight))
    step = random.choice((-4, -2, -1, 1, 2, 4))
    changed = (
        max(1, min(int(goal.max_microbatches), count + step * (first <= rank <= last)))
        for rank, count in enumerate(rule.in_flight)
    )
    return rule._replace(in_flight=tuple(changed))


class _Rank:
    """The state of one rank: the F, I and W done, clock, microbatches held, and when its next inputs arrive."""

    def __init__(self, stage: int, num_microbatches: int, costs: Costs) -> None:
        self.stage = stage
        self.seconds = {op: costs.seconds[stage, op] for op in (Op.F, Op.I, Op.W)}
        self.done = {Op.F: 0, Op.I: 0, Op.W: 0}
        self.row: list[Action] = []
        self.clock = self.idle = self.alive = 0.0
        self.activation_at = [0.0 if stage == 0 else _UNKNOWN] * num_microbatches
        self.gradient_at = [_UNKNOWN] * num_microbatches
        self.wakes_at = 0.0

    def choose(self, now: float, rule: _Rule, goal: AutoGoal) -> tuple[Op | None, float]:
        """Return the op to run now, or None and the next time to ask (infinite: when something arrives)."""
        forwards, inputs, weights = self.done.values()
        wants_forward = forwards < len(self.gradient_at) and forwards - inputs < rule.in_flight[self.stage]
        has_memory = self.alive + 1.0 <= goal.max_microbatches + 1e-9
        forward_at = self.activation_at[forwards] if wants_forward else _UNKNOWN
        input_at = self.gradient_at[inputs] if inputs < forwards else _UNKNOWN
        if forward_at <= now and has_memory:
            return Op.F, now
        if input_at <= now:
            return Op.I, now
        if forward_at <= now and inputs > weights:  # W frees the memory that F needs
            return Op.W, now
        following = min(input_at, forward_at if has_memory else _UNKNOWN)
        gap = following - now
        if inputs > weights and (gap >= rule.least_gap * self.seconds[Op.W] or self.idle + gap > rule.idle_seconds):
            return Op.W, now
        return None, following


def _follow(rule: _Rule, shape: Shape, goal: AutoGoal) -> tuple[tuple[Row, ...], tuple[float, float]]:
    """Return the rows of ranks that follow `rule`, and their score: the makespan, then the time of the slowest rank."""
    p, count, costs = shape.num_ranks, shape.num_microbatches, goal.costs
    ranks = [_Rank(stage, count, costs) for stage in range(p)]
    kept = {Op.F: 1.0, Op.I: goal.kept_for_weights - 1.0, Op.W: -goal.kept_for_weights}
    events = [(0.0, stage) for stage in range(p)]

    def wake(rank: _Rank, time: float) -> None:
        """Ask the rank again at `time`, unless it will be asked before."""
        if time < rank.wakes_at:
            rank.wakes_at = time
            heapq.heappush(events, (time, rank.stage))

    while events:
        now, stage = heapq.heappop(events)
        rank = ranks[stage]
        if now != rank.wakes_at or rank.done[Op.W] == count:
            continue  # superseded by an earlier arrival, or done
        rank.wakes_at = _UNKNOWN
        op, later = rank.choose(now, rule, goal)
        if op is None:
            wake(rank, later)
            continue
        microbatch = rank.done[op]
        rank.done[op] += 1
        if rank.row:
            rank.idle += now - rank.clock
        rank.row.append(Action(stage, op, microbatch))
        rank.alive += kept[op]
        rank.clock = end = now + rank.seconds[op]
        wake(rank, end)
        if op is Op.F and stage == p - 1:
            rank.gradient_at[microbatch] = end
        elif op is Op.F or (op is Op.I and stage > 0):
            send, step = (Op.SEND_F, +1) if op is Op.F else (Op.SEND_B, -1)
            peer = ranks[stage + step]
            arrival = end + (costs.seconds.get((stage, send), 0.0) + costs.latency_seconds)
            arrives_at = peer.activation_at if op is Op.F else peer.gradient_at
            arrives_at[microbatch] = arrival
            wake(peer, max(arrival, peer.clock))
    own_seconds = max(sum(rank.seconds.values()) * count + rank.idle for rank in ranks)
    return tuple(tuple(rank.row) for rank in ranks), (max(rank.clock for rank in ranks), own_seconds)
