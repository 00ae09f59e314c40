"""The cut for the busiest pipeline rank, by measured times or FLOPs, at each rank's speed and within its memory
(docs/balance.md).
"""

from __future__ import annotations

import dataclasses

from megapipe.config.config import Config
from megapipe.errors import ConfigError
from megapipe.plan.bubble import step_of_costs
from megapipe.plan.cut import is_by_hand
from megapipe.plan.hardware import GIB
from megapipe.plan.layer_costs import LayerCosts
from megapipe.plan.memory import rank_memory
from megapipe.plan.rank_bytes import RankBytes
from megapipe.plan.run_plan import RunPlan
from megapipe.schedule.balance import CutQuestion, Fits, balanced_cuts
from megapipe.schedule.families import SCHEDULES
from megapipe.schedule.partition import Partition, StageCost, StageLayers

BALANCED = ("auto", "measured", "flops")
MOST_RETRIES = 3


def _check_rank_settings(config: Config) -> None:
    """Raise ConfigError for settings of pipeline ranks that do not fit the pipeline."""
    parallel = config.parallel
    pp = parallel.pipeline_model_parallel_size
    if parallel.pipeline_balance == "measured" and parallel.pipeline_layer_times is None:
        raise ConfigError(
            "--pipeline-balance measured needs --pipeline-layer-times FILE (megapipe profile-layers writes it)"
        )
    speeds, memory = parallel.pipeline_rank_speeds, parallel.pipeline_rank_memory
    if speeds is not None and len(speeds) != pp:
        raise ConfigError(
            f"--pipeline-rank-speeds names {len(speeds)} ranks, --pipeline-model-parallel-size is {pp}; give one "
            "number for each"
        )
    if memory is not None and len(memory) not in (1, pp):
        raise ConfigError(
            f"--pipeline-rank-memory names {len(memory)} ranks, --pipeline-model-parallel-size is {pp}; give one "
            "number, or one for each"
        )


def balanced_cut(draft: RunPlan) -> Partition:
    """Return the candidate cut with the shortest simulated step; the draft's own where the run asks for no balance.

    draft: the run's plan with the cut of `plan.cut`. Raises ConfigError if settings of ranks do not fit the pipeline,
    or if a rank's memory is too small.
    """
    _check_rank_settings(draft.config)
    if is_by_hand(draft.config.parallel) or draft.config.parallel.pipeline_balance not in BALANCED:
        _refuse_too_large(draft, [draft.partition])
        return draft.partition
    costs = draft.flop_costs if draft.config.parallel.pipeline_balance == "flops" else draft.layer_costs
    cost = stage_cost(costs, draft.placement.num_stages, SCHEDULES[draft.schedule_name].splits_backward)
    question = CutQuestion(draft.placement, draft.config.model.num_layers, cost, draft.rank_speeds, costs.layers_alike)
    cuts = _within_memory(draft, question)
    if len(cuts) == 1:
        return cuts[0]
    return min(cuts, key=lambda cut: step_of_costs(draft, costs, cut))


def stage_cost(costs: LayerCosts, num_stages: int, splits_backward: bool) -> StageCost:
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
    of_stage = [by_count[0 if stage == 0 else last if stage == last else 1] for stage in range(num_stages)]
    return lambda stage, first, end: of_stage[stage][end - first]


def _within_memory(draft: RunPlan, question: CutQuestion) -> list[Partition]:
    """Return the candidate cuts with which every rank stays within its memory."""
    limits = rank_limits(draft)
    if limits is None:
        return balanced_cuts(question)
    estimate, spare, tried = RankBytes(draft), [0.0] * len(limits), []
    for _ in range(MOST_RETRIES):
        tried = balanced_cuts(
            dataclasses.replace(question, fits=_fits(estimate, [a - b for a, b in zip(limits, spare, strict=True)]))
        )
        over = [_bytes_over(draft, cut, limits) for cut in tried]
        fitting = [cut for cut, bytes_over in zip(tried, over, strict=True) if max(bytes_over) <= 0]
        if fitting:
            return fitting
        if not tried:
            break
        # what the estimate leaves out: padding, and messages of another cut
        spare = [a + max(0.0, b) for a, b in zip(spare, over[0], strict=True)]
    _refuse_too_large(draft, [*tried, *balanced_cuts(question)])
    raise AssertionError("a cut that fits was not found although one without limits fits")


def _fits(estimate: RankBytes, limits: list[float]) -> Fits:
    return lambda pp_rank, layers: estimate.of(pp_rank, layers) <= limits[pp_rank]


def rank_limits(plan: RunPlan) -> tuple[float, ...] | None:
    """Return the bytes that each pp_rank may fill; None without --pipeline-rank-memory."""
    memory = plan.config.parallel.pipeline_rank_memory
    if memory is None:
        return None
    return tuple(GIB * gib for gib in (memory * plan.topology.pp if len(memory) == 1 else memory))


def _bytes_over(draft: RunPlan, cut: Partition, limits: tuple[float, ...]) -> list[float]:
    plan = dataclasses.replace(draft, partition=cut)
    return [rank_memory(plan, rank).total - limit for rank, limit in enumerate(limits)]


def _refuse_too_large(draft: RunPlan, cuts: list[Partition]) -> None:
    """Raise ConfigError if none of the cuts fits, with the bytes that the closest one lacks."""
    limits = rank_limits(draft)
    if limits is None:
        return
    over = {cut: _bytes_over(draft, cut, limits) for cut in cuts}
    closest = min(cuts, key=lambda cut: max(over[cut]))
    worst = max(range(len(limits)), key=over[closest].__getitem__)
    if over[closest][worst] > 0:
        raise ConfigError(
            f"pp_rank {worst} needs {(limits[worst] + over[closest][worst]) / GIB:.4g} GiB, --pipeline-rank-memory "
            "gives it "
            f"{limits[worst] / GIB:.4g}, and no cut of {draft.config.model.num_layers} layers was found that fits "
            "(closest: "
            f"{closest.layer_counts} layers a stage); use more pipeline or tensor-parallel ranks, recompute, or a "
            "smaller microbatch"
        )
