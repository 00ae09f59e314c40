"""Shape: what a generator is asked for."""

from __future__ import annotations

from typing import NamedTuple


class Shape(NamedTuple):
    """num_chunks stages a rank; group_size microbatches run through one chunk before the next chunk (interleaved schedules)."""

    num_ranks: int
    num_chunks: int
    num_microbatches: int
    group_size: int
