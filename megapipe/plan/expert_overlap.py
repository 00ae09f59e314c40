"""The times of the parts of a plan's layers, and what a step gains if all-to-alls of experts overlap with computation.

The rows are those of `schedule.parts`: attention, dispatch, MLP and combine of each layer, with the plan's own cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from megapipe.plan.hardware import Hardware
from megapipe.plan.layer_time import OpSeconds, expert_links, head_seconds, layer_seconds, ring_link
from megapipe.plan.run_plan import RunPlan
from megapipe.plan.traces import with_recompute
from megapipe.schedule.action import Op
from megapipe.schedule.costs import Seconds
from megapipe.schedule.experts import ExpertModel
from megapipe.schedule.families import SCHEDULES
from megapipe.schedule.partition import Partition
from megapipe.schedule.parts import Parts, parts_of
from megapipe.schedule.schedule import Schedule
from megapipe.schedule.simulate import Timeline, simulate

MOST_FILLS = 6  # times pp microbatches that are simulated; longer steps only repeat their middle


@dataclass(frozen=True)
class PlannedExperts(ExpertModel):
    """The parts of a plan, cut into its stages."""

    partition: Partition | None = None

    def parts(self, num_stages: int) -> Parts:
        """Return the parts of the plan's stages."""
        assert self.partition is not None and len(self.partition.stages) == num_stages
        return parts_of(self.partition, self.has_experts)


def expert_model(plan: RunPlan, hardware: Hardware) -> PlannedExperts:
    """Return the seconds of the plan's parts on some hardware; kinds of layers that differ by their mean.

    What a backward recomputes belongs to the part that it recomputes. Layers of multi-token prediction belong to the
    head; their all-to-alls are left out.
    """
    shape, links = plan.shape, expert_links(plan, hardware)
    tp_link = ring_link(plan.topology, "tp", hardware.node, hardware.network)
    kinds = {
        kind: [(branch, layer_seconds(branch, shape, hardware, tp_link, experts=links)) for branch in kind.branches]
        for kind in plan.model.kinds
    }
    every = [timed for layer in plan.model.layers for timed in kinds[layer]]
    attention = [seconds for branch, seconds in every if not branch.config.has_mlp]
    experts = [seconds for branch, seconds in every if branch.num_experts]
    dense = [seconds for branch, seconds in every if branch.config.has_mlp and not branch.num_experts]
    # half of the messages go to the experts, half come back
    head = head_seconds(plan.model, shape, hardware, tp_link)
    for layer in plan.model.predictions:
        own = with_recompute(shape, shape.recompute.of_predictions)
        head += layer_seconds(layer, own, hardware, tp_link, experts=links)
    forward, backward = (
        sum(getattr(one, half).get("ep", 0.0) for one in experts) / max(len(experts), 1) / 2
        for half in ("forward", "inputs")
    )
    link = hardware.network if plan.topology.crosses_nodes("pp") else hardware.node
    return PlannedExperts(
        has_experts=tuple(layer.num_experts > 0 for layer in plan.model.layers),
        attention=_mean(attention),
        dense_mlp=_mean(dense),
        expert_mlp=_mean(experts),
        head=_mean([head]),
        dispatch=(forward, backward),
        combine=(forward, backward),
        transfer_seconds=plan.message_bytes / link.bytes_per_second,
        latency_seconds=link.latency_seconds,
        partition=plan.partition,
    )


def hidden_seconds(plan: RunPlan, hardware: Hardware, count: int | None = None, fills: int = MOST_FILLS) -> float:
    """Return the seconds that --overlap-moe-expert-parallel-comm takes off a step; 0 without it.

    The rows that the engine runs, simulated with all-to-alls that block the computation and with such that do not. Of a
    long step the first `fills` are simulated; each further one gains what one in the middle does. count: microbatches
    of the step, if not the plan's.
    """
    t, count = plan.topology, plan.batch.num_microbatches if count is None else count
    if plan.parts is None:
        return 0.0
    few = min(count, fills * t.pp + count % t.pp)
    parallel, model, rows = plan.config.parallel, expert_model(plan, hardware), plan.part_schedule(few)
    costs = [model.part_costs(plan.parts, overlap) for overlap in (False, True)]
    blocking, overlapping = (
        simulate(rows, replace(each, overlap=parallel.overlap_p2p_comm, rank_speeds=plan.rank_speeds)) for each in costs
    )
    longer = (count - few) // t.pp * (fill_seconds(blocking) - fill_seconds(overlapping))
    return max(0.0, blocking.makespan_seconds - overlapping.makespan_seconds + longer)


def fill_seconds(timeline: Timeline) -> float:
    """Return the seconds by which a step is longer with as many microbatches more as there are ranks: those between two
    input gradients of the last stage in mid-step that are so many apart.
    """
    schedule = timeline.schedule
    last = schedule.num_stages - 1
    rank = schedule.placement.rank_of_stage[last]
    row = zip(schedule.rows[rank], timeline.ends[rank], strict=True)
    ends = [end for (stage, op, _), end in row if stage == last and op in (Op.B, Op.I)]
    return _apart(schedule, ends, max(timeline.work_seconds))


def _apart(schedule: Schedule, ends: Sequence[float], work: float) -> float:
    """Return the seconds between two of these ends in mid-step that are as many apart as there are ranks."""
    apart = schedule.num_ranks * schedule.num_slices // len(schedule.placement.directions)
    family = SCHEDULES[schedule.name]
    middle = len(ends) - 1 - apart - (apart // 2 if family.takes_chunks and family.chunks is None else 0)
    return ends[middle] - ends[middle - apart] if middle >= apart else work * apart / len(ends)


def _mean(every: Sequence[OpSeconds]) -> Seconds:
    """Return the mean computation in F, I and W, without the messages of experts."""

    def of(op: Op, half: str) -> float:
        return sum(each.of(op) - getattr(each, half).get("ep", 0.0) for each in every) / max(len(every), 1)

    return Seconds(of(Op.F, "forward"), of(Op.I, "inputs"), of(Op.W, "weights"))
