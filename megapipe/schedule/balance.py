"""Cuts of the layers into stages that balance the load of ranks with several stages, within a memory limit per rank.

`plan.cut` simulates the proposed cuts and takes the best.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate, pairwise
from typing import NamedTuple

from megapipe.schedule.partition import Partition, StageCost, cut_by_stage_cost, from_counts
from megapipe.schedule.placement import Placement


@dataclass(frozen=True)
class CutQuestion:
    """A model to be cut, and the ranks that it is cut for."""

    placement: Placement
    num_layers: int
    cost: StageCost  # of one microbatch on a rank of speed 1
    rank_speeds: tuple[float, ...]  # of each pp_rank, above 0
    layers_alike: bool  # the cost of a stage, and whether it fits, depend only on the number of its layers
    # (pp_rank, (first layer, last layer exclusive) of each of its stages in model order) -> they fit into its memory;
    # fewer layers must fit too. None: memory has no limit
    fits: Callable[[int, tuple[tuple[int, int], ...]], bool] | None = None

    @property
    def fewest(self) -> int:
        """The least number of layers of a stage."""
        return 1 if self.num_layers >= self.placement.num_stages else 0

    @cached_property
    def shares(self) -> tuple[Share, ...]:
        """The stages held by the same rank, or with two directions by the same two ranks."""
        ranks_of: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.placement.num_ranks):
            ranks_of.setdefault(self.placement.stages_of(rank), []).append(rank)
        return tuple(
            Share(stages, tuple(ranks), min(self.rank_speeds[rank] for rank in ranks))
            for stages, ranks in ranks_of.items()
        )

    def rank_fits(self, rank: int, ends: Sequence[int]) -> bool:
        """Return True if a rank's stages fit. ends: last layers, exclusive, of the first stages; others are empty."""
        if self.fits is None:
            return True
        edges = [0, *ends, *[self.num_layers] * (self.placement.num_stages - len(ends) + 1)]
        starts = [*edges[: len(ends)], *[self.num_layers] * (self.placement.num_stages - len(ends))]
        return self.fits(rank, tuple((starts[stage], edges[stage + 1]) for stage in self.placement.stages_of(rank)))


class Share(NamedTuple):
    """Stages of a rank that are busy as one."""

    stages: tuple[int, ...]
    ranks: tuple[int, ...]
    speed: float  # of the slowest of its ranks


def balanced_cuts(question: CutQuestion) -> list[Partition]:
    """Return distinct cuts worth simulating; [] if none is found that fits.

    The first balances single stages, exactly by dynamic programming, which is all that one stage per rank needs. If
    rank speeds differ, another one assumes equal speeds. With several stages per rank the others balance the sums of
    ranks. If layers are alike and memory is not limited, each layer goes to the rank that is then least busy, so the
    largest sum is minimal. Otherwise `_searched` finds the smallest largest sum where it can keep all partial cuts, and
    starts from what moving single layers between neighbouring stages reaches. With two directions, ranks that share
    their stages count as one.
    """
    placement = question.placement
    found = [_by_stage(question)]
    if len(set(question.rank_speeds)) > 1:
        found.append(_by_stage(replace(question, rank_speeds=(1.0,) * len(question.rank_speeds))))
    if placement.num_chunks > 1:

        def one_more(counts: Sequence[int], stage: int) -> float:
            return round(question.cost(stage, 0, counts[stage] + 1), 12)

        if question.layers_alike:
            # by the cost of one more layer; of equal stages the first or the last in the model
            found.append(_filled(question, lambda counts, stage: (one_more(counts, stage), stage)))
            found.append(_filled(question, lambda counts, stage: (one_more(counts, stage), -stage)))
            if not any(found):  # the last stages first: they keep their activations for the shortest time
                found.append(_filled(question, lambda counts, stage: (-stage,)))
        else:
            found += [_descended(question, start) for start in found if start is not None]
        if question.fits is not None or not question.layers_alike:
            found += _searched(question, [cut for cut in found if cut is not None])
    return list(dict.fromkeys(cut for cut in found if cut is not None))


def rank_loads(question: CutQuestion, cut: Partition) -> tuple[float, ...]:
    """Return the seconds that each pp_rank computes for one microbatch (with two directions: for one of each)."""
    of_stage = [question.cost(i, stage.first_layer, stage.last_layer_exclusive) for i, stage in enumerate(cut.stages)]
    return tuple(
        sum(of_stage[stage] for stage in question.placement.stages_of(rank)) / speed
        for rank, speed in enumerate(question.rank_speeds)
    )


def _by_stage(question: CutQuestion) -> Partition | None:
    """Minimize the maximum over stages, each at the speed of its slowest rank."""
    placement, alone = question.placement, question.placement.num_chunks == 1
    slowest = [
        min(question.rank_speeds[rank] for rank in placement.ranks_of(stage)) for stage in range(placement.num_stages)
    ]

    def cost(stage: int, first: int, end: int) -> float:
        if alone and question.fits is not None and not question.fits(placement.rank_of_stage[stage], ((first, end),)):
            return float("inf")
        return question.cost(stage, first, end) / slowest[stage]

    cut = cut_by_stage_cost(cost, question.num_layers, placement.num_stages, question.layers_alike)
    return cut if cut is not None and _all_fit(question, cut.layer_counts) else None


def _all_fit(question: CutQuestion, counts: Sequence[int]) -> bool:
    ends = list(accumulate(counts))
    return all(question.rank_fits(rank, ends) for rank in range(question.placement.num_ranks))


