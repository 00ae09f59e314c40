"""The audit of every rank of a world in plain Python, and what has to be run to see every memory state of a step.

Ranks of one kind do the same, so one of them is counted. A step repeats itself once the pipeline is full: an action's
memory depends on its kind and on what is alive around it, not on the microbatch's number. A shorter step therefore has
the same peak if every action of the longer one occurs in it with the same things alive.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from megapipe.errors import CommunicationError, MegapipeError
from megapipe.plan.run_plan import RunPlan
from megapipe.schedule.action import Action, Op
from megapipe.schedule.lifetimes import Item, lifetimes
from megapipe.schedule.placement import Placement
from megapipe.sharding.audit import audit_buffers
from megapipe.topology import GROUP_NAMES, Topology, all_coordinates


@dataclass(frozen=True)
class Kind:
    """Ranks with the same shapes and the same row of the schedule."""

    ranks: tuple[int, ...]  # global, ascending
    pp_ranks: tuple[int, ...]


def audit_grid(plan: RunPlan) -> int:
    """Check every rank of the world and return the world's number of process groups.

    Each place in the grid is taken by one rank. Each rank is in exactly one group of every kind (of 'embedding' only
    the ends of a pipeline are), the same that it builds itself. Every stage's parameters fill their buffers on every
    tp_rank. Raises CommunicationError, ConfigError.
    """
    topology = plan.topology
    places = {coordinates for _, coordinates in all_coordinates(topology)}
    if len(places) != topology.world_size:
        raise CommunicationError(f"{topology.world_size} ranks have {len(places)} places in the grid")
    total = sum(_audit_groups(topology, name) for name in GROUP_NAMES)
    for stage in range(plan.placement.num_stages):
        for tp_rank in range(topology.tp):
            audit_buffers(plan.stage_specs[stage], plan.buffers(stage, tp_rank), tp_rank, topology.tp)
    return total


def _audit_groups(topology: Topology, name: str) -> int:
    groups = topology.groups(name)
    seen = [0] * topology.world_size
    for ranks in groups:
        for rank in ranks:
            seen[rank] += 1
        if topology.group_of(name, ranks[0]) != ranks or topology.group_of(name, ranks[-1]) != ranks:
            raise CommunicationError(
                f"rank {ranks[0]} or {ranks[-1]} builds a group {name} other than {ranks[:4]}..., which it belongs to"
            )
    for rank, count in enumerate(seen):
        expected = 1 if name != "embedding" or topology.coordinates(rank).pp_rank in (0, topology.pp - 1) else 0
        if count != expected:
            raise CommunicationError(f"rank {rank} is in {count} groups {name}, not in {expected}")
    return len(groups)


def kinds_of_ranks(plan: RunPlan) -> tuple[Kind, ...]:
    """Return the kinds of all ranks of the world, ordered by their first ranks. dp and cp make no difference to a
    step."""
    topology = plan.topology
    found: dict[Hashable, list[int]] = {}
    by_place: dict[tuple[int, int], Hashable] = {}
    rows: dict[int, Hashable] = {pp_rank: _row(plan, pp_rank) for pp_rank in range(topology.pp)}
    for rank, place in all_coordinates(topology):
        key = place.pp_rank, place.tp_rank
        if key not in by_place:
            by_place[key] = rows[place.pp_rank], _shapes(plan, *key)
        found.setdefault(by_place[key], []).append(rank)
    pp_ranks = (tuple(sorted({topology.coordinates(rank).pp_rank for rank in ranks})) for ranks in found.values())
    kinds = (Kind(tuple(ranks), where) for ranks, where in zip(found.values(), pp_ranks, strict=True))
    return tuple(sorted(kinds, key=lambda kind: kind.ranks))


def _row(plan: RunPlan, pp_rank: int) -> Hashable:
    """Return a rank's actions with its stages numbered from 0, and its layers: equal for ranks that do the same."""
    held = plan.placement.stages_of(pp_rank)
    own = {stage: index for index, stage in enumerate(held)}
    count = plan.batch.full // plan.batch.samples_per_microbatch
    actions = tuple((own[stage], op, microbatch) for stage, op, microbatch in plan.schedule(count).rows[pp_rank])
    layers = tuple(plan.partition.stages[stage] for stage in held)
    return (
        actions,
        tuple((part.num_layers, part.has_embedding, part.has_head) for part in layers),
        plan.num_weight_versions(pp_rank),
    )


def _shapes(plan: RunPlan, pp_rank: int, tp_rank: int) -> Hashable:
    tp = plan.topology.tp
    return tuple(
        tuple(sorted(spec.local_shape(tp_rank, tp) for spec in plan.stage_specs[stage]))
        for stage in plan.placement.stages_of(pp_rank)
    )


Situation = tuple[int, Op, tuple[tuple[str, int, int], ...]]


def situations(
    row: Iterable[Action], placement: Placement | None = None, pp_rank: int = 0, send_depth: int | None = None
) -> set[Situation]:
    """Return (stage, op, numbers of what is alive at its start) of every action. The arguments are those of
    `lifetimes`."""
    alive: Counter[Item] = Counter()
    found: set[Situation] = set()
    for (stage, op, _), changes in lifetimes(row, placement, pp_rank, send_depth):
        found.add((stage, op, tuple(sorted((kind.value, of, count) for (kind, of), count in alive.items() if count))))
        alive.subtract(changes.takes)
        alive.update(changes.creates)
        alive.subtract(changes.frees)
        alive.update(changes.leaves)
    return found


def microbatches_to_run(plan: RunPlan, pp_rank: int) -> int:
    """Return the fewest microbatches whose row has all situations of the full step's row, or the full number.

    Asynchronous schedules change their weights within the step, and with offloading the actions around decide what is
    on the device: both are always run in full.
    """
    full = plan.batch.full // plan.batch.samples_per_microbatch
    if not plan.is_synchronous or plan.config.offload.cpu_offloading_num_layers:
        return full
    pp, where = plan.topology.pp, (plan.placement, pp_rank, plan.send_depth)
    wanted = situations(plan.schedule(full).rows[pp_rank], *where)
    for count in range(2 * pp, full // 2 + 1, pp):
        try:
            row = plan.schedule(count).rows[pp_rank]
        except MegapipeError:  # the schedule cannot run this number
            continue
        if wanted <= situations(row, *where):
            return count
    return full
