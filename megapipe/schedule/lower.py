"""Lowering: from a compute-only schedule to the one that the engine runs, with messages and gradient reductions."""

from __future__ import annotations

from itertools import chain

from megapipe.errors import ConfigError, ScheduleError
from megapipe.schedule.action import COMPLETES_OPS, COMPUTE_OPS, PLANNED_OPS, Action, Op
from megapipe.schedule.dependencies import MAKES, NEEDS, TRAVELS, ValueKind
from megapipe.schedule.gc_pause import gc_paused
from megapipe.schedule.schedule import Row, Schedule


@gc_paused()
def lower(schedule: Schedule, receive_depth: int = 2) -> Schedule:
    """Add SEND, RECV and REDUCE_GRAD to a valid compute-only schedule.

    - A SEND follows the action that made its value. Between two stages of one rank there is no message.
    - A RECV is posted `receive_depth` compute actions before the action that waits for it (0: immediately before it),
      at the earliest at the start of the row: early enough to overlap with computation, and bounded, because a posted
      receive occupies a GPU until its peer sends. So at most receive_depth + 1 receives are posted per channel if
      messages are used in the order they were made. Otherwise a receive is posted no later than those made after it, so
      that every channel stays first-in first-out.
    - The two halves of an overlapped pair stay together: receives are posted before the pair, sends follow it.
    - REDUCE_GRAD follows the last B or W of each stage. Schedules with UPDATE get none: an UPDATE includes the
      reduction.
    """
    if receive_depth < 0:
        raise ConfigError(
            f"receive depth {receive_depth}: a receive cannot be posted after the action that waits for it; use 0 or "
            "more"
        )
    if schedule.is_lowered:
        raise ScheduleError(
            f"schedule {schedule} already holds messages or reductions; lower a compute-only schedule "
            "(schedule.compute_only())"
        )
    receives = _plan_receives(schedule, receive_depth)
    return Schedule(
        schedule.name,
        schedule.placement,
        schedule.num_microbatches,
        tuple(_lower_row(schedule, rank, receives[rank]) for rank in range(schedule.num_ranks)),
    )


def sends_of(schedule: Schedule) -> dict[Op, list[list[Op | None]]]:
    """Return [op][direction][stage] -> the SEND that follows the compute op, or None if its value stays on the rank."""
    directions, last = schedule.placement.directions, schedule.num_stages - 1
    table: dict[Op, list[list[Op | None]]] = {op: [[None] * (last + 1) for _ in directions] for op in PLANNED_OPS}
    for op in COMPUTE_OPS:
        for kind, _ in MAKES[op]:
            if kind in TRAVELS:
                send, _, step = TRAVELS[kind]
                for direction, ranks in enumerate(directions):
                    for stage in range(last + 1):
                        if 0 <= stage + step <= last and ranks[stage] != ranks[stage + step]:
                            table[op][direction][stage] = send
    return table


def _plan_receives(schedule: Schedule, receive_depth: int) -> list[dict[int, list[Action]]]:
    """Return [rank][index of a compute action] -> receives to post right before it."""
    consumed_at = _consumption(schedule)
    heads = [_pair_heads(row) for row in schedule.rows] if Op.OVERLAP in schedule.ops else None
    count, directions = schedule.num_microbatches, schedule.placement.directions
    plans: list[dict[int, list[Action]]] = [{} for _ in range(schedule.num_ranks)]
    for (kind, stage, direction), made in _messages(schedule).items():
        _, receive, step = TRAVELS[kind]
        to_stage = stage + step
        rank = directions[direction][to_stage]
        plan, posts, bound = plans[rank], [], len(schedule.rows[rank])
        for microbatch in reversed(made):  # a receive is posted no later than its successors
            bound = min(bound, consumed_at[kind][to_stage * count + microbatch])
            slot = max(0, bound - receive_depth)
            posts.append(
                (slot if heads is None else heads[rank].get(slot, slot), Action(to_stage, receive, microbatch))
            )
        for slot, action in reversed(posts):
            plan.setdefault(slot, []).append(action)
    return plans


def _consumption(schedule: Schedule) -> dict[ValueKind, list[int]]:
    """Return [kind][consumer's stage x microbatches + microbatch] -> index in its row of the action that needs the
    message.
    """
    count = schedule.num_microbatches
    far = {
        op: [kind for kind, offset in NEEDS[op] if kind in TRAVELS and offset == -TRAVELS[kind][2]]
        for op in PLANNED_OPS
    }
    never = max(map(len, schedule.rows))
    consumed_at = {kind: [never] * (schedule.num_stages * count) for kind in TRAVELS}
    for row in schedule.rows:
        for index, (stage, op, microbatch) in enumerate(row):
            for kind in far[op]:
                consumed_at[kind][stage * count + microbatch] = index  # type: ignore[operator]
    return consumed_at


def _pair_heads(row: Row) -> dict[int, int]:
    """Return slot of each half of an overlapped pair -> slot of its OVERLAP."""
    return {slot + half: slot for slot, action in enumerate(row) if action[1] is Op.OVERLAP for half in (1, 2)}


def _messages(schedule: Schedule) -> dict[tuple[ValueKind, int, int], list[int]]:
    """Return (kind, stage that makes it, direction) -> microbatches in the order they are made, for values that change
    rank.
    """
    sends = sends_of(schedule)
    kind_of = {send: kind for kind, (send, _, _) in TRAVELS.items()}
    num_directions = len(schedule.placement.directions)
    messages: dict[tuple[ValueKind, int, int], list[int]] = {}
    for stage, op, microbatch in chain.from_iterable(schedule.rows):
        direction = microbatch % num_directions  # type: ignore[operator]
        send = sends[op][direction][stage]
        if send is not None:
            key = (kind_of[send], stage, direction)
            if key in messages:
                messages[key].append(microbatch)  # type: ignore[arg-type]
            else:
                messages[key] = [microbatch]  # type: ignore[list-item]
    return messages


def _lower_row(schedule: Schedule, rank: int, receives: dict[int, list[Action]]) -> Row:
    row = schedule.rows[rank]
    sends, num_directions = sends_of(schedule), len(schedule.placement.directions)
    reductions = _plan_reductions(schedule, rank)
    lowered: list[Action] = []
    held: list[Action] = []  # the send of a pair's first half, until the second half
    pair_end, overlap = -1, Op.OVERLAP
    for index, action in enumerate(row):
        if index in receives:
            lowered += receives[index]
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
        if index in reductions:
            lowered += reductions[index]
    return tuple(lowered)


def _plan_reductions(schedule: Schedule, rank: int) -> dict[int, list[Action]]:
    """Return index of a compute action -> reductions to start right after it: of the stages whose last B or W it is.

    Both holders of a stage on two ranks must issue its reductions in the same order: the last stage of the model first,
    although each rank completes them in its own order. A rank takes part even if it ran no microbatch of the stage.
    """
    plan: dict[int, list[Action]] = {}
    if not schedule.has_backward or not schedule.is_synchronous:
        return plan
    completed_at = {stage: index for index, (stage, op, _) in enumerate(schedule.rows[rank]) if op in COMPLETES_OPS}
    not_before = 0
    for stage in reversed(schedule.placement.stages_of(rank)):
        index = completed_at.get(stage, 0)
        if len(schedule.placement.ranks_of(stage)) > 1:
            index = not_before = max(not_before, index)
        plan.setdefault(index, []).append(Action(stage, Op.REDUCE_GRAD, None))
    return plan