# filling ranks with layers that are alike


def _filled(question: CutQuestion, priority: Callable[[Sequence[int], int], tuple[float, ...]]) -> Partition | None:
    """Give every stage its fewest layers, then each layer to the share that is least busy with it; None if not all
    layers fit.

    priority: (layer counts, stage) -> key by which the stages of a share get their next layer, least first.
    """
    placement, fits = question.placement, question.fits
    counts = [question.fewest] * placement.num_stages

    def all_fit(stages: Sequence[int], ranks: Sequence[int]) -> bool:
        return fits is None or all(fits(rank, tuple((0, counts[stage]) for stage in stages)) for rank in ranks)

    if not all(all_fit(share.stages, share.ranks) for share in question.shares):
        return None
    waiting: list[tuple[float, int, int]] = []  # (load with one more layer, share, its stage)

    def offer(index: int) -> None:
        stages, ranks, speed = question.shares[index]
        for stage in sorted(stages, key=partial(priority, counts)):
            counts[stage] += 1
            load = sum(question.cost(s, 0, counts[s]) for s in stages) / speed
            fit = all_fit(stages, ranks)
            counts[stage] -= 1
            if fit:
                heapq.heappush(waiting, (load, index, stage))
                return

    for index in range(len(question.shares)):
        offer(index)
    for _ in range(question.num_layers - sum(counts)):
        if not waiting:
            return None
        _, index, stage = heapq.heappop(waiting)
        counts[stage] += 1
        offer(index)
    return from_counts(counts, question.num_layers)


# moving layers that are not alike


def _descended(question: CutQuestion, start: Partition) -> Partition:
    """Move single layers over stage borders until that no longer makes the busiest ranks less busy."""

    def sorted_loads(cut: Partition) -> list[float]:
        return sorted(rank_loads(question, cut), reverse=True)

    def neighbours(counts: Sequence[int]) -> Iterator[list[int]]:
        for border in range(len(counts) - 1):
            for giver, taker in ((border, border + 1), (border + 1, border)):
                if counts[giver] > question.fewest:
                    moved = list(counts)
                    moved[giver] -= 1
                    moved[taker] += 1
                    yield moved

    best, best_loads = start, sorted_loads(start)
    while True:
        for counts in neighbours(best.layer_counts):
            if _all_fit(question, counts):
                cut = from_counts(counts, question.num_layers)
                loads = sorted_loads(cut)
                if loads < best_loads:
                    best, best_loads = cut, loads
                    break
        else:
            return best


# searching all cuts

MOST_PARTIAL_CUTS = 5000  # of all numbers of stages together, kept by a search: about a second
MOST_FOUND = 3


class _PartialCut(NamedTuple):
    """The first stages of a cut."""

    loads: tuple[float, ...]  # of each share, relative to the limit; the fixed costs of later stages included
    ends: tuple[int, ...]  # the last layer, exclusive, of each stage


def _searched(question: CutQuestion, known: Sequence[Partition]) -> list[Partition]:
    """Return the cuts whose busiest share is least busy, or [] if none is better than the known ones.

    Partial cuts grow by a stage at a time. Of those that end at the same layer with the same loads one is kept, where
    memory has no limit; those busier than a known cut are dropped. If more than `MOST_PARTIAL_CUTS` remained, the
    least even ones are dropped too; otherwise the result is the optimum.
    """
    num_stages, fewest, placement = question.placement.num_stages, question.fewest, question.placement
    total = sum(question.cost(stage, 0, question.num_layers) for stage in range(num_stages))
    most = min((max(rank_loads(question, cut)) for cut in known), default=total / min(question.rank_speeds))
    share_of = {stage: index for index, share in enumerate(question.shares) for stage in share.stages}
    fixed = tuple(sum(question.cost(s, 0, 0) for s in share.stages) / share.speed for share in question.shares)
    partial = {0: [_PartialCut(tuple(load / most for load in fixed), ())]}
    for stage in range(num_stages):
        share, reached = share_of[stage], dict[int, dict[tuple[float | int, ...], _PartialCut]]()
        for first, cuts in partial.items():
            empty = question.cost(stage, first, first)
            least = min(cut.loads[share] for cut in cuts)
            for end in range(first + fewest, question.num_layers - fewest * (num_stages - 1 - stage) + 1):
                more = (question.cost(stage, first, end) - empty) / question.shares[share].speed / most
                if least + more > 1.0:
                    break
                for loads, ends in cuts:
                    load = round(loads[share] + more, 10)
                    grown = _PartialCut((*loads[:share], load, *loads[share + 1 :]), (*ends, end))
                    key = grown.loads if question.fits is None else grown.ends
                    if load > 1.0 or key in reached.setdefault(end, {}):
                        continue
                    if all(question.rank_fits(rank, grown.ends) for rank in placement.ranks_of(stage)):
                        reached[end][key] = grown
        partial = {end: list(cuts.values()) for end, cuts in reached.items() if cuts}
        if sum(map(len, partial.values())) > MOST_PARTIAL_CUTS // num_stages:
            width = max(1, MOST_PARTIAL_CUTS // num_stages // len(partial))
            partial = {
                end: heapq.nsmallest(width, cuts, key=lambda cut: sum(x * x for x in cut.loads))
                for end, cuts in partial.items()
            }
    best = heapq.nsmallest(MOST_FOUND, partial.get(question.num_layers, ()), key=lambda cut: sorted(cut.loads)[::-1])
    return [from_counts([end - start for start, end in pairwise((0, *cut.ends))], question.num_layers) for cut in best]
