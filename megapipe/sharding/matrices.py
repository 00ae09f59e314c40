"""The matrices of hidden layers that --optimizer muon orthogonalizes, and the ranks that compute each of them.

A parameter may hold several: q, k, v and gates of a fused projection, gate and up of a gated MLP, those of all experts.
Every rank keeps the flat shards that it has under any update rule. In an update the parts of a matrix meet on one rank,
its owner, first over the replicas that share out the optimizer state, then over the ranks that cut the parameter, and
the result returns the same way. So state, buckets and checkpoints do not depend on where matrices are computed.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from megapipe.sharding.buffers import Bucket, Slot
from megapipe.sharding.spec import ExpertRows, Fused, Interval, ParamSpec, QueryGroups


@dataclass(frozen=True)
class LocalRows:
    """Rows that a rank holds of a matrix: `start` in its local tensor, `at` in the matrix; `holders` have them, too."""

    start: int
    count: int
    at: int
    holders: tuple[int, ...]


@dataclass(frozen=True)
class Matrix:
    """One matrix of a parameter: rows of the global tensor, joined in order."""

    spec: ParamSpec
    rows: tuple[range, ...]

    @property
    def shape(self) -> tuple[int, int]:
        return sum(map(len, self.rows)), self.spec.shape[1]

    def flops(self, steps: int) -> int:
        """Return the operations of `steps` steps of Newton-Schulz, each three products of matrices."""
        small, large = sorted(self.shape)
        return steps * (4 * small * small * large + 2 * small**3)

    def columns(self, rank: int, ranks: int) -> range:
        """Return the columns that a rank holds."""
        if self.spec.slicing.dim != 1:
            return range(self.spec.shape[1])
        (interval,) = self.spec.intervals(rank, ranks)
        return range(interval.start, interval.stop)

    def local_rows(self, rank: int, ranks: int) -> tuple[LocalRows, ...]:
        """Return the rows that a rank holds, in the order of its local tensor; none of another rank's experts."""
        if self.spec.slicing.dim == 1:
            intervals: tuple[Interval, ...] = (Interval(0, self.spec.shape[0], (rank,)),)
        else:
            intervals = self.spec.intervals(rank, ranks)
        found, first = [], 0
        for start, stop, holders in ((held.start, held.stop, held.replicas) for held in intervals):
            at = 0
            for rows in self.rows:
                low, high = max(start, rows.start), min(stop, rows.stop)
                if low < high:
                    found.append(LocalRows(first + low - start, high - low, at + low - rows.start, holders))
                at += len(rows)
            first += stop - start
        return tuple(found)


def matrices_of(spec: ParamSpec, splits_qkv: bool = True) -> tuple[Matrix, ...]:
    """Return the matrices of a parameter; none of one that no hidden layer multiplies by."""
    if spec.matrix is None:
        return ()
    slicing, size = spec.slicing, spec.shape[0]
    if isinstance(slicing, QueryGroups) and splits_qkv:
        ends = (0, *accumulate(count * slicing.head_dim for count in slicing.heads_of_group.values()))
        starts = range(0, size, ends[-1])
        kinds = pairwise(ends)
        return tuple(Matrix(spec, tuple(range(start + low, start + high) for start in starts)) for low, high in kinds)
    parts = 1
    if isinstance(slicing, ExpertRows):
        parts = slicing.count * slicing.parts
    elif isinstance(slicing, Fused) and slicing.dim == 0:
        parts = slicing.parts
    height = size // parts
    return tuple(Matrix(spec, (range(index * height, (index + 1) * height),)) for index in range(parts))


@dataclass(frozen=True)
class MatrixPiece:
    """Elements of a matrix in one shard: `start` in the stage's buffer, `at` in the rank's rows of the matrix."""

    start: int
    numel: int
    at: int


@dataclass(frozen=True, eq=False)
class OwnedMatrix:
    """A matrix and the place of its owner: `replica` in the group of replicas, `column` among the ranks that cut it."""

    matrix: Matrix
    bucket: Bucket
    slot: Slot
    rows: tuple[LocalRows, ...]  # of this rank
    replica: int
    column: int

    @property
    def local_shape(self) -> tuple[int, int]:
        """The shape of this rank's part."""
        return sum(rows.count for rows in self.rows), self.slot.shape[1]

    def parts(self, replica: int, num_shards: int) -> Iterator[MatrixPiece]:
        """Yield what the shard of a replica holds of this rank's rows; all of them if num_shards is 1."""
        low, high = self.bucket.shard(replica if num_shards > 1 else 0, num_shards)
        width, at = self.slot.shape[1], 0
        for rows in self.rows:
            first = self.slot.start + rows.start * width
            start, stop = max(low, first), min(high, first + rows.count * width)
            if start < stop:
                yield MatrixPiece(start, stop - start, at + start - first)
            at += rows.count * width


def share_out(
    buckets: Sequence[Bucket], cut: tuple[int, int], replicas: int, columns: int, steps: int, splits_qkv: bool
) -> tuple[OwnedMatrix, ...]:
    """Return the matrices of which a rank holds a part, with owners that share the operations of `steps` steps evenly.

    cut: this rank's place among the ranks that cut the parameters, and their number. columns: how many of them meet for
    one matrix: tp, or etp for experts. The largest matrices are placed first, each on the rank with the least work.
    """
    rank, ranks = cut
    held = [
        (matrix, bucket, slot, rows)
        for bucket in buckets
        for slot in bucket.slots
        for matrix in matrices_of(slot.spec, splits_qkv)
        if (rows := matrix.local_rows(rank, ranks))
    ]
    work = [(0, place) for place in range(replicas * columns)]
    owners: dict[int, int] = {}
    for index in sorted(range(len(held)), key=lambda index: -held[index][0].flops(steps)):
        done, place = heapq.heappop(work)
        owners[index] = place
        heapq.heappush(work, (done + held[index][0].flops(steps), place))
    return tuple(
        OwnedMatrix(matrix, bucket, slot, rows, *divmod(owners[index], columns))
        for index, (matrix, bucket, slot, rows) in enumerate(held)
    )


def muon_scale(shape: Sequence[int], mode: str) -> float:
    """Return the factor of an orthogonalized update, of --muon-scale-mode, for a linear of shape [outputs, inputs].

    spectral: Liu et al. 2025 (arXiv:2502.16982) without their 0.2. shape_scaling: Jordan et al. 2024. unit_rms_norm: of
    Bernstein and Newhouse 2024 (arXiv:2409.20325).
    """
    outputs, inputs = shape
    if mode == "spectral":
        return math.sqrt(max(outputs, inputs))
    return math.sqrt(outputs / inputs if mode == "unit_rms_norm" else max(1.0, outputs / inputs))
