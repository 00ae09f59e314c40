"""ZB-H1 and ZB-H2 (Qi et al. 2023, arXiv:2401.10241): 1F1B with the backward split, and its weight half put where bubbles were."""

from __future__ import annotations

from megapipe.schedule.action import Action, Op
from megapipe.schedule.generate.shape import Shape
from megapipe.schedule.schedule import Row


def zb_h1(shape: Shape) -> tuple[Row, ...]:
    """1F1B's warm-up of p - 1 - r forwards; rank r runs W r microbatches behind I. Every rank keeps p microbatches until W."""
    p = shape.num_ranks
    return tuple(delayed_weights(rank, shape.num_microbatches, warm_up=p - 1 - rank, delay=rank) for rank in range(p))


def zb_h2(shape: Shape) -> tuple[Row, ...]:
    """Twice ZB-H1's warm-up and delay: 2 p - 1 microbatches fill what is left of the bubble where F = I = W."""
    p = shape.num_ranks
    return tuple(
        delayed_weights(rank, shape.num_microbatches, warm_up=2 * (p - 1 - rank), delay=2 * rank) for rank in range(p)
    )


def delayed_weights(stage: int, num_microbatches: int, warm_up: int, delay: int) -> Row:
    """`warm_up` forwards, then F and I in turn, from the `delay`-th I on each with the W of `delay` microbatches before."""
    row = [Action(stage, Op.F, m) for m in range(min(warm_up, num_microbatches))]
    for microbatch in range(num_microbatches):
        if microbatch + warm_up < num_microbatches:
            row.append(Action(stage, Op.F, microbatch + warm_up))
        row.append(Action(stage, Op.I, microbatch))
        if microbatch >= delay:
            row.append(Action(stage, Op.W, microbatch - delay))
    row += [Action(stage, Op.W, m) for m in range(max(0, num_microbatches - delay), num_microbatches)]
    return tuple(row)
