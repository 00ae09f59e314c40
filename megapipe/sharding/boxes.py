"""A rank's slice of a parameter, or a flat piece of that slice, as rectangles of the global tensor.

Checkpoints write these rectangles and read them on any other grid; verification compares them with a whole tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from megapipe.sharding.spec import ParamSpec


@dataclass(frozen=True)
class Box:
    """A rectangle of a global tensor: `offset` and `shape` per dimension."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """Index of the rectangle in the global tensor."""
        return tuple(slice(o, o + n) for o, n in zip(self.offset, self.shape, strict=True))

    def intersect(self, other: Box) -> Box | None:
        """Return the common rectangle of two boxes of one tensor, None if they do not overlap."""
        pairs = list(zip(self.slices, other.slices, strict=True))
        starts = tuple(max(own.start, others.start) for own, others in pairs)
        stops = tuple(min(own.stop, others.stop) for own, others in pairs)
        shape = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
        return Box(starts, shape) if all(n > 0 for n in shape) else None


@dataclass(frozen=True)
class Piece:
    """A box of a parameter: elements [start, start + box.num_elements) of the flattened local tensor, row-major."""

    spec: ParamSpec
    box: Box
    start: int
    owned: bool  # this tp_rank is the first of the ranks that hold these elements

    @property
    def stop(self) -> int:
        return self.start + self.box.num_elements


def pieces(spec: ParamSpec, tp_rank: int, tp: int, start: int = 0, stop: int | None = None) -> tuple[Piece, ...]:
    """Return elements [start, stop) of this rank's flattened local tensor as boxes of the global tensor, in flat order.

    A flat range of a matrix is at most three rectangles for each interval of the cut: the end of a row, whole rows,
    the start of a row.
    """
    if len(spec.shape) > 2:
        raise ValueError(f"{spec.name} has {len(spec.shape)} dimensions; parameters have one or two")
    intervals, local = spec.intervals(tp_rank, tp), spec.local_shape(tp_rank, tp)
    stop = math.prod(local) if stop is None else stop
    columns = math.prod(local[1:])
    assert spec.slicing.dim != 1 or len(intervals) == 1, "several intervals of columns would interleave in every row"
    first = 0  # flat index of the interval's first element
    found: list[Piece] = []
    for interval in intervals:
        # a cut of columns is one interval, which holds all rows
        at_row, at_column = (0, interval.start) if spec.slicing.dim == 1 else (interval.start, 0)
        rows = local[0] if spec.slicing.dim == 1 else interval.stop - interval.start
        low, high = max(start - first, 0), min(stop - first, rows * columns)
        for row, num_rows, column, num_columns, at in rectangles(rows, columns, low, high):
            offset, shape = (at_row + row, at_column + column), (num_rows, num_columns)
            box = Box(offset[: len(local)], shape[: len(local)])
            found.append(Piece(spec, box, first + at, interval.replicas[0] == tp_rank))
        first += rows * columns
    return tuple(found)


def rectangles(rows: int, columns: int, start: int, stop: int) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield the flat range [start, stop) of a row-major block as rectangles: row, rows, column, columns, flat start."""
    while start < stop:
        row, column = divmod(start, columns)
        if column == 0 and stop - start >= columns:
            whole = (stop - start) // columns
            yield row, whole, 0, columns, start
            start += whole * columns
        else:
            end = min(stop, (row + 1) * columns)
            yield row, 1, column, end - start, start
            start = end
