"""The head start: the forwards of a step that run before the norm and overflow check of the previous step is known.

Without a barrier between steps rank 0 begins while the last rank still works on the previous step: with equal stages
rank r starts p - 1 - r forwards earlier. These forwards, F of stage s and microbatch k with s + k < p - 1, are the
triangle that ZB-H2 and ZB-V keep busy (Qi et al. 2023, arXiv:2401.10241, figures 3 and 9). If the check changes the
weights they run again, so none of their messages may be in flight at that moment: a message that would leave the head
start is sent or posted after it.
"""

from __future__ import annotations

from dataclasses import dataclass

from megapipe.schedule.action import PLANNED_OPS, Action, Op
from megapipe.schedule.schedule import Row, Schedule

Forwards = frozenset[tuple[int, int | None]]  # (stage, microbatch)


@dataclass(frozen=True)
class HeadStart:
    """A lowered schedule and, for each row, the number of first actions that may run before the check.

    These are forwards and messages between them. Computation and the order of every channel are those of the original
    schedule.
    """

    schedule: Schedule
    lengths: tuple[int, ...]


def give_head_start(schedule: Schedule) -> HeadStart:
    """Move the messages of a valid lowered schedule so that the head starts of all ranks are closed.

    Closed means that a message sent in one head start is received and used in another. A send to a later forward and a
    receive posted ahead for a later action move to right after the head start.
    """
    heads = _forwards(schedule)
    rows, lengths = [], []
    for row in schedule.rows:
        end = next((slot for slot, action in enumerate(row) if _ends_head(action, heads)), len(row))
        first = tuple(action for action in row[:end] if _is_closed(action, heads))
        rows.append((*first, *(action for action in row[:end] if not _is_closed(action, heads)), *row[end:]))
        lengths.append(len(first))
    return HeadStart(
        Schedule(schedule.name, schedule.placement, schedule.num_microbatches, tuple(rows)), tuple(lengths)
    )


def _forwards(schedule: Schedule) -> Forwards:
    """Return the largest set of forwards of the triangle that come first in their rows and whose inputs are made in the
    set.
    """
    border = schedule.num_ranks - 1
    found: Forwards = frozenset(
        (stage, microbatch)
        for stage in range(border)
        for microbatch in range(min(border - stage, schedule.num_microbatches))
    )
    while True:
        leading = frozenset(pair for row in schedule.rows for pair in _leading(row, found))
        kept = frozenset(
            (stage, microbatch) for stage, microbatch in leading if stage == 0 or (stage - 1, microbatch) in leading
        )
        if kept == found:
            return found
        found = kept


def _leading(row: Row, forwards: Forwards) -> list[tuple[int, int | None]]:
    leading = []
    for action in row:
        if _ends_head(action, forwards):
            break
        if action.op is Op.F:
            leading.append((action.stage, action.microbatch))
    return leading


def _ends_head(action: Action, forwards: Forwards) -> bool:
    return action.op in PLANNED_OPS and not (action.op is Op.F and (action.stage, action.microbatch) in forwards)


def _is_closed(action: Action, forwards: Forwards) -> bool:
    if action.op in (Op.F, Op.RECV_F):
        return (action.stage, action.microbatch) in forwards
    return action.op is Op.SEND_F and (action.stage + 1, action.microbatch) in forwards
