"""Shape: what a generator is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from megapipe.schedule.simulate import Costs


@dataclass(frozen=True)
class Wish:
    """What the automatic scheduler is asked for.

    costs: seconds of F, I, W and of messages, by stage. max_microbatches: the most that any rank may keep alive at once.
    kept_for_weights: the part of a microbatch's activations that stays between I and W (1: all, as peak_live_chunks counts).
    has_barrier: make the whole job's makespan short; else the longest rank's own time, which is what steps in a chain take.
    tries: how many rules are tried beyond the coarse grid (None: as many as take seconds).
    """

    costs: Costs
    max_microbatches: float
    kept_for_weights: float = 1.0
    has_barrier: bool = False
    tries: int | None = None


class Shape(NamedTuple):
    """num_chunks stages a rank; group_size microbatches run through one chunk before the next chunk (interleaved schedules).

    wish: what the automatic scheduler works for.
    """

    num_ranks: int
    num_chunks: int
    num_microbatches: int
    group_size: int
    wish: Wish | None = None
