"""Cuts of the layers into stages that balance the load of ranks with several stages, within a memory limit per rank.

`plan.cut` simulates the proposed cuts and takes the best.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from megapipe.schedule.partition import Partition, StageCost, cut_by_stage_cost, from_counts
from megapipe.schedule.placement import Placement


@dataclass(frozen=True)
class CutQuestion:
    """A model to be cut, and the ranks that it is cut for."""

    placement: Placement
    num_layers: int
    cost: StageCost  # of one microbatch on a rank of speed 1
    rank_speeds: tuple[float, ...]  # of each pp_rank, above 0
    layers_alike: bool  # the cost of a stage depends only on the number of its layers
    # (pp_rank, layers of each of its stages in model order) -> they fit into its memory; fewer layers must fit too
    fits: Callable[[int, tuple[int, ...]], bool] = lambda pp_rank, layers: True

    @property
    def fewest(self) -> int:
        """The least number of layers of a stage."""
        return 1 if self.num_layers >= self.placement.num_stages else 0


def balanced_cuts(question: CutQuestion) -> list[Partition]:
    """Return distinct cuts worth simulating; [] if none fits.

    The first balances single stages, exactly by dynamic programming, which is all that one stage per rank needs. If
    rank speeds differ, another one assumes equal speeds. With several stages per rank the others balance the sums of
    ranks. If layers are alike, each layer goes to the rank that is then least busy, so the largest sum is minimal,
    unless the memory limit restricts how a rank's layers are spread over its chunks. Otherwise single layers move
    between neighbouring stages as long as that helps, which may miss the optimum. With two directions, ranks that share
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
        if not question.layers_alike:
            found += [_descended(question, start) for start in found if start is not None]
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
        if alone and not question.fits(placement.rank_of_stage[stage], (end - first,)):
            return float("inf")
        return question.cost(stage, first, end) / slowest[stage]

    cut = cut_by_stage_cost(cost, question.num_layers, placement.num_stages, question.layers_alike)
    return cut if cut is not None and _all_fit(question, cut.layer_counts) else None


def _all_fit(question: CutQuestion, counts: Sequence[int]) -> bool:
    placement = question.placement
    return all(
        question.fits(rank, tuple(counts[s] for s in placement.stages_of(rank))) for rank in range(placement.num_ranks)
    )


# filling ranks with layers that are alike


def _filled(question: CutQuestion, priority: Callable[[Sequence[int], int], tuple[float, ...]]) -> Partition | None:
    """Give every stage its fewest layers, then each layer to the share that is least busy with it; None if not all
    layers fit.

    A share is the stages held by the same rank, or with two directions by the same two ranks. priority: (layer counts,
    stage) -> key by which the stages of a share get their next layer, least first.
    """
    placement = question.placement
    counts = [question.fewest] * placement.num_stages
    if not _all_fit(question, counts):
        return None
    ranks_of: dict[tuple[int, ...], list[int]] = {}  # stages of a share -> its ranks
    for rank in range(placement.num_ranks):
        ranks_of.setdefault(placement.stages_of(rank), []).append(rank)
    shares = list(ranks_of.items())
    waiting: list[tuple[float, int, int]] = []  # (load with one more layer, share, its stage)

    def offer(index: int) -> None:
        stages, ranks = shares[index]
        slowest = min(question.rank_speeds[rank] for rank in ranks)
        for stage in sorted(stages, key=partial(priority, counts)):
            counts[stage] += 1
            load = sum(question.cost(s, 0, counts[s]) for s in stages) / slowest
            fit = all(question.fits(rank, tuple(counts[s] for s in stages)) for rank in ranks)
            counts[stage] -= 1
            if fit:
                heapq.heappush(waiting, (load, index, stage))
                return

    for index in range(len(shares)):
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
