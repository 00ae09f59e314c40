"""Split backwards on a V, where rank r holds stages r and 2 p - 1 - r: ZB-V, V-Half and V-Min (arXiv:2405.15362).

Input and loss are on rank 0, so the first backward starts as soon as the first microbatch has come down and up again.

- ZB-V: nearly no bubble where F = I = W, at the memory of 1F1B.
- V-Half and V-Min: half and a third of 1F1B's activations, for a bubble that stays below 1F1B's.

V-Half and V-Min repeat one building block on the V every six slots of one stage's F, I or W: the slots at which the
four passes F down, F up, I down and I up of a microbatch reach each rank. A rank holds as many microbatches as a block
keeps its activations alive, in slots, over six. V-Min moves on in every slot; in V-Half the two passes up take two
slots per rank, which balances the ranks. The waits at the three turns are the shortest for which no two passes of any
microbatches meet on a rank. F and I keep that order, and each W goes where the rank would be idle, or where memory is
full. Then the warm-up and the end of the step, which a repeated block leaves full of holes, are justified: actions move
to free slots as late as they can, then as early as they can. In slots, with F = I = W and from 2 p microbatches on,
max(0, 6 p - 1 - 3 n) slots stay idle if a rank may hold n chunks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import chain

from megapipe.schedule.action import Action, Op
from megapipe.schedule.costs import Shape
from megapipe.schedule.schedule import Row

PERIOD = 6  # slots of a building block: F, I and W of two chunks
FILLS = 2  # a schedule of this many times p microbatches has a middle that more microbatches repeat
Table = Sequence[Sequence[Action | None]]  # [rank][slot]; None: the rank is idle


def v_half(shape: Shape) -> tuple[Row, ...]:
    """At most (p + 2) // 2 microbatches alive on a rank."""
    p = shape.num_ranks
    waits = (2, 1, 1) if p % 2 else (4, 1, 5)  # found by exhaustive search: the least bubble at this peak
    return _repeat_block(shape, 2, waits, limit=2 * ((p + 2) // 2))


def v_min(shape: Shape) -> tuple[Row, ...]:
    """At most (p + 4) // 3 microbatches alive on a rank."""
    p = shape.num_ranks
    return _repeat_block(shape, 1, (1, 3, 1) if p % 3 == 0 else (1, 1, 1), limit=2 * ((p + 4) // 3))


def zb_v(shape: Shape) -> tuple[Row, ...]:
    """At most p microbatches alive on a rank; no idle time between steps from 2 p - 1 microbatches on.

    Fewer microbatches run in the order of 2 p - 1 without those beyond, justified. With k slices a rank keeps at most
    p + k - 1 of them, since the first backward is that of slice k - 1, and 2 p + k - 2 take the place of 2 p - 1.
    """
    p, count, slices = shape.num_ranks, shape.num_microbatches, shape.num_slices
    enough = -(-(2 * p + slices - 2) // slices)
    filled = shape._replace(num_microbatches=max(count, enough))
    rows = tuple(_zb_v_row(rank, filled) for rank in range(p))
    if count >= enough:
        return rows
    kept = [[a for a in row if (a.microbatch or 0) < count * slices] for row in rows]
    return _without_idle(_justify(kept, limit=2 * (p + slices - 1)))


def _zb_v_row(rank: int, shape: Shape) -> Row:
    """2 (p - r) - 1 forwards of the way down; then, until all forwards are done, one up for one down; then the rest.

    A W follows its I, except in the last r rounds of the way down and up, where I alone lets the ranks before continue.
    With slices, more forwards of both ways run before the first I.
    """
    num_ranks, forwards, backwards = shape.num_ranks, shape.forward_order, shape.backward_order
    down, up, count = rank, 2 * num_ranks - 1 - rank, len(forwards)
    row: list[Action] = []
    done = {(stage, op): 0 for stage in (down, up) for op in (Op.F, Op.I, Op.W)}

    def run(stage: int, *ops: Op) -> None:
        for op in ops:
            row.append(Action(stage, op, (forwards if op is Op.F else backwards)[done[stage, op]]))
            done[stage, op] += 1

    for _ in range(2 * (num_ranks - rank) - 1):
        run(down, Op.F)
    for _ in range(rank + shape.num_slices - 1):
        run(up, Op.F)
        run(down, Op.F)
    for _ in range(num_ranks - rank):
        run(up, Op.F, Op.I, Op.W)
    while done[up, Op.F] < count:
        if done[down, Op.F] < count:
            run(down, Op.F)
        run(down, Op.I, Op.W)
        run(up, Op.F, Op.I, Op.W)
    for _ in range(shape.num_slices - 1):
        run(down, Op.I, Op.W)
        run(up, Op.I, Op.W)
    for _ in range(rank):
        run(down, Op.I)
        run(up, Op.I)
    for _ in range(num_ranks - rank):
        run(down, Op.I, Op.W)
    for stage in (up, down):
        while done[stage, Op.W] < count:
            run(stage, Op.W)
    return tuple(row)


def _repeat_block(shape: Shape, slots_up: int, waits: tuple[int, int, int], limit: int) -> tuple[Row, ...]:
    """Repeat a building block for every microbatch, fill in the weight gradients and justify the result.

    slots_up: slots from rank to rank of the two passes up; those down take one. waits: at the last rank, at rank 0 and
    at the last rank again. limit: the most chunks alive on a rank.
    """
    last, count = shape.num_ranks - 1, min(shape.num_microbatches, FILLS * shape.num_ranks)
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
            for microbatch in range(count)
            for slot, stage, op in passes
        }
        orders.append([timed[slot] for slot in sorted(timed)])
    table = _justify(_fill_with_weights(orders, limit), limit)
    return _without_idle(_repeat_middle(table, shape.num_microbatches - count))


def _fill_with_weights(orders: list[list[Action]], limit: int) -> list[list[Action]]:
    """Put every W, oldest first, where its rank would be idle if all ops took one slot, or where `limit` chunks are
    alive.

    orders: the F and I of each rank of a V.
    """
    rows: list[list[Action]] = [[] for _ in orders]
    pending: list[list[Action]] = [[] for _ in orders]
    position, alive = [0] * len(orders), [0] * len(orders)
    done: set[Action] = set()
    needs = _needs(2 * len(orders) - 1)
    left = sum(len(order) + sum(action.op is Op.I for action in order) for order in orders)
    while left:
        started: list[Action] = []
        for rank, order in enumerate(orders):
            action = order[position[rank]] if position[rank] < len(order) else None
            if action and done.issuperset(needs(action)) and (action.op is Op.I or alive[rank] < limit):
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
    return rows


Neighbours = Callable[[Action], tuple[tuple[int, Op, int | None], ...]]  # actions as plain tuples: made faster


def _needs(last: int) -> Neighbours:
    """Return the function from an action to those that must end before it; `last` is the last stage."""

    def needs(action: Action) -> tuple[tuple[int, Op, int | None], ...]:
        stage, op, microbatch = action
        if op is Op.F:
            return ((stage - 1, Op.F, microbatch),) if stage else ()
        if op is Op.W:
            return ((stage, Op.I, microbatch),)
        own = (stage, Op.F, microbatch)
        return (own, (stage + 1, Op.I, microbatch)) if stage < last else (own,)

    return needs


def _justify(rows: Sequence[Sequence[Action]], limit: int) -> Table:
    """Shorten rows of unit slots by forward-backward improvement (Li and Willis 1992).

    Every action moves to a free slot as late as it can, then as early as it can. No rank ever holds more than `limit`
    chunks.
    """
    last = 2 * len(rows) - 1

    def needed_by(action: Action) -> tuple[tuple[int, Op, int | None], ...]:
        """Return the actions that can only start after it: the inverse of `_needs`."""
        stage, op, microbatch = action
        if op is Op.W:
            return ()
        own = (stage, Op.I if op is Op.F else Op.W, microbatch)
        following = stage + 1 if op is Op.F else stage - 1
        return (own, (following, op, microbatch)) if 0 <= following <= last else (own,)

    late = _shift([row[::-1] for row in _in_slots(rows)], limit, Op.W, needed_by)
    return _shift([row[::-1] for row in late], limit, Op.F, _needs(last))


def _in_slots(rows: Sequence[Sequence[Action]]) -> Table:
    """Return the slots of the rows if every action starts as soon as it can."""
    needs = _needs(2 * len(rows) - 1)
    table: list[list[Action | None]] = [[] for _ in rows]
    position = [0] * len(rows)
    done: set[Action] = set()
    while started := [
        (rank, row[position[rank]])
        for rank, row in enumerate(rows)
        if position[rank] < len(row) and done.issuperset(needs(row[position[rank]]))
    ]:
        for slots in table:
            slots.append(None)
        for rank, action in started:
            table[rank][-1] = action
            position[rank] += 1
            done.add(action)
    return table


def _shift(table: Table, limit: int, takes: Op, needs: Neighbours) -> Table:
    """Move into every free slot, first to last, the first later action of its rank that can run there.

    takes: the op from which on a chunk is alive in the direction of the slots: F, or W if the slots run backwards.
    """
    alive_after = {takes: 1, Op.I: 0, Op.W if takes is Op.F else Op.F: -1}
    rows = [list(row) for row in table]
    ahead: list[dict[tuple[int, Op], list[int]]] = []  # for each rank the slots of each kind of action, last first
    for row in rows:
        ahead.append(defaultdict(list))
        for slot in reversed(range(len(row))):
            if action := row[slot]:
                ahead[-1][action[:2]].append(slot)
    done: set[Action] = set()
    alive = [0] * len(rows)

    def has_room(rank: int, start: int, end: int) -> bool:
        """Return True if a chunk more can be alive in these slots of the rank."""
        chunks = alive[rank]
        for action in rows[rank][start:end]:
            if chunks >= limit:
                return False
            chunks += alive_after[action[1]] if action else 0
        return chunks < limit

    for slot in range(len(rows[0])):
        started: list[Action] = []
        for rank, row in enumerate(rows):
            if row[slot] is None:
                for later in sorted(slots[-1] for slots in ahead[rank].values() if slots):
                    action = row[later]
                    assert action
                    if done.issuperset(needs(action)) and (action[1] is not takes or has_room(rank, slot, later)):
                        row[slot], row[later] = action, None
                        break
            if action := row[slot]:
                ahead[rank][action[:2]].pop()
                alive[rank] += alive_after[action[1]]
                started.append(action)
        done.update(started)
    length = max(slot + 1 for row in rows for slot, action in enumerate(row) if action)
    return [row[:length] for row in rows]


def _repeat_middle(table: Table, times: int) -> Table:
    """Return the table with `times` more microbatches, which repeat the six slots of its steady middle.

    In those slots every rank runs each op of each of its stages once, so that after them all is as before, one
    microbatch later.
    """
    if not times:
        return table
    start = next(
        slot
        for slot in range(len(table[0]))
        if all(len({action[:2] for action in row[slot : slot + PERIOD] if action}) == PERIOD for row in table)
    )

    def later(part: Sequence[Action | None], by: int) -> list[Action | None]:
        return [action and Action(action[0], action[1], action[2] + by) for action in part]  # type: ignore[operator]

    return [
        [
            *row[:start],
            *chain(*(later(row[start : start + PERIOD], by) for by in range(times))),
            *later(row[start:], times),
        ]
        for row in table
    ]


def _without_idle(table: Table) -> tuple[Row, ...]:
    return tuple(tuple(action for action in row if action) for row in table)
