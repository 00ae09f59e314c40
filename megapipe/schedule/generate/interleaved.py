"""Interleaved 1F1B (Narayanan et al. 2021, arXiv:2104.04473): several chunks a rank, the bubble divided by their number.

Microbatches go in groups: all of a group through one chunk, then through the next. The backward takes the chunks in reverse.
"""

from __future__ import annotations

from megapipe.schedule.action import Action, Op
from megapipe.schedule.generate.one_f_one_b import alternate
from megapipe.schedule.generate.shape import Shape
from megapipe.schedule.schedule import Row


def interleaved(shape: Shape) -> tuple[Row, ...]:
    """Rank r: min(2 (p - r - 1) + (v - 1) x largest group, v m) warm-up forwards, then F and B in turn, then the rest."""
    p = shape.num_ranks
    groups = microbatch_groups(shape.num_microbatches, shape.group_size, p)
    largest = max(len(group) for group in groups)
    chunks, forward, backward = range(shape.num_chunks), Op.F, Op.B
    rows = []
    for rank in range(p):
        forwards = [Action(chunk * p + rank, forward, m) for group in groups for chunk in chunks for m in group]
        backwards = [
            Action(chunk * p + rank, backward, m) for group in groups for chunk in reversed(chunks) for m in group
        ]
        rows.append(alternate(forwards, backwards, warm_up=2 * (p - rank - 1) + (shape.num_chunks - 1) * largest))
    return tuple(rows)


def microbatch_groups(num_microbatches: int, group_size: int, num_ranks: int) -> list[range]:
    """Cut 0 .. num_microbatches - 1 into groups of group_size.

    A remainder smaller than num_ranks is folded into the last full group: alone it would starve the pipeline, and with the warm-up counted
    by the largest group no number of microbatches deadlocks.
    """
    full, remainder = divmod(num_microbatches, group_size)
    starts = [group_size * index for index in range(full)]
    if remainder >= num_ranks or (remainder and not full):
        starts.append(group_size * full)
    return [range(start, end) for start, end in zip(starts, [*starts[1:], num_microbatches], strict=True)]
