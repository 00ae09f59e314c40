"""The arguments of schedule generators: `Shape`, and `AutoGoal` for the automatic scheduler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from megapipe.schedule.simulate import Costs


@dataclass(frozen=True)
class AutoGoal:
    """The goal of the automatic scheduler (zb-auto).

    costs: seconds of F, I, W and of messages, by stage.
    max_microbatches: the most that any rank may keep alive at once.
    kept_for_weights: the fraction of a microbatch's activations that stays between I and W (1: all, as peak_live_chunks
    counts).
    has_barrier: minimize the makespan of all ranks; otherwise the time of the slowest rank, which is what chained steps
    take.
    tries: how many rules are tried beyond the coarse grid (None: a number that takes a few seconds).
    """

    costs: Costs
    max_microbatches: float
    kept_for_weights: float = 1.0
    has_barrier: bool = False
    tries: int | None = None


class Shape(NamedTuple):
    """The size of a schedule: num_chunks stages per rank; group_size microbatches run through one chunk before the next
    chunk.
    """

    num_ranks: int
    num_chunks: int
    num_microbatches: int
    group_size: int
    goal: AutoGoal | None = None  # for the automatic scheduler
