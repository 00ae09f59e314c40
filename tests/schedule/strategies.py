"""Hypothesis strategies for schedules.

They draw all shapes of the named families, and random valid schedules on any placement, with full and split backwards.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import combinations, pairwise

from hypothesis import strategies as st

from megapipe.schedule.action import Action, Op
from megapipe.schedule.costs import Costs
from megapipe.schedule.families import SCHEDULES, build_schedule
from megapipe.schedule.partition import Partition, from_counts
from megapipe.schedule.placement import Placement, linear, loop, two_directions, v_shape
from megapipe.schedule.schedule import Row, Schedule
from megapipe.schedule.simulate import Timeline


def peak_live_microbatches(timeline: Timeline) -> tuple[float, ...]:
    """Return `timeline.peak_live_chunks` in microbatches of all the layers of the rank."""
    stages_of = timeline.schedule.placement.stages_of
    return tuple(peak / len(stages_of(rank)) for rank, peak in enumerate(timeline.peak_live_chunks))


@st.composite
def named_schedules(draw: st.DrawFn) -> Schedule:
    """Draw gpipe, 1f1b or interleaved with p 1..8, m 1..24, v 1..4 and any group size."""
    name = draw(st.sampled_from(["gpipe", "1f1b", "interleaved"]))
    p, m = draw(st.integers(1, 8)), draw(st.integers(1, 24))
    if name != "interleaved":
        return build_schedule(name, p, 1, m)
    group_size = draw(st.none() | st.integers(p, p + 9))
    return build_schedule(name, p, draw(st.integers(1, 4)), m, group_size)


def exchange_receives(row: Row, op: Op) -> Row:
    """Exchange the first two receives of an op that follow each other and are for two stages."""
    slots = [slot for slot, action in enumerate(row) if action.op is op]
    exchanged = list(row)
    first, second = next(pair for pair in pairwise(slots) if row[pair[0]].stage != row[pair[1]].stage)
    exchanged[first], exchanged[second] = row[second], row[first]
    return tuple(exchanged)


def family_shapes(name: str, p: int, v: int, m: int, group_extra: int = 0) -> tuple[str, int, int, int, int | None]:
    """Return arguments of build_schedule for `name`.

    They give the requested shape, moved to the nearest one that the family supports.
    """
    family = SCHEDULES[name]
    if family.is_mirrored(2):
        p = p + p % 2
        m = max(2 * p if name == "dualpipe" else 2, m + m % 2)
    elif name == "dualpipe-v":
        m = max(2 * p, m)
    elif not family.is_synchronous:
        m = max(p, m)
    v = family.num_chunks(v + v % 2 if family.has_waves else v)
    return name, p, v, m, p + group_extra if family.takes_group_size else None


@st.composite
def family_schedules(draw: st.DrawFn, max_p: int = 8, max_m: int = 24) -> Schedule:
    """Draw any family but the automatic one, whose search is slow, with p, m, v and group size that it supports."""
    name = draw(st.sampled_from([name for name in SCHEDULES if name != "zb-auto"]))
    p, m, v = draw(st.integers(1, max_p)), draw(st.integers(1, max_m)), draw(st.integers(1, 4))
    return build_schedule(*family_shapes(name, p, v, m, draw(st.integers(0, 9))))


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    p = draw(st.integers(1, 4))
    kind = draw(st.sampled_from(["linear", "loop", "v", "two_directions", "random"]))
    if kind == "random":
        order = [*range(p), *draw(st.lists(st.integers(0, p - 1), max_size=4))]
        return Placement(p, tuple(draw(st.permutations(order))))
    built = {
        "linear": linear(p),
        "loop": loop(p, draw(st.integers(1, 3))),
        "v": v_shape(p, draw(st.sampled_from([2, 4]))),
        "two_directions": two_directions(p, draw(st.integers(1, 2))),
    }
    return built[kind]


@st.composite
def random_schedules(draw: st.DrawFn) -> Schedule:
    """Draw a random order that the dependencies allow: repeatedly pick one of the actions that are ready."""
    placement, m = draw(placements()), draw(st.integers(1, 5))
    rng = random.Random(draw(st.integers(0, 10**6)))
    rows: list[list[Action]] = [[] for _ in range(placement.num_ranks)]
    last = placement.num_stages - 1
    ready = [Action(0, Op.F, mb) for mb in range(m)]
    while ready:
        action = ready.pop(rng.randrange(len(ready)))
        stage, op, mb = action
        rows[placement.rank_of(stage, mb)].append(action)
        if op is Op.F and stage < last:
            ready.append(Action(stage + 1, Op.F, mb))
        elif op is Op.F:
            ready.append(Action(stage, rng.choice([Op.B, Op.I]), mb))
        if op is Op.I:
            ready.append(Action(stage, Op.W, mb))
        if op in (Op.B, Op.I) and stage > 0:
            ready.append(Action(stage - 1, rng.choice([Op.B, Op.I]), mb))
    return Schedule("random", placement, m, tuple(map(tuple, rows)))


@st.composite
def uneven_costs(draw: st.DrawFn, num_stages: int) -> Costs:
    seconds = st.floats(0.01, 5.0, allow_nan=False)
    return Costs(
        {(stage, op): draw(seconds) for stage in range(num_stages) for op in (Op.F, Op.B, Op.I, Op.W, Op.UPDATE)}
    )


def every_cut(num_layers: int, num_stages: int) -> Iterator[Partition]:
    """Yield every cut into stages of at least one layer."""
    for cuts in combinations(range(1, num_layers), num_stages - 1):
        edges = [0, *cuts, num_layers]
        yield from_counts([end - start for start, end in pairwise(edges)], num_layers)
