"""Schedules that split the backward into input gradients (I) and weight gradients (W) and put W where the bubble was.

ZB-H1 and ZB-H2 (Qi et al. 2023, arXiv:2401.10241) are 1F1B on linear stages, W delayed.

DualPipe and DualPipeV (DeepSeek-V3, arXiv:2412.19437) overlap forwards with backwards, so that the communication of one
(above all the all-to-all of expert parallelism) hides under the computation of the other. Both run the same rows. In
DualPipe microbatches enter at both ends of the pipeline: rank r holds stages r and p - 1 - r, even microbatches travel
up the ranks, odd ones down, and the ranks r and p - 1 - r hold the same parameters. DualPipeV is one half of it,
folded: rank r holds stages r and 2 p - 1 - r, a microbatch comes down as one of the first direction and returns as one
of the second, and every parameter is held once.
"""

from __future__ import annotations

from typing import NamedTuple

from megapipe.schedule.action import Action, Op
from megapipe.schedule.costs import Shape
from megapipe.schedule.schedule import Row


def zb_h1(shape: Shape) -> tuple[Row, ...]:
    """1F1B's warm-up of p - 1 - r forwards; rank r runs W r microbatches behind I and keeps p microbatches until W."""
    p, more = shape.num_ranks, shape.num_slices - 1  # the first backward is that of the last slice
    return tuple(_delayed_weights(rank, shape, warm_up=p - 1 - rank + more, delay=rank) for rank in range(p))


def zb_h2(shape: Shape) -> tuple[Row, ...]:
    """Twice ZB-H1's warm-up and delay: 2 p - 1 microbatches fill the rest of the bubble where F = I = W."""
    p = shape.num_ranks
    return tuple(_delayed_weights(rank, shape, warm_up=2 * (p - 1 - rank), delay=2 * rank) for rank in range(p))


def _delayed_weights(stage: int, shape: Shape, warm_up: int, delay: int) -> Row:
    """Run `warm_up` forwards, then F and I in turn, each I followed by the W, if any, `delay` microbatches before."""
    forwards, backwards = shape.forward_order, shape.backward_order
    row = [Action(stage, Op.F, m) for m in forwards[:warm_up]]
    for number, microbatch in enumerate(backwards):
        row += [Action(stage, Op.F, m) for m in forwards[number + warm_up : number + warm_up + 1]]
        row.append(Action(stage, Op.I, microbatch))
        if number >= delay:
            row.append(Action(stage, Op.W, backwards[number - delay]))
    row += [Action(stage, Op.W, m) for m in backwards[max(0, len(backwards) - delay) :]]
    return tuple(row)


NEAR, FAR = 0, 1  # a rank's stage on the side of the input, and the one on the side of the loss


class _Lane(NamedTuple):
    """The microbatches that pass one stage of a rank: first, first + stride, ..."""

    stage: int
    first: int
    stride: int


def dualpipe(shape: Shape) -> tuple[Row, ...]:
    """num_ranks stages, half of the microbatches in each direction; num_ranks and num_microbatches are even."""
    p = shape.num_ranks
    rows = []
    for rank in range(p):
        half_rank = min(rank, p - 1 - rank)
        entering = int(rank >= p // 2)  # the direction that enters at this rank's end
        lanes = (_Lane(half_rank, entering, 2), _Lane(p - 1 - half_rank, 1 - entering, 2))
        rows.append(_dualpipe_row(lanes, half_rank, p // 2, shape.num_microbatches // 2))
    return tuple(rows)


def dualpipe_v(shape: Shape) -> tuple[Row, ...]:
    """2 num_ranks stages; num_microbatches is at least the number of stages."""
    p, count = shape.num_ranks, shape.num_microbatches
    return tuple(_dualpipe_row((_Lane(r, 0, 1), _Lane(2 * p - 1 - r, 0, 1)), r, p, count) for r in range(p))


def dualpipe_v_counts(num_ranks: int, num_microbatches: int) -> tuple[str, tuple[int, ...]]:
    """Return why so many microbatches cannot run ('' if they can), and the nearest numbers that can."""
    least = 2 * num_ranks
    if num_microbatches < least:
        return f"needs at least as many microbatches as its {least} stages", (least,)
    return "", ()


def _dualpipe_row(lanes: tuple[_Lane, _Lane], rank: int, num_ranks: int, count: int) -> Row:
    """Return the row of `rank` for `count` >= 2 num_ranks microbatches per lane; rank num_ranks - 1 is at the turn."""
    row: list[Action] = []
    pending: list[Action] = []  # W of every I so far, oldest first
    forwards, backwards = [0, 0], [0, 0]  # done in each lane

    def run(op: Op, lane: int) -> Action:
        """Append the next F, B or I of the lane."""
        (stage, first, stride), done = lanes[lane], forwards if op is Op.F else backwards
        row.append(Action(stage, op, first + stride * done[lane]))
        done[lane] += 1
        return row[-1]

    def input_gradient(lane: int) -> None:
        pending.append(run(Op.I, lane)._replace(op=Op.W))

    def overlap(forward_lane: int, backward_lane: int) -> None:
        forward = run(Op.F, forward_lane)
        row.insert(-1, forward._replace(op=Op.OVERLAP))
        run(Op.B, backward_lane)

    to_turn = num_ranks - 1 - rank
    for _ in range(2 * to_turn):
        run(Op.F, NEAR)
    for _ in range(rank + 1):
        run(Op.F, NEAR)
        run(Op.F, FAR)
    for _ in range(to_turn):
        input_gradient(FAR)
        row.append(pending.pop(0))
        run(Op.F, FAR)
    for turn in range(count - 2 * num_ranks + rank + 1):
        if turn == 0 and to_turn == 0:
            # the first backward at the turn needs only the forward before this one: unpaired, it starts sooner
            run(Op.F, NEAR)
            run(Op.B, FAR)
        else:
            overlap(NEAR, FAR)
        overlap(FAR, NEAR)
    for _ in range(to_turn):
        run(Op.B, FAR)
        overlap(FAR, NEAR)
    for done in range(2 * (rank + 1)):  # alternate between the lanes; split the second half of these backwards
        lane = (FAR, NEAR)[done % 2]
        if done <= rank:
            run(Op.B, lane)
        else:
            input_gradient(lane)
    for _ in range(to_turn):
        row.append(pending.pop(0))
        input_gradient(NEAR)
    return (*row, *pending)
