"""The asynchronous ancestors: PipeDream (Harlap et al. 2018, arXiv:1806.03377) and PipeDream-2BW (Narayanan et al. 2021, arXiv:2006.09503).

NOT synchronous: weights change while microbatches are under way, and what is trained differs from what one process would train. They fill
the pipeline once and never drain it; here a schedule is a stretch of that stream, whose ends fill and drain. Which weights each microbatch
uses is said in `schedule.weight_versions`.
"""

from __future__ import annotations

from megapipe.schedule.action import Action, Op
from megapipe.schedule.generate.one_f_one_b import one_f_one_b
from megapipe.schedule.generate.shape import Shape
from megapipe.schedule.schedule import Row


def pipedream(shape: Shape) -> tuple[Row, ...]:
    """1F1B without a flush, an optimizer step after every backward, with stashed weights."""
    return _with_updates(shape, every=1)


def pipedream_2bw(shape: Shape) -> tuple[Row, ...]:
    """1F1B without a flush, an optimizer step after every group of group_size >= num_ranks microbatches.

    The microbatches of group t use version t - 1 of the weights on every stage: W(t + 1) = W(t) - lr x gradient at W(t - 1).
    """
    return _with_updates(shape, every=shape.group_size)


def _with_updates(shape: Shape, every: int) -> tuple[Row, ...]:
    rows = []
    for row in one_f_one_b(shape):
        actions: list[Action] = []
        for action in row:
            actions.append(action)
            number = (action.microbatch or 0) + 1
            if action.op is Op.B and (number % every == 0 or number == shape.num_microbatches):
                actions.append(action._replace(op=Op.UPDATE))
        rows.append(tuple(actions))
    return tuple(rows)
