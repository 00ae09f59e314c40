"""Every rank of a world in plain Python: places, groups and parameters audited, and which ranks differ in nothing that a step can show."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from megapipe.errors import CommunicationError
from megapipe.plan.run_plan import RunPlan
from megapipe.sharding.audit import audit_buffers
from megapipe.topology import GROUP_NAMES, Topology, all_coordinates


@dataclass(frozen=True)
class Kind:
    """Ranks with the same shapes and the same row of the schedule, ascending, and their places in the pipeline."""

    ranks: tuple[int, ...]
    pp_ranks: tuple[int, ...]

    @property
    def count(self) -> int:
        return len(self.ranks)


def audit_grid(plan: RunPlan) -> int:
    """Check every rank of the world; returns the number of process groups that the world has.

    Each place in the grid is taken once; of every kind of group each rank is in exactly one ('embedding': the ends of a pipeline), the one
    that it will itself build; every stage's parameters fill their buffers on every tp_rank. Raises CommunicationError, ConfigError.
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
                f"group {name} of ranks {ranks[:4]}... is another one when rank {ranks[0]} or {ranks[-1]} builds it"
            )
    for rank, count in enumerate(seen):
        expected = 1 if name != "embedding" or topology.coordinates(rank).pp_rank in (0, topology.pp - 1) else 0
        if count != expected:
            raise CommunicationError(f"rank {rank} is in {count} groups {name}, not in {expected}")
    return len(groups)


def kinds_of_ranks(plan: RunPlan) -> tuple[Kind, ...]:
    """All ranks of the world, each in one kind, by their first ranks. dp and cp never make a difference to a step."""
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
    """What a rank does in a step, its stages numbered as its own: those with the same layers and ends are alike."""
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
