"""Breadth-first, looped BFS (Lamy-Poirier 2022, arXiv:2211.05953): chunk by chunk over all microbatches, back in reverse.

The bubble of interleaved 1F1B at the memory of GPipe; what it buys is that a chunk's parameters are needed in one stretch and its gradients
are complete early, so that their communication hides under the other chunks.
"""

from __future__ import annotations

from megapipe.schedule.action import Action, Op
from megapipe.schedule.generate.shape import Shape
from megapipe.schedule.schedule import Row


def breadth_first(shape: Shape) -> tuple[Row, ...]:
    """Rank r runs F of all microbatches chunk after chunk, then B of all microbatches from the last chunk to the first."""
    p, chunks, microbatches = shape.num_ranks, range(shape.num_chunks), range(shape.num_microbatches)
    return tuple(
        tuple(Action(chunk * p + rank, Op.F, m) for chunk in chunks for m in microbatches)
        + tuple(Action(chunk * p + rank, Op.B, m) for chunk in reversed(chunks) for m in microbatches)
        for rank in range(p)
    )
