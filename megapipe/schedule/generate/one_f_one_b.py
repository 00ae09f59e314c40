"""1F1B, PipeDream-Flush (Narayanan et al. 2019 and 2021, arXiv:2104.04473): after a warm-up one forward, one backward in turn.

GPipe's bubble, but rank r keeps at most min(num_ranks - r, num_microbatches) microbatches instead of all.
"""

from __future__ import annotations

from collections.abc import Sequence

from megapipe.schedule.action import Action, Op
from megapipe.schedule.generate.shape import Shape
from megapipe.schedule.schedule import Row


def one_f_one_b(shape: Shape) -> tuple[Row, ...]:
    """Rank r: min(num_ranks - 1 - r, m) warm-up forwards, then pairs of F and B, then the remaining backwards."""
    rows = []
    for stage in range(shape.num_ranks):
        forwards = [Action(stage, Op.F, m) for m in range(shape.num_microbatches)]
        backwards = [Action(stage, Op.B, m) for m in range(shape.num_microbatches)]
        rows.append(alternate(forwards, backwards, warm_up=shape.num_ranks - 1 - stage))
    return tuple(rows)


def alternate(forwards: Sequence[Action], backwards: Sequence[Action], warm_up: int) -> Row:
    """`warm_up` forwards (or all there are), then forward and backward in turn, then the backwards that are left."""
    warm_up = min(warm_up, len(forwards))
    row = list(forwards[:warm_up])
    for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
        row += (forward, backward)
    row += backwards[len(forwards) - warm_up :]
    return tuple(row)
