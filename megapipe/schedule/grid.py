"""The rank x slot grid as text: one line a rank, one column an action. What every ScheduleError shows."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from megapipe.schedule.schedule import Row


def rows_text(
    rows: Sequence[Row], marks: Collection[tuple[int, int]] = (), slots_around: int = 5, ranks_around: int = 8
) -> str:
    """The rows, slot by slot in the order of execution. `marks` are (rank, slot) pairs to set in >angle brackets<.

    With marks each row is cut to the slots around its own mark (or around the first one), and ranks far from every mark are left out: a
    schedule of a thousand ranks still shows its fault on one screen.
    """
    marked = dict(marks)
    first = next(iter(marks), (0, 0))[1]
    lines, skipped = [], 0
    for rank, row in enumerate(rows):
        if marks and min(abs(rank - other) for other in marked) > ranks_around:
            skipped += 1
            continue
        if skipped:
            lines.append(f"      ({skipped} ranks)")
            skipped = 0
        lines.append(f"rank {rank}: " + _row_text(row, marked.get(rank), first, slots_around if marks else len(row)))
    if skipped:
        lines.append(f"      ({skipped} ranks)")
    return "\n".join(lines)


def _row_text(row: Row, mark: int | None, first: int, around: int) -> str:
    centre = first if mark is None else mark
    start, end = max(0, centre - around), min(len(row), centre + around + 1)
    start = min(start, len(row))
    cells = [f">{action}<" if slot == mark else str(action) for slot, action in enumerate(row[start:end], start)]
    if mark is not None and mark >= len(row):
        cells.append(">end of row<")
    before, after = (f"[{start}] ... " if start else ""), (" ..." if end < len(row) else "")
    return before + " ".join(cells) + after
