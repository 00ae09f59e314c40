"""V-Half and V-Min (Qi et al. 2024, arXiv:2405.15362): half and a third of 1F1B's activations, for a bubble that stays below 1F1B's.

Both repeat one building block on a V (rank r holds stages r and 2 p - 1 - r) every six slots of one stage's F, I or W: the times at which
the four passes F down, F up, I down and I up of a microbatch reach each rank. How long a block keeps a rank's activations alive, over six,
is how many the rank holds. V-Min hops on in every slot; in V-Half the two ways up take two slots a hop, which balances the ranks.
The waits at the three turns are the shortest for which no two passes of any microbatches meet on a rank. Then the
order of F and I is kept, and W goes where the rank would stand still, or where memory is full.
"""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

from megapipe.schedule.action import Action, Op
from megapipe.schedule.generate.shape import Shape
from megapipe.schedule.schedule import Row

PERIOD = 6  # slots: F, I and W of two chunks


class Passes(NamedTuple):
    """One number each for the forward down the ranks, the forward up, the backward down and the backward up."""

    forward_down: int
    forward_up: int
    backward_down: int
    backward_up: int


def v_half(shape: Shape) -> tuple[Row, ...]:
    """At most (p + 2) // 2 microbatches alive on a rank."""
    p = shape.num_ranks
    turns = (2, 1, 1) if p % 2 else (4, 1, 5)  # found by trying all: the least bubble at this peak
    return _rows(shape, _block(p, Passes(1, 2, 1, 2), turns), limit=2 * ((p + 2) // 2))


def v_min(shape: Shape) -> tuple[Row, ...]:
    """At most (p + 4) // 3 microbatches alive on a rank."""
    p = shape.num_ranks
    turns = (1, 3, 1) if p % 3 == 0 else (1, 1, 1)
    return _rows(shape, _block(p, Passes(1, 1, 1, 1), turns), limit=2 * ((p + 4) // 3))


def _block(num_ranks: int, hops: Passes, turns: tuple[int, int, int]) -> list[Passes]:
    """[rank] -> slots at which microbatch 0 is there; `turns` are the waits at the last rank, at rank 0 and at the last rank again."""
    last = num_ranks - 1
    up = hops.forward_down * last + turns[0]
    down = up + hops.forward_up * last + turns[1]
    back = down + hops.backward_down * last + turns[2]
    return [
        Passes(
            hops.forward_down * rank,
            up + hops.forward_up * (last - rank),
            down + hops.backward_down * rank,
            back + hops.backward_up * (last - rank),
        )
        for rank in range(num_ranks)
    ]


def _rows(shape: Shape, block: list[Passes], limit: int) -> tuple[Row, ...]:
    """The block repeated for every microbatch, and the weight gradients filled in."""
    orders: list[list[Action]] = []
    for rank, passes in enumerate(block):
        stages = (rank, 2 * shape.num_ranks - 1 - rank, 2 * shape.num_ranks - 1 - rank, rank)
        assert len({slot % PERIOD for slot in passes}) == 4, f"passes {passes} meet on rank {rank}"
        timed = [
            (slot + PERIOD * microbatch, Action(stage, op, microbatch))
            for microbatch, (slot, stage, op) in product(
                range(shape.num_microbatches), list(zip(passes, stages, (Op.F, Op.F, Op.I, Op.I), strict=True))
            )
        ]
        orders.append([action for _, action in sorted(timed, key=lambda pair: pair[0])])
    return fill_with_weights(orders, limit)


def fill_with_weights(orders: list[list[Action]], limit: int) -> tuple[Row, ...]:
    """Put every W, oldest first, where its rank would stand still if all ops took one slot, or where `limit` chunks are alive.

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
        assert started, f"no rank can go on with {limit} chunks alive"
        done.update(started)
        left -= len(started)
    return tuple(map(tuple, rows))
