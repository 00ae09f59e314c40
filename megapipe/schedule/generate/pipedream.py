"""The asynchronous ancestors: PipeDream (Narayanan et al. 2019, arXiv:1806.03377) and PipeDream-2BW (2021, arXiv:2006.09503).

NOT synchronous: weights change while microbatches are under way, and what is trained differs from what one process would train. They fill
the pipeline once and never drain it; here a schedule is a stretch of that stream, whose ends fill and drain.
"""

from __future__ import annotations

from megapipe.schedule.action import Action, Op
from megapipe.schedule.generate.one_f_one_b import one_f_one_b
from megapipe.schedule.generate.shape import Shape
from megapipe.schedule.schedule import Row, Schedule


def pipedream(shape: Shape) -> tuple[Row, ...]:
    """1F1B without a flush, an optimizer step after every backward. A microbatch's backward uses the weights of its forward (stashing)."""
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


def stashed_versions(schedule: Schedule) -> tuple[int, ...]:
    """Of each rank the most weight versions alive at once if every microbatch keeps the newest of its forward until its backward.

    PipeDream's stashing: rank r of p keeps p - r (once the pipeline is full).
    """
    most = []
    for row in schedule.rows:
        version, used, peak = 0, dict[tuple[int, int | None], int](), 1
        for stage, op, microbatch in row:
            if op is Op.F:
                used[stage, microbatch] = version
            elif op is Op.B:
                peak = max(peak, len({version, *used.values()}))
                del used[stage, microbatch]
            elif op is Op.UPDATE:
                version += 1
        most.append(peak)
    return tuple(most)


def double_buffered_versions(schedule: Schedule, group_size: int) -> tuple[int, ...]:
    """Of each rank the most weight versions alive at once if microbatch k uses version max(0, k // group_size - 1) (PipeDream-2BW): 2.

    Raises ValueError if a forward comes before the version it uses: groups smaller than the pipeline is deep.
    """
    most = []
    for rank, row in enumerate(schedule.rows):
        newest, open_groups, peak = 0, list[int](), 1
        for _, op, microbatch in row:
            group = (microbatch or 0) // group_size
            if op is Op.F:
                if max(0, group - 1) > newest:
                    raise ValueError(f"rank {rank}: microbatch {microbatch} needs weight version {group - 1}, the newest is {newest}")
                open_groups.append(group)
            elif op is Op.B:
                open_groups.remove(group)
            elif op is Op.UPDATE:
                newest += 1
            peak = max(peak, len({newest, *(max(0, each - 1) for each in open_groups)}))
        most.append(peak)
    return tuple(most)
