"""The balanced cut of the layers into stages: for the busiest pipeline rank, by measured times or FLOPs, at each rank's
speed and within its memory (docs/planner.md).
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from functools import cache, reduce
from operator import mul, or_
from typing import NamedTuple, TypeVar

from megapipe.errors import ConfigError
from megapipe.layers.model import LayerSpec, stage_parameters
from megapipe.plan.activations import deferred_bytes, layers_of, shared_bytes, stage_bytes, temporary_bytes
from megapipe.plan.hardware import GIB
from megapipe.plan.layer_costs import LayerCosts, stage_costs
from megapipe.plan.memory import USUAL_UNITS_ON_DEVICE, moved_bytes, rank_memory
from megapipe.plan.run_plan import RunPlan
from megapipe.plan.schedule_choice import is_by_hand
from megapipe.schedule.action import Op
from megapipe.schedule.balance import CutQuestion, balanced_cuts
from megapipe.schedule.lifetimes import Held, Item, lifetimes
from megapipe.schedule.partition import Partition, StageCost, StageLayers
from megapipe.schedule.simulate import simulate
from megapipe.sharding.buffers import layout_buffers

BALANCED = ("auto", "measured", "flops")
MOST_RETRIES = 3
# items of `memory.rank_memory`: in proportion to the parameters, and hardly dependent on the cut
STATE = (
    *("weights", "gradients", "gathered weights", "whole gradients"),
    *("optimizer", "fp8 weights", "reduction"),
)
FIXED = ("graphs", "messages", "microbatches")
Numbers = TypeVar("Numbers", bound=tuple[int, ...])


def balanced_cut(draft: RunPlan) -> Partition:
    """Return the candidate cut with the shortest simulated step; the draft's own where the run asks for no balance.

    draft: the run's plan with the cut of `cut_layers`. Raises ConfigError if a rank's memory is too small.
    """
    parallel, num_stages = draft.config.parallel, draft.placement.num_stages
    limits, memory = None, parallel.pipeline_rank_memory  # bytes that each pp_rank may fill
    if memory is not None:
        memory = memory * draft.topology.pp if len(memory) == 1 else memory
        limits = tuple(GIB * gib for gib in memory)
    if is_by_hand(parallel) or parallel.pipeline_balance not in BALANCED:
        if limits is not None:
            _refuse_too_large(draft, [draft.partition], limits)
        return draft.partition
    costs = draft.flop_costs if parallel.pipeline_balance == "flops" else draft.layer_costs
    cost = _stage_cost(costs, num_stages, draft.splits_backward)
    alike = costs.layers_alike and (limits is None or len(draft.model.kinds) == 1)
    question = CutQuestion(draft.placement, draft.config.model.num_layers, cost, draft.rank_speeds, alike)
    cuts = balanced_cuts(question) if limits is None else _cuts_within_memory(draft, question, limits)
    return cuts[0] if len(cuts) == 1 else min(cuts, key=lambda cut: step_of_costs(draft, costs, cut))


def step_of_costs(plan: RunPlan, costs: LayerCosts, cut: Partition) -> float:
    """Return the seconds, in the unit of the costs, of a full step with another cut.

    About three pipeline fills at most are simulated: the steady middle grows by the work of the busiest rank.
    """
    full, pp = plan.batch.num_microbatches, plan.topology.pp
    few = full if full <= 4 * pp else 3 * pp + full % pp
    timeline = simulate(plan.schedule(few), stage_costs(costs, cut, plan.rank_speeds))
    return timeline.makespan_seconds + (full - few) * max(timeline.work_seconds) / few


def _stage_cost(costs: LayerCosts, num_stages: int, splits_backward: bool) -> StageCost:
    """Return the cost of a stage for one microbatch, backward included, as a function of the layers it holds."""
    last = num_stages - 1

    def of_layers(stage: int, first: int, end: int) -> float:
        return costs.of_stage(StageLayers(first, end, stage == 0, stage == last)).step(splits_backward)

    if not costs.layers_alike:
        return of_layers
    # called a million times in a search: tabulated for the first stage, a middle one and the last, by number of layers
    by_count = {
        stage: [of_layers(stage, 0, count) for count in range(len(costs.layers) + 2)]
        for stage in {0, min(1, last), last}
    }
    of_stage = [by_count[stage if stage in (0, last) else 1] for stage in range(num_stages)]
    return lambda stage, first, end: of_stage[stage][end - first]


def _cuts_within_memory(draft: RunPlan, question: CutQuestion, limits: tuple[float, ...]) -> list[Partition]:
    """Return the candidate cuts with which every rank stays within its memory."""
    estimate, spare, tried = RankBytes(draft), [0.0] * len(limits), []
    for _ in range(MOST_RETRIES):
        allowed = [a - b for a, b in zip(limits, spare, strict=True)]

        def fits(pp_rank: int, held: tuple[tuple[int, int], ...], allowed: list[float] = allowed) -> bool:
            return estimate.of(pp_rank, held) <= allowed[pp_rank]

        tried = balanced_cuts(dataclasses.replace(question, fits=fits))
        over = [_bytes_over(draft, cut, limits) for cut in tried]
        fitting = [cut for cut, bytes_over in zip(tried, over, strict=True) if max(bytes_over) <= 0]
        if fitting:
            return fitting
        if not tried:
            break
        # what the estimate leaves out: padding, and messages of another cut
        spare = [a + max(0.0, b) for a, b in zip(spare, over[0], strict=True)]
    _refuse_too_large(draft, [*tried, *balanced_cuts(question)], limits)
    raise AssertionError("a cut that fits was not found although one without limits fits")


def _bytes_over(draft: RunPlan, cut: Partition, limits: tuple[float, ...]) -> list[float]:
    plan = dataclasses.replace(draft, partition=cut).in_units()
    return [rank_memory(plan, rank).total - limit for rank, limit in enumerate(limits)]


def _refuse_too_large(draft: RunPlan, cuts: list[Partition], limits: tuple[float, ...]) -> None:
    """Raise ConfigError if none of the cuts fits, with the bytes that the closest one lacks."""
    over = {cut: _bytes_over(draft, cut, limits) for cut in cuts}
    closest = min(cuts, key=lambda cut: max(over[cut]))
    worst = max(range(len(limits)), key=over[closest].__getitem__)
    if over[closest][worst] > 0:
        raise ConfigError(
            f"pp_rank {worst} needs {(limits[worst] + over[closest][worst]) / GIB:.4g} GiB, --pipeline-rank-memory "
            f"gives it {limits[worst] / GIB:.4g}, and no cut of {draft.config.model.num_layers} layers was found that "
            f"fits (closest: {closest.layer_counts} layers a stage); use more pipeline or tensor-parallel ranks, "
            "recompute, or a smaller microbatch"
        )


class StageBytes(NamedTuple):
    """Terms of the bytes of one stage."""

    elements: int  # parameters, padding included
    kept: int  # from F to B or I, for one microbatch
    deferred: int  # from I to W
    inside: dict[Op, int]  # what an action makes and frees again
    tables: Counter[Hashable]
    largest_moved: int  # of the groups of offloaded activations


class RankBytes:
    """A quick estimate of a pipeline rank's bytes by the layers of each of its stages, to search for a cut.

    The terms are those of `memory.rank_memory`, with which `balanced_cut` checks its choice; padding is that of single
    layers, and messages are taken from `draft`, a plan with any cut. Two layers of offloaded activations are assumed to
    be on the device, which is right within about 13 %.
    """

    def __init__(self, draft: RunPlan) -> None:
        self._draft = draft
        self._memory = cache(lambda pp_rank: rank_memory(draft, pp_rank).items)
        self._moments = cache(self._rank_moments)
        self._elements = cache(self._num_elements)
        self._stages: dict[tuple[int, tuple[LayerSpec, ...]], StageBytes] = {}

    def of(self, pp_rank: int, held: Sequence[tuple[int, int]]) -> float:
        """Return the bytes of a rank. held: (first layer, last layer exclusive) of its stages, in model order."""
        plan, items, stages = self._draft, self._memory(pp_rank), []
        for stage, (first, end) in zip(plan.placement.stages_of(pp_rank), held, strict=True):
            key = stage, plan.model.layers[first:end]
            if key not in self._stages:  # once for layers that are alike
                self._stages[key] = self._stage_bytes(stage, first, end)
            stages.append(self._stages[key])
        sizes = [*(stage.kept for stage in stages), *(stage.deferred for stage in stages)]
        peak = max(
            stages[place].inside.get(op, 0) + max(sum(map(mul, moment, sizes)) for moment in moments)
            for (place, op), moments in self._moments(pp_rank).items()
        )
        of_element = sum(items.get(item, 0) for item in STATE) / plan.num_elements(plan.placement.stages_of(pp_rank))
        state = of_element * sum(stage.elements for stage in stages)
        on_device = USUAL_UNITS_ON_DEVICE * max(stage.largest_moved for stage in stages)
        tables = reduce(or_, (stage.tables for stage in stages)).total()
        return state + peak + sum(items[item] for item in FIXED) + tables + on_device

    def _stage_bytes(self, stage: int, first: int, end: int) -> StageBytes:
        plan = self._draft
        layers = StageLayers(first, end, stage == 0, stage == plan.placement.num_stages - 1)
        model, shape, base = plan.model, plan.shape, self._elements(*layers[2:], None)
        held = layers_of(model, layers)
        moved = moved_bytes(plan, layers, shape)
        return StageBytes(
            base + sum(self._elements(*layers[2:], layer) - base for layer in held),
            sum(stage_bytes(model, shape, layers).values()) - sum(moved),
            deferred_bytes(model, shape, layers),
            temporary_bytes(model, shape, layers),
            shared_bytes(model, (shape,), layers),
            max(moved, default=0),
        )

    def _num_elements(self, has_embedding: bool, has_head: bool, layer: LayerSpec | None) -> int:
        """Return the parameters of a stage with one layer, or without, on one rank, padding included."""
        plan = self._draft
        number = 0 if layer is None else plan.model.layers.index(layer)
        numbers = range(number, number + (layer is not None))
        specs = stage_parameters(plan.specs, numbers, has_embedding, has_head, plan.tied_across_ranks)
        bucket_size = plan.config.parallel.ddp_bucket_size
        layouts = layout_buffers(specs, 0, plan.topology.tp, plan.num_optimizer_shards, bucket_size, plan.tied_kind)
        return sum(layout.numel for layout in layouts)

    def _rank_moments(self, pp_rank: int) -> dict[tuple[int, Op], tuple[tuple[int, ...], ...]]:
        """Return the actions of a step as (place of its stage on the rank, op), each with the moments that no other one
        exceeds in every count: for each stage of the rank the microbatches from F to B or I, then those from I to W.
        """
        plan = self._draft
        stages = plan.placement.stages_of(pp_rank)
        items = [(kind, stage) for kind in (Held.ACTIVATIONS, Held.DEFERRED) for stage in stages]
        held: Counter[Item] = Counter()
        seen: dict[tuple[int, Op], set[tuple[int, ...]]] = {}
        for (stage, op, _), changes in lifetimes(plan.schedule(plan.batch.num_microbatches).rows[pp_rank]):
            held.update(changes.creates)
            if stage in stages:
                seen.setdefault((stages.index(stage), op), set()).add(tuple(held[item] for item in items))
            held.update(changes.leaves)
            held.subtract(changes.frees)
        return {action: undominated(moments) for action, moments in seen.items()}


def undominated(tuples: Iterable[Numbers]) -> tuple[Numbers, ...]:
    """Return the distinct tuples that no other one equals or exceeds in every number."""
    distinct = sorted(set(tuples), reverse=True)
    return tuple(
        one
        for place, one in enumerate(distinct)
        if not any(all(a >= b for a, b in zip(other, one, strict=True)) for other in distinct[:place])
    )
