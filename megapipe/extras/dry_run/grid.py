"""The audit of every rank of a world in plain Python, and what has to be run to see every memory state of a step.

Ranks of one kind do the same, so one of them is counted. An action's memory depends on its kind and on what is alive
around it, not on the microbatch's number: a shorter step has the same peak if every action of the longer one occurs in
it with the same things alive.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from megapipe.errors import CommunicationError, MegapipeError
from megapipe.plan.activations import layers_of
from megapipe.plan.run_plan import RunPlan
from megapipe.schedule.action import Action, Op
from megapipe.schedule.lifetimes import Item, lifetimes
from megapipe.schedule.placement import Placement
from megapipe.sharding.audit import audit_buffers
from megapipe.topology import GROUP_NAMES, all_coordinates


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
    places = [place for _, place in all_coordinates(topology)]
    if len(set(places)) != topology.world_size:
        raise CommunicationError(f"{topology.world_size} ranks have {len(set(places))} places in the grid")
    num_groups = 0
    for name in GROUP_NAMES:
        groups = topology.groups(name)
        num_groups += len(groups)
        counts = Counter(rank for ranks in groups for rank in ranks)
        for ranks in groups:
            if topology.group_of(name, ranks[0]) != ranks or topology.group_of(name, ranks[-1]) != ranks:
                ends = f"rank {ranks[0]} or {ranks[-1]}"
                raise CommunicationError(f"{ends} builds a group {name} other than {ranks[:4]}..., which it belongs to")
        for rank, place in enumerate(places):
            expected = 1 if name != "embedding" or place.pp_rank in (0, topology.pp - 1) else 0
            if counts[rank] != expected:
                raise CommunicationError(f"rank {rank} is in {counts[rank]} groups {name}, not in {expected}")
    for stage in range(plan.placement.num_stages):
        for tp_rank in range(topology.tp):
            experts = (0, topology.ep * topology.etp)
            audit_buffers(plan.stage_specs[stage], plan.buffers(stage, tp_rank), tp_rank, topology.tp, experts)
    return num_groups


def kinds_of_ranks(plan: RunPlan) -> tuple[Kind, ...]:
    """Return the kinds of all ranks, ordered by their first ranks; dp and cp make no difference to a step."""
    topology, schedule = plan.topology, plan.schedule(plan.batch.num_microbatches)
    behaviour: dict[tuple[int, int], Hashable] = {}  # by pp_rank and tp_rank: what such a rank does and holds
    for pp_rank in range(topology.pp):
        held = plan.placement.stages_of(pp_rank)
        actions = tuple((held.index(stage), op, microbatch) for stage, op, microbatch in schedule.rows[pp_rank])
        stages = (plan.partition.stages[stage] for stage in held)
        layers = tuple((layers_of(plan.model, part), part.has_embedding, part.has_head) for part in stages)
        specs = [plan.stage_specs[stage] for stage in held]
        row = actions, layers, plan.num_weight_versions(pp_rank)
        for tp_rank in range(topology.tp):
            cuts = {False: (tp_rank, topology.tp), True: (0, topology.ep * topology.etp)}
            shapes = tuple(tuple(sorted(spec.local_shape(*cuts[spec.is_expert]) for spec in each)) for each in specs)
            behaviour[pp_rank, tp_rank] = row, shapes
    found: dict[Hashable, list[int]] = {}
    for rank, place in all_coordinates(topology):
        found.setdefault(behaviour[place.pp_rank, place.tp_rank], []).append(rank)
    return tuple(
        Kind(tuple(ranks), tuple(sorted({topology.coordinates(rank).pp_rank for rank in ranks})))
        for ranks in found.values()
    )


Situation = tuple[int, Op, tuple[tuple[str, int, int], ...]]


def situations(
    row: Iterable[Action], placement: Placement | None = None, pp_rank: int = 0, send_depth: int | None = None
) -> set[Situation]:
    """Return (stage, op, numbers of what is alive at its start) of every action. Arguments: those of `lifetimes`."""
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

    Asynchronous schedules change their weights within the step, with offloading, or with stages in parts, the actions
    around decide what is on the device, and slices of a microbatch differ in size: these are always run in full.
    """
    full, is_cut = plan.batch.num_microbatches, plan.parts is not None or plan.num_slices > 1
    if not plan.is_synchronous or plan.config.offload.cpu_offloading_num_layers or is_cut:
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
