"""A quick estimate of a pipeline rank's bytes by the number of layers on each of its stages, for the search for a cut.

The terms are those of `memory.rank_memory`, from the rows of the schedule and the parameters and activations of a
layer; buffer padding, messages and temporaries are taken from a plan with any cut. Two layers of offloaded
activations are assumed to be on the device, which is right within about 13 %. `balance` checks the cut that it
chooses with `rank_memory`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from megapipe.layers.model import stage_parameters
from megapipe.plan.activations import deferred_bytes, stage_bytes
from megapipe.plan.memory import RankMemory, offloaded_groups, rank_memory
from megapipe.plan.offload import USUAL_UNITS_ON_DEVICE, GroupBytes
from megapipe.plan.run_plan import RunPlan
from megapipe.schedule.action import Action, Op
from megapipe.schedule.partition import StageLayers
from megapipe.sharding.buffers import layout_buffers

STATE = ("weights", "gradients", "optimizer", "fp8 weights", "rollback", "reduction")
FIXED = ("recompute", "temporaries", "graphs", "messages", "tables", "microbatches")  # hardly depend on the cut


class RankBytes:
    """Estimates for the cuts of one plan. draft: the plan with any cut of its layers."""

    def __init__(self, draft: RunPlan) -> None:
        self._draft = draft
        self._count = draft.batch.full // draft.batch.samples_per_microbatch
        self._ranks: dict[int, RankMemory] = {}
        self._elements: dict[int, tuple[int, int]] = {}
        self._moments: dict[int, tuple[dict[int, tuple[int, int]], ...]] = {}
        self._stages: dict[tuple[int, int], tuple[int, int]] = {}

    def of(self, pp_rank: int, layers: Sequence[int]) -> float:
        """Return the bytes of a rank with so many layers on each of its stages, in model order."""
        held = dict(zip(self._draft.placement.stages_of(pp_rank), layers, strict=True))
        parts = {stage: self._parts(stage, count) for stage, count in held.items()}
        peak = max(
            sum(live * parts[stage][0] + waiting * parts[stage][1] for stage, (live, waiting) in moment.items())
            for moment in self._moments_of(pp_rank)
        )
        fixed = sum(size for item, size in self._reference(pp_rank).items.items() if item in FIXED)
        state = sum(self._state(pp_rank, stage, count) for stage, count in held.items())
        return state + peak + fixed + self._moving(held)

    def _parts(self, stage: int, count: int) -> tuple[int, int]:
        """Return the bytes kept from F to B, and from I to W, by a stage with so many layers."""
        if (stage, count) not in self._stages:
            plan, last = self._draft, self._draft.placement.num_stages - 1
            layers = StageLayers(0, count, stage == 0, stage == last)
            moved = sum(group.moved for group in self._groups(stage, count))
            self._stages[stage, count] = (
                sum(stage_bytes(plan.model, plan.shape, layers).values()) - moved,
                deferred_bytes(plan.model, plan.shape, layers),
            )
        return self._stages[stage, count]

    def _groups(self, stage: int, count: int) -> tuple[GroupBytes, ...]:
        """Return the groups of a stage with so many layers; none where nothing is offloaded."""
        if not self._draft.config.offload.cpu_offloading_num_layers:
            return ()
        last = self._draft.placement.num_stages - 1
        return offloaded_groups(self._draft, stage, StageLayers(0, count, stage == 0, stage == last))

    def _moving(self, held: Mapping[int, int]) -> int:
        """Return the offloaded activations that are on the device at the peak."""
        moved = [group.moved for stage, count in held.items() for group in self._groups(stage, count)]
        return USUAL_UNITS_ON_DEVICE * max(moved, default=0)

    def _reference(self, pp_rank: int) -> RankMemory:
        if pp_rank not in self._ranks:
            self._ranks[pp_rank] = rank_memory(self._draft, pp_rank)
        return self._ranks[pp_rank]

    def _state(self, pp_rank: int, stage: int, count: int) -> float:
        """Return the bytes of weights, gradients and optimizer state, which are linear in the layers."""
        one, two = self._elements_of(stage)
        plan, items = self._draft, self._reference(pp_rank).items
        held = sum(layout.numel for s in plan.placement.stages_of(pp_rank) for layout in plan.buffers(s, 0))
        return (one + (count - 1) * (two - one)) / held * sum(items[item] for item in STATE)

    def _elements_of(self, stage: int) -> tuple[int, int]:
        """Return the parameters of a stage with one layer and with two, on one rank, padding included."""
        if stage not in self._elements:
            plan, last = self._draft, self._draft.placement.num_stages - 1
            bucket = plan.config.parallel.ddp_bucket_size
            assert bucket is not None
            counts = []
            for count in (1, 2):
                specs = stage_parameters(plan.specs, range(count), stage == 0, stage == last, plan.tied_across_ranks)
                layouts = layout_buffers(specs, 0, plan.topology.tp, plan.num_optimizer_shards, bucket, plan.tied_kind)
                counts.append(sum(layout.numel for layout in layouts))
            self._elements[stage] = counts[0], counts[1]
        return self._elements[stage]

    def _moments_of(self, pp_rank: int) -> tuple[dict[int, tuple[int, int]], ...]:
        """Return the moments of a step that no other one exceeds in every count: stage -> (microbatches from F to B
        or I, from I to W).
        """
        if pp_rank not in self._moments:
            row = self._draft.schedule(self._count).rows[pp_rank]
            self._moments[pp_rank] = _largest_moments(row, self._draft.placement.stages_of(pp_rank))
        return self._moments[pp_rank]


def _largest_moments(row: Sequence[Action], stages: Sequence[int]) -> tuple[dict[int, tuple[int, int]], ...]:
    live, waiting = Counter(dict.fromkeys(stages, 0)), Counter(dict.fromkeys(stages, 0))
    seen: set[tuple[int, ...]] = set()
    for stage, op, _ in row:
        if op is Op.F:
            live[stage] += 1
            seen.add((*(live[s] for s in stages), *(waiting[s] for s in stages)))
        elif op in (Op.B, Op.I):
            live[stage] -= 1
            waiting[stage] += op is Op.I
        elif op is Op.W:
            waiting[stage] -= 1
    largest = [moment for moment in seen if not any(_exceeds(other, moment) for other in seen)]
    half = len(stages)
    return tuple({stage: (moment[at], moment[half + at]) for at, stage in enumerate(stages)} for moment in largest)


def _exceeds(other: Sequence[int], moment: Sequence[int]) -> bool:
    return other != moment and all(more >= less for more, less in zip(other, moment, strict=True))
