"""Lowering: from a compute-only schedule to the one that the engine runs, with messages and gradient reductions."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from megapipe.errors import ConfigError, ScheduleError
from megapipe.schedule.action import COMPLETES_OPS, COMPUTE_OPS, PLANNED_OPS, Action, Op
from megapipe.schedule.dependencies import MAKES, NEEDS, TRAVELS
from megapipe.schedule.schedule import Schedule, gc_paused

Sends = dict[Op, list[list[Op | None]]]  # [op][direction][stage] -> the SEND that follows


def default_receive_depth(may_use_gpu: bool) -> int:
    """Return how many compute actions ahead receives are posted if nothing else is asked for.

    A message that finds its receive posted takes gloo a third of the time of one that has to wait for it, and a posted
    receive costs only memory there; on a GPU it occupies the device until the message arrives.
    """
    return 1 if may_use_gpu else 4


@gc_paused()
def lower(schedule: Schedule, receive_depth: int = 2) -> Schedule:
    """Add SEND, RECV and REDUCE_GRAD to a valid compute-only schedule.

    - A SEND follows the action that made its value. Between two stages of one rank there is no message.
    - A RECV is posted `receive_depth` compute actions before the action that waits for it (0: immediately before it),
      at the earliest at the start of the row: early enough to overlap with computation, and bounded, because a posted
      receive occupies a GPU until its peer sends. So at most receive_depth + 1 receives are posted per channel if
      messages are used in the order they were made. Otherwise a receive is posted no later than those made after it, so
      that every route stays first-in first-out: all messages of one kind from one rank to another.
    - The two halves of an overlapped pair stay together: receives are posted before the pair, sends follow it.
    - REDUCE_GRAD follows the last B or W of each stage. An UPDATE includes the reduction of its gradients, unless other
      computations come between: then REDUCE_GRAD follows the gradients at once, and NORM comes halfway to the UPDATE.
    """
    if receive_depth < 0:
        raise ConfigError(
            f"receive depth {receive_depth}: a receive is not posted after the action that waits for it; use 0 or more"
        )
    if schedule.is_lowered:
        raise ScheduleError(f"schedule {schedule} already holds messages or reductions; lower schedule.compute_only()")
    sends, num_directions, overlap = sends_of(schedule), len(schedule.placement.directions), Op.OVERLAP
    receives = _plan_receives(schedule, sends, receive_depth)
    rows = []
    for rank, row in enumerate(schedule.rows):
        receives_at, reductions_at = receives[rank], _plan_reductions(schedule, rank)
        lowered: list[Action] = []
        held: list[Action] = []  # the send of a pair's first half, until the second half
        pair_end = -1
        for index, action in enumerate(row):
            if index in receives_at:
                lowered += receives_at[index]
            lowered.append(action)
            stage, op, microbatch = action
            send = sends[op][microbatch % num_directions][stage]  # type: ignore[operator]
            if op is overlap:
                pair_end = index + 2
            if send is not None:
                (held if index < pair_end else lowered).append(Action(stage, send, microbatch))
            if held and index == pair_end:
                lowered += held
                held.clear()
            if index in reductions_at:
                lowered += reductions_at[index]
        rows.append(tuple(lowered))
    return replace(schedule, rows=tuple(rows))


def without_pairs(row: tuple[Action, ...]) -> tuple[Action, ...]:
    """Return a row, lowered or not, for a rank that runs the two halves of each pair one after the other.

    There is no OVERLAP, and the message of the first half leaves before the second half starts, not after the pair.
    """
    if not any(action.op is Op.OVERLAP for action in row):
        return row
    held = {pair._replace(op=Op.SEND_F) for pair in row if pair.op is Op.OVERLAP}
    sent = held.intersection(row)
    result: list[Action] = []
    for action in row:
        if action.op is not Op.OVERLAP and action not in held:
            result.append(action)
        send = action._replace(op=Op.SEND_F)
        if action.op is Op.F and send in sent:
            result.append(send)
    return tuple(result)


def sends_of(schedule: Schedule) -> Sends:
    """Return the SEND that follows each op of a compute-only schedule, None where its value stays on the rank."""
    directions, last = schedule.placement.directions, schedule.num_stages - 1
    table: Sends = {op: [[None] * (last + 1) for _ in directions] for op in PLANNED_OPS}
    for op in COMPUTE_OPS:
        for kind in (kind for kind, _ in MAKES[op] if kind in TRAVELS):
            send, _, step = TRAVELS[kind]
            for direction, ranks in enumerate(directions):
                for stage in range(max(0, -step), last + 1 - max(0, step)):
                    if ranks[stage] != ranks[stage + step]:
                        table[op][direction][stage] = send
    return table


def _plan_receives(schedule: Schedule, sends: Sends, receive_depth: int) -> list[dict[int, list[Action]]]:
    """Return [rank][index of a compute action] -> receives to post right before it."""
    count, directions = schedule.num_units, schedule.placement.directions
    far = {
        op: [kind for kind, offset in NEEDS[op] if kind in TRAVELS and offset == -TRAVELS[kind][2]]
        for op in PLANNED_OPS
    }
    # [kind][consumer's stage x microbatches + microbatch] -> index in its row of the action that needs the message
    consumed_at = {kind: [max(map(len, schedule.rows))] * (schedule.num_stages * count) for kind in TRAVELS}
    # (SEND, sender, receiver) -> (stage that makes it, microbatch) of values that change rank, in the order of sends
    sent: defaultdict[tuple[Op, int, int], list[tuple[int, int]]] = defaultdict(list)
    steps = {send: step for send, _, step in TRAVELS.values()}
    for rank, row in enumerate(schedule.rows):
        for index, (stage, op, microbatch) in enumerate(row):
            assert microbatch is not None
            for kind in far[op]:
                consumed_at[kind][stage * count + microbatch] = index
            direction = microbatch % len(directions)
            send = sends[op][direction][stage]
            if send is not None:
                sent[send, rank, directions[direction][stage + steps[send]]].append((stage, microbatch))

    # [rank]: slot of each half of an overlapped pair -> slot of its OVERLAP
    pair_heads: list[dict[int, int]] = [{} for _ in schedule.rows]
    if Op.OVERLAP in schedule.ops:
        for heads, row in zip(pair_heads, schedule.rows, strict=True):
            heads.update({slot + half: slot for slot, a in enumerate(row) if a.op is Op.OVERLAP for half in (1, 2)})
    kind_of = {send: kind for kind, (send, _, _) in TRAVELS.items()}
    plans: list[dict[int, list[Action]]] = [{} for _ in schedule.rows]
    for (send, _, rank), messages in sent.items():
        kind = kind_of[send]
        _, receive, step = TRAVELS[kind]
        posts, bound = [], len(schedule.rows[rank])
        for stage, microbatch in reversed(messages):  # a receive is posted no later than its successors
            bound = min(bound, consumed_at[kind][(stage + step) * count + microbatch])
            slot = max(0, bound - receive_depth)
            posts.append((pair_heads[rank].get(slot, slot), Action(stage + step, receive, microbatch)))
        for slot, action in reversed(posts):
            plans[rank].setdefault(slot, []).append(action)
    return plans


def _plan_reductions(schedule: Schedule, rank: int) -> dict[int, list[Action]]:
    """Return index of a compute action -> reductions to start right after it: of the stages whose last B or W it is.

    Both holders of a stage on two ranks must issue its reductions in the same order: the last stage of the model first,
    although each rank completes them in its own order. A rank takes part even if it ran no microbatch of the stage.
    """
    plan: dict[int, list[Action]] = {}
    if not schedule.has_backward:
        return plan
    if not schedule.is_synchronous:
        completed = {
            (stage, m): index for index, (stage, op, m) in enumerate(schedule.rows[rank]) if op in COMPLETES_OPS
        }
        for index, (stage, op, microbatch) in enumerate(schedule.rows[rank]):
            if op is Op.UPDATE and index > (done := completed[stage, microbatch]) + 1:
                plan.setdefault(done, []).append(Action(stage, Op.REDUCE_GRAD, microbatch))
                plan.setdefault((done + index) // 2, []).append(Action(stage, Op.NORM, microbatch))
        return plan
    completed_at = {stage: index for index, (stage, op, _) in enumerate(schedule.rows[rank]) if op in COMPLETES_OPS}
    not_before = 0
    for stage in reversed(schedule.placement.stages_of(rank)):
        index = completed_at.get(stage, 0)
        if len(schedule.placement.ranks_of(stage)) > 1:
            index = not_before = max(not_before, index)
        plan.setdefault(index, []).append(Action(stage, Op.REDUCE_GRAD, None))
    return plan
