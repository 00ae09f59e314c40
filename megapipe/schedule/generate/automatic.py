"""The automatic scheduler: a zero-bubble schedule on linear stages for measured times and a memory limit (the question that Qi et al. 2023,
arXiv:2401.10241, section 3, answer by their heuristic, ZB-1p and ZB-2p being its answers for p and 2 p microbatches).

Each candidate is what ranks do that follow one rule as time goes by: a number of microbatches under way that a rank wants to reach, how
short a gap it fills with a W although that delays what comes next, and how much idle it puts up with before it does so anyway. The rule's
numbers are searched, first coarsely, then around the best; the hand-made schedules that fit into memory compete too.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from random import Random
from typing import NamedTuple

from megapipe.errors import ConfigError
from megapipe.schedule.action import Action, Op
from megapipe.schedule.generate.shape import Shape, Wish
from megapipe.schedule.generate.zero_bubble import zb_h1, zb_h2
from megapipe.schedule.lifetimes import Held, peak_held
from megapipe.schedule.placement import linear
from megapipe.schedule.schedule import Row, Schedule
from megapipe.schedule.simulate import Costs, simulate

_UNKNOWN = math.inf


class Rule(NamedTuple):
    """under_way: of each rank. least_gap: in W. idle_seconds: above it every gap is filled."""

    under_way: tuple[int, ...]
    least_gap: float
    idle_seconds: float


def automatic(shape: Shape) -> tuple[Row, ...]:
    """The best rows found for shape.wish (if none: F = I = W, p microbatches). ConfigError for a limit of less than one microbatch.

    The search runs on at most 4 p microbatches, beyond which only the steady middle grows; the best rules are then compared on all.
    """
    wish = shape.wish or Wish(Costs.equal(shape.num_ranks, 1.0, 1.0, 1.0), shape.num_ranks)
    wish = replace(wish, costs=wish.costs.on_linear_ranks())
    if wish.max_microbatches < 1:
        raise ConfigError(
            f"a memory limit of {wish.max_microbatches} microbatches a rank leaves no room for the first; use 1 or more"
        )
    found = _search(shape._replace(num_microbatches=min(shape.num_microbatches, 4 * shape.num_ranks)), wish)
    candidates = [follow(rule, shape, wish)[0] for rule in found]
    kept = {Held.ACTIVATIONS: 1.0, Held.DEFERRED: wish.kept_for_weights}
    candidates += [
        rows
        for rows in (zb_h1(shape), zb_h2(shape))
        if max(peak_held(row, kept) for row in rows) <= wish.max_microbatches
    ]
    return min(candidates, key=lambda rows: _score(rows, shape, wish))


def _search(shape: Shape, wish: Wish) -> list[Rule]:
    """The best few rules: a coarse grid, then steps of one number at a time away from the best."""
    scores: dict[Rule, tuple[float, float]] = {}

    def score(rule: Rule) -> tuple[float, float]:
        if rule not in scores:
            scores[rule] = follow(rule, shape, wish)[1]
        return scores[rule]

    p, seconds = shape.num_ranks, wish.costs.seconds
    fill = (p - 1) * sum(seconds[stage, op] for stage in range(p) for op in (Op.F, Op.I, Op.W)) / p
    wanted = [[offset + slope * (p - 1 - rank) for rank in range(p)] for slope, offset in product(_SLOPES, _OFFSETS)]
    wanted += [[offset + count for count in _until_first_gradient(p, wish.costs)] for offset in (0.0, 0.5, 0.999, 1.5)]
    for counts, (gap, share) in product(wanted, _GAPS):
        under_way = tuple(max(1, int(min(wish.max_microbatches, count))) for count in counts)
        score(Rule(under_way, gap, share * fill if fill else 0.0))
    best = min(scores, key=score)
    random = Random(0)  # the same wish always gets the same schedule
    tries = max(100, min(800, 600_000 // (p * shape.num_microbatches))) if wish.tries is None else wish.tries
    for _ in range(tries):
        rule = _step_from(best, random, wish, fill)
        if score(rule) <= score(best):
            best = rule
    return sorted(scores, key=score)[:12]


def _until_first_gradient(num_ranks: int, costs: Costs) -> list[float]:
    """Of each rank: how many forwards take as long as the first microbatch is away, from its arrival until its gradient comes."""
    seconds, counts, away = costs.seconds, [1.0] * num_ranks, 0.0
    for stage in reversed(range(num_ranks)):
        forward = seconds[stage, Op.F]
        counts[stage] = (away + forward) / forward if forward else float(num_ranks)
        if stage:
            hops = (
                seconds.get((stage - 1, Op.SEND_F), 0.0)
                + seconds.get((stage, Op.SEND_B), 0.0)
                + 2 * costs.latency_seconds
            )
            away += forward + seconds[stage, Op.I] + hops
    return counts


_SLOPES = (1.0, 1.5, 2.0, 2.125, 2.25, 2.5, 3.0)
_OFFSETS = (1.5, 1.99)
# (least gap in W, share of a pipeline's fill that a rank may idle before it fills every gap)
_GAPS = ((0.0, 0.0), (0.25, 0.5), (0.5, 0.25), (0.75, 0.125), (1.0, 0.5), (1.0, math.inf))


def _step_from(rule: Rule, random: Random, wish: Wish, fill: float) -> Rule:
    """A neighbour: one stretch of ranks wants a microbatch more or less, or a gap or an idle limit of another size."""
    kind = random.randrange(4)
    if kind == 0:
        return rule._replace(least_gap=random.random())
    if kind == 1:
        return rule._replace(idle_seconds=random.random() * 0.3 * fill)
    first = random.randrange(len(rule.under_way))
    last = first if kind == 2 else random.randrange(first, len(rule.under_way))
    step = random.choice((-4, -2, -1, 1, 2, 4))
    changed = (
        max(1, min(int(wish.max_microbatches), count + step * (first <= rank <= last)))
        for rank, count in enumerate(rule.under_way)
    )
    return rule._replace(under_way=tuple(changed))


def _score(rows: tuple[Row, ...], shape: Shape, wish: Wish) -> tuple[float, float]:
    costs = replace(wish.costs, overlap=True)  # candidates hold no messages that could stand on a clock
    timeline = simulate(Schedule("candidate", linear(shape.num_ranks), shape.num_microbatches, rows), costs)
    own = max(work + idle for work, idle in zip(timeline.work_seconds, timeline.chained_idle_seconds, strict=True))
    return _ordered(own, timeline.makespan_seconds, wish)


def _ordered(own_seconds: float, makespan_seconds: float, wish: Wish) -> tuple[float, float]:
    return (makespan_seconds, own_seconds) if wish.has_barrier else (own_seconds, makespan_seconds)


class _Rank:
    """One rank on its way: counts of F, I and W done, its clock, what it holds, and when its next inputs come."""

    def __init__(self, stage: int, num_microbatches: int, seconds: Sequence[float]) -> None:
        self.stage, self.seconds = stage, seconds  # of F, I, W
        self.row: list[Action] = []
        self.forwards = self.inputs = self.weights = 0
        self.clock = self.idle = self.alive = 0.0
        self.activation_at = [0.0 if stage == 0 else _UNKNOWN] * num_microbatches
        self.gradient_at = [_UNKNOWN] * num_microbatches
        self.wakes_at = 0.0

    def choose(self, now: float, rule: Rule, wish: Wish) -> tuple[Op | None, float]:
        """What to do now, or None and the next time to ask (unknown: when something comes)."""
        count = len(self.gradient_at)
        wants_forward = self.forwards < count and self.forwards - self.inputs < rule.under_way[self.stage]
        has_room = self.alive + 1.0 <= wish.max_microbatches + 1e-9
        forward_at = self.activation_at[self.forwards] if wants_forward else _UNKNOWN
        input_at = self.gradient_at[self.inputs] if self.inputs < self.forwards else _UNKNOWN
        has_weights = self.inputs > self.weights
        if forward_at <= now and has_room:
            return Op.F, now
        if input_at <= now:
            return Op.I, now
        if forward_at <= now and has_weights:  # W makes room
            return Op.W, now
        following = min(input_at, forward_at if has_room else _UNKNOWN)
        gap = following - now
        if has_weights and (gap >= rule.least_gap * self.seconds[2] or self.idle + gap > rule.idle_seconds):
            return Op.W, now
        return None, following

    def run(self, op: Op, now: float, wish: Wish) -> tuple[int, float]:
        """Do it; returns the microbatch and the end."""
        if self.row:
            self.idle += now - self.clock
        if op is Op.F:
            microbatch, self.forwards, change, seconds = self.forwards, self.forwards + 1, 1.0, self.seconds[0]
        elif op is Op.I:
            microbatch, self.inputs, change, seconds = (
                self.inputs,
                self.inputs + 1,
                wish.kept_for_weights - 1.0,
                self.seconds[1],
            )
        else:
            microbatch, self.weights, change, seconds = (
                self.weights,
                self.weights + 1,
                -wish.kept_for_weights,
                self.seconds[2],
            )
        self.alive += change
        self.clock = now + seconds
        self.row.append(Action(self.stage, op, microbatch))
        return microbatch, self.clock


def follow(rule: Rule, shape: Shape, wish: Wish) -> tuple[tuple[Row, ...], tuple[float, float]]:
    """The rows of ranks that follow `rule` as time goes by, and their score (less is better)."""
    p, costs = shape.num_ranks, wish.costs
    ranks = [_Rank(s, shape.num_microbatches, [costs.seconds[s, op] for op in (Op.F, Op.I, Op.W)]) for s in range(p)]
    hop = {
        (s, op): costs.seconds.get((s, op), 0.0) + costs.latency_seconds
        for s in range(p)
        for op in (Op.SEND_F, Op.SEND_B)
    }
    events = [(0.0, stage) for stage in range(p)]
    while events:
        now, stage = heapq.heappop(events)
        rank = ranks[stage]
        if now != rank.wakes_at or rank.weights == shape.num_microbatches:
            continue  # overtaken by an earlier arrival, or through
        rank.wakes_at = _UNKNOWN
        op, later = rank.choose(now, rule, wish)
        if op is None:
            _wake(events, rank, later)
            continue
        microbatch, end = rank.run(op, now, wish)
        _wake(events, rank, end)
        if op is Op.F and stage == p - 1:
            rank.gradient_at[microbatch] = end
        elif op is Op.F:
            ranks[stage + 1].activation_at[microbatch] = end + hop[stage, Op.SEND_F]
            _wake(events, ranks[stage + 1], max(end + hop[stage, Op.SEND_F], ranks[stage + 1].clock))
        elif op is Op.I and stage > 0:
            ranks[stage - 1].gradient_at[microbatch] = end + hop[stage, Op.SEND_B]
            _wake(events, ranks[stage - 1], max(end + hop[stage, Op.SEND_B], ranks[stage - 1].clock))
    own_seconds = max(sum(rank.seconds) * shape.num_microbatches + rank.idle for rank in ranks)
    return tuple(tuple(rank.row) for rank in ranks), _ordered(own_seconds, max(rank.clock for rank in ranks), wish)


def _wake(events: list[tuple[float, int]], rank: _Rank, time: float) -> None:
    """Ask the rank again at `time`, unless it will be asked before."""
    if time < rank.wakes_at:
        rank.wakes_at = time
        heapq.heappush(events, (time, rank.stage))
