"""A schedule or a timeline as text for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from megapipe.schedule.action import COMPUTE_OPS, Action
from megapipe.schedule.schedule import Schedule, rows_text
from megapipe.schedule.simulate import Timeline


def grid_text(drawn: Schedule | Timeline, max_columns: int = 160) -> str:
    """Return one line per rank: every action of a Schedule, or the computation of a Timeline drawn to scale.

    A cell is as long as the shortest action, or longer if the text would exceed max_columns. It shows op and microbatch
    (F3, B0; with several stages per rank also a letter for the chunk: F3a, F3b), "=" where an action continues, or "."
    where the rank is idle.
    """
    if isinstance(drawn, Schedule):
        return rows_text(drawn.rows)
    return _timeline_text(drawn, max_columns)


def _timeline_text(timeline: Timeline, max_columns: int) -> str:
    boxes = [_computation(timeline, rank) for rank in range(timeline.schedule.num_ranks)]
    seconds = [end - start for row in boxes for _, start, end in row if end > start]
    if not seconds:
        return "\n".join(f"rank {rank}:" for rank in range(len(boxes)))
    several = timeline.schedule.placement.num_chunks > 1
    labels = [[_label(timeline, rank, action, several) for action, _, _ in row] for rank, row in enumerate(boxes)]
    width = 1 + max(len(label) for row in labels for label in row)
    title = len(f"rank {len(boxes) - 1} ")
    unit = max(min(seconds), timeline.makespan_seconds / max(1, (max_columns - title) // width))
    columns = round(timeline.makespan_seconds / unit)
    lines = []
    for rank, row in enumerate(boxes):
        cells = ["."] * max(columns, 1)
        for label, (_, start, end) in zip(labels[rank], row, strict=True):
            first, after = min(round(start / unit), len(cells) - 1), min(round(end / unit), len(cells))
            cells[first:after] = [label] + ["="] * (after - first - 1) if after > first else []
        lines.append(f"rank {rank}".ljust(title) + "".join(cell.ljust(width) for cell in cells).rstrip())
    return "\n".join([*lines, f"one cell: {unit:.4g} s"])


def _computation(timeline: Timeline, rank: int) -> Sequence[tuple[Action, float, float]]:
    times = zip(timeline.schedule.rows[rank], timeline.starts[rank], timeline.ends[rank], strict=True)
    return [(action, start, end) for action, start, end in times if action.op in COMPUTE_OPS]


def _label(timeline: Timeline, rank: int, action: Action, several_chunks: bool) -> str:
    chunk = timeline.schedule.placement.stages_of(rank).index(action.stage)
    letter = chr(ord("a") + chunk % 26) if several_chunks else ""
    return f"{action.op.value}{action.microbatch}{letter}"
