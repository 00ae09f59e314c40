"""GPipe (Huang et al. 2018, arXiv:1811.06965): all forwards, then all backwards. Every microbatch of the step is live at once."""

from __future__ import annotations

from megapipe.schedule.action import Action, Op
from megapipe.schedule.generate.shape import Shape
from megapipe.schedule.schedule import Row


def gpipe(shape: Shape) -> tuple[Row, ...]:
    """Rank r runs F of every microbatch, then B of every microbatch, both in order."""
    microbatches = range(shape.num_microbatches)
    return tuple(
        tuple(Action(stage, Op.F, m) for m in microbatches) + tuple(Action(stage, Op.B, m) for m in microbatches)
        for stage in range(shape.num_ranks)
    )
