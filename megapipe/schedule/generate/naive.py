"""The pipeline without pipelining: one microbatch at a time through all stages, forward and back. What every schedule is an answer to."""

from __future__ import annotations

from megapipe.schedule.action import Action, Op
from megapipe.schedule.generate.shape import Shape
from megapipe.schedule.schedule import Row


def naive(shape: Shape) -> tuple[Row, ...]:
    """Rank r runs F and B of one microbatch, then of the next."""
    return tuple(
        tuple(Action(stage, op, microbatch) for microbatch in range(shape.num_microbatches) for op in (Op.F, Op.B))
        for stage in range(shape.num_ranks)
    )
