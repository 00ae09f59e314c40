"""Schedules that split the backward into input gradients (I) and weight gradients (W) and put W where the bubble was.

The zero-bubble schedules:

- ZB-H1 and ZB-H2 (Qi et al. 2023, arXiv:2401.10241): 1F1B on linear stages, W delayed.
- ZB-V (Qi et al. 2024, arXiv:2405.15362): rank r holds stages r and 2 p - 1 - r. Input and loss are on rank 0, so the
  first backward starts as soon as the first microbatch has come down and up again: nearly no bubble where F = I = W, at
  the memory of 1F1B.
- V-Half and V-Min (the same paper): half and a third of 1F1B's activations, for a bubble that stays below 1F1B's.

V-Half and V-Min repeat one building block on the V every six slots of one stage's F, I or W: the slots at which the
four passes F down, F up, I down and I up of a microbatch reach each rank. A rank holds as many microbatches as a block
keeps its activations alive, in slots, over six. V-Min moves on in every slot; in V-Half the two passes up take two
slots per rank, which balances the ranks. The waits at the three turns are the shortest for which no two passes of any
microbatches meet on a rank. Then F and I keep that order, and each W goes where the rank would be idle, or where memory
is full.

DualPipe and DualPipeV (DeepSeek-V3, arXiv:2412.19437) overlap forwards with backwards, so that the communication of one
(above all the all-to-all of expert parallelism) hides under the computation of the other. Both run the same rows. In
DualPipe microbatches enter at both ends of the pipeline: rank r holds stages r and p - 1 - r, even microbatches travel
up the ranks, odd ones down, and the ranks r and p - 1 - r hold the same parameters. DualPipeV is one half of it,
folded: rank r holds stages r and 2 p - 1 - r, a microbatch comes down as one of the first direction and returns as one
of the second, and every parameter is held once.
"""

from __future__ import annotations

from typing import NamedTuple

from megapipe.errors import ConfigError
from megapipe.schedule.action import Action, Op
from megapipe.schedule.costs import Shape
from megapipe.schedule.schedule import Row


def zb_h1(shape: Shape) -> tuple[Row, ...]:
    """1F1B's warm-up of p - 1 - r forwards; rank r runs W r microbatches behind I and keeps p microbatches until W."""
    p = shape.num_ranks
    return tuple(_delayed_weights(rank, shape.num_microbatches, warm_up=p - 1 - rank, delay=rank) for rank in range(p))


def zb_h2(shape: Shape) -> tuple[Row, ...]:
    """Twice ZB-H1's warm-up and delay: 2 p - 1 microbatches fill the rest of the bubble where F = I = W."""
    p = shape.num_ranks
    return tuple(
        _delayed_weights(rank, shape.num_microbatches, warm_up=2 * (p - 1 - rank), delay=2 * rank) for rank in range(p)
    )


def _delayed_weights(stage: int, num_microbatches: int, warm_up: int, delay: int) -> Row:
    """Run `warm_up` forwards, then F and I in turn, each I followed by the W, if any, `delay` microbatches before."""
    row = [Action(stage, Op.F, m) for m in range(min(warm_up, num_microbatches))]
    for microbatch in range(num_microbatches):
        if microbatch + warm_up < num_microbatches:
            row.append(Action(stage, Op.F, microbatch + warm_up))
        row.append(Action(stage, Op.I, microbatch))
        if microbatch >= delay:
            row.append(Action(stage, Op.W, microbatch - delay))
    row += [Action(stage, Op.W, m) for m in range(max(0, num_microbatches - delay), num_microbatches)]
    return tuple(row)


def zb_v(shape: Shape) -> tuple[Row, ...]:
    """The rows for max(m, 2 p - 1) microbatches without those beyond m, whose slots stay empty."""
    count = max(shape.num_microbatches, 2 * shape.num_ranks - 1)
    return tuple(
        tuple(a for a in _zb_v_row(rank, shape.num_ranks, count) if (a.microbatch or 0) < shape.num_microbatches)
        for rank in range(shape.num_ranks)
    )


