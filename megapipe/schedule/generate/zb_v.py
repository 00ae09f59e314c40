"""ZB-V (Qi et al. 2024, arXiv:2405.15362): the zero-bubble idea on a V, where rank r holds stages r and 2 p - 1 - r.

Input and loss lie on rank 0, so that the first backward starts as soon as the first microbatch has come down and up again: nearly no bubble
where F = I = W, at the memory of 1F1B.
"""

from __future__ import annotations

from megapipe.schedule.action import Action, Op
from megapipe.schedule.generate.shape import Shape
from megapipe.schedule.schedule import Row


def zb_v(shape: Shape) -> tuple[Row, ...]:
    """The rows for max(m, 2 p - 1) microbatches, less the ones that are not there: few microbatches leave their places empty."""
    count = max(shape.num_microbatches, 2 * shape.num_ranks - 1)
    return tuple(
        tuple(
            action for action in _row(rank, shape.num_ranks, count) if (action.microbatch or 0) < shape.num_microbatches
        )
        for rank in range(shape.num_ranks)
    )


def _row(rank: int, num_ranks: int, count: int) -> Row:
    """2 (p - r) - 1 forwards of the way down; then, until all is forward, one up for one down; then what is left.

    A W follows its I, except in the last r rounds of the way down and up, where I alone lets the ranks before go on.
    """
    down, up = rank, 2 * num_ranks - 1 - rank
    row: list[Action] = []
    done = {(stage, op): 0 for stage in (down, up) for op in (Op.F, Op.I, Op.W)}

    def run(stage: int, *ops: Op) -> None:
        for op in ops:
            row.append(Action(stage, op, done[stage, op]))
            done[stage, op] += 1

    for _ in range(2 * (num_ranks - rank) - 1):
        run(down, Op.F)
    for _ in range(rank):
        run(up, Op.F)
        run(down, Op.F)
    for _ in range(num_ranks - rank):
        run(up, Op.F, Op.I, Op.W)
    while done[up, Op.F] < count:
        if done[down, Op.F] < count:
            run(down, Op.F)
        run(down, Op.I, Op.W)
        run(up, Op.F, Op.I, Op.W)
    for _ in range(rank):
        run(down, Op.I)
        run(up, Op.I)
    for _ in range(num_ranks - rank):
        run(down, Op.I, Op.W)
    for stage in (up, down):
        while done[stage, Op.W] < count:
            run(stage, Op.W)
    return tuple(row)