def _zb_v_row(rank: int, num_ranks: int, count: int) -> Row:
    """2 (p - r) - 1 forwards of the way down; then, until all forwards are done, one up for one down; then the rest.

    A W follows its I, except in the last r rounds of the way down and up, where I alone lets the ranks before continue.
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


PERIOD = 6  # slots of a building block: F, I and W of two chunks


def v_half(shape: Shape) -> tuple[Row, ...]:
    """At most (p + 2) // 2 microbatches alive on a rank."""
    p = shape.num_ranks
    waits = (2, 1, 1) if p % 2 else (4, 1, 5)  # found by exhaustive search: the least bubble at this peak
    return _repeat_block(shape, 2, waits, limit=2 * ((p + 2) // 2))


def v_min(shape: Shape) -> tuple[Row, ...]:
    """At most (p + 4) // 3 microbatches alive on a rank."""
    p = shape.num_ranks
    return _repeat_block(shape, 1, (1, 3, 1) if p % 3 == 0 else (1, 1, 1), limit=2 * ((p + 4) // 3))


def _repeat_block(shape: Shape, slots_up: int, waits: tuple[int, int, int], limit: int) -> tuple[Row, ...]:
    """Repeat a building block for every microbatch and fill in the weight gradients.

    slots_up: slots from rank to rank of the two passes up; those down take one. waits: at the last rank, at rank 0 and
    at the last rank again.
    """
    last = shape.num_ranks - 1
    # slots at which microbatch 0 begins its three later passes
    up = last + waits[0]
    down = up + slots_up * last + waits[1]
    back = down + last + waits[2]
    orders: list[list[Action]] = []
    for rank in range(last + 1):
        far, way_up = 2 * last + 1 - rank, slots_up * (last - rank)
        passes = ((rank, rank, Op.F), (up + way_up, far, Op.F), (down + rank, far, Op.I), (back + way_up, rank, Op.I))
        assert len({slot % PERIOD for slot, _, _ in passes}) == 4, f"passes {passes} meet on rank {rank}"
        timed = {
            slot + PERIOD * microbatch: Action(stage, op, microbatch)
            for microbatch in range(shape.num_microbatches)
            for slot, stage, op in passes
        }
        orders.append([timed[slot] for slot in sorted(timed)])
    return _fill_with_weights(orders, limit)


def _fill_with_weights(orders: list[list[Action]], limit: int) -> tuple[Row, ...]:
    """Put every W, oldest first, where its rank would be idle if all ops took one slot, or where `limit` chunks are
    alive.

    orders: the F and I of each rank of a V.
    """
    last = 2 * len(orders) - 1
    rows: list[list[Action]] = [[] for _ in orders]
    pending: list[list[Action]] = [[] for _ in orders]
    position, alive = [0] * len(orders), [0] * len(orders)
    done: set[Action] = set()
    left = sum(len(order) + sum(action.op is Op.I for action in order) for order in orders)

    def is_ready(action: Action) -> bool:
        stage, op, microbatch = action
        if op is Op.F:
            return stage == 0 or Action(stage - 1, Op.F, microbatch) in done
        return Action(stage, Op.F, microbatch) in done and (
            stage == last or Action(stage + 1, Op.I, microbatch) in done
        )

    while left:
        started: list[Action] = []
        for rank, order in enumerate(orders):
            action = order[position[rank]] if position[rank] < len(order) else None
            if action is not None and is_ready(action) and (action.op is Op.I or alive[rank] < limit):
                position[rank] += 1
                if action.op is Op.I:
                    pending[rank].append(action._replace(op=Op.W))
                else:
                    alive[rank] += 1
            elif pending[rank]:
                action = pending[rank].pop(0)
                alive[rank] -= 1
            else:
                continue
            started.append(action)
            rows[rank].append(action)
        assert started, f"no rank can continue with {limit} chunks alive"
        done.update(started)
        left -= len(started)
    return tuple(map(tuple, rows))


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


def dualpipe_counts(num_ranks: int, num_microbatches: int) -> tuple[str, tuple[int, ...]]:
    """Return why so many microbatches cannot run ('' if they can), and the nearest numbers that can.

    Raises ConfigError for an odd number of ranks.
    """
    if num_ranks % 2:
        raise ConfigError(
            f"schedule dualpipe pairs every rank with the one opposite; {num_ranks} pipeline ranks are odd: use "
            f"{max(2, num_ranks - 1)} or {num_ranks + 1}"
        )
    least = 2 * num_ranks
    if num_microbatches < least:
        problem = f"fills the pipeline from both ends and needs at least 2 x {num_ranks} ranks = {least} microbatches"
        return problem, (least,)
    if num_microbatches % 2:
        return "sends as many microbatches from either end", (num_microbatches - 1, num_microbatches + 1)
    return "", ()


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
