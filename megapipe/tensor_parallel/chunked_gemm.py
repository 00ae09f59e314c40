"""A linear's collective in chunks, each under the GEMM of its neighbour, where there is no other GEMM to run under. Used by linear.py.

    gathered_product   x [s / tp, b, n] -> whole(x) M [s, b, m]    chunk i + 1 of every rank's slice is gathered while chunk i is multiplied
    summed_product     x [s, b, n] -> sum over tp of x M [s, b, m], sp: this rank's slice [s / tp, b, m]
                                                                   chunk i is reduced while chunk i + 1 is multiplied

M [n, m] is a weight or its transpose, `product` multiplies by it. A chunk holds the same positions of every rank's slice, so that each is
one all-gather or reduce-scatter of its own: rows of the whole with a stride, which batched GEMMs read and write in place. Exposed remain
the first chunk's gather and the last one's reduction. (Wang et al. 2023, Overlap Communication with Dependent Computation via
Decomposition, goes around a ring instead, a chunk a rank.)

What travels has the bits of the unchunked form. A sum over tp has them where the library adds ranks in one order whatever the size, as over
two ranks; a product where its GEMMs compute a row alike whatever the number of rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from torch import Tensor

from megapipe.comm.collectives import Work, all_gather, all_reduce, reduce_scatter
from megapipe.comm.groups import Group
from megapipe.tensor_parallel.gemms import ChunkProduct
from megapipe.tensor_parallel.mappings import empty_whole, slice_length


def chunk_slices(length: int, count: int) -> list[slice]:
    """range(length) cut into `count` slices whose lengths differ by one at most; fewer where there are fewer positions."""
    count = max(1, min(count, length))
    ends = [length * i // count for i in range(count + 1)]
    return [slice(start, end) for start, end in pairwise(ends)]


def gathered_product(
    x: Tensor,  # [s / tp, ..., n]
    product: ChunkProduct,
    width: int,  # m
    group: Group,
    count: int,
    whole: Tensor | None = None,  # [s, ..., n]
) -> Tensor:
    """whole(x) M + bias, [s, ..., m]; the all-gather in `count` chunks. whole: filled with whole(x), if it is given."""
    x = x.contiguous()
    y = x.new_empty((x.shape[0] * group.size, *x.shape[1:-1], width))
    for positions, gathered in _arriving(x, group, count):
        by_rank = gathered.view(group.size, -1, gathered.shape[-1])
        product(by_rank, _rows(y, group.size, positions))
        if whole is not None:
            _rows(whole, group.size, positions).copy_(by_rank)
    return y


def summed_product(
    x: Tensor,  # [s, ..., n]
    product: ChunkProduct,
    width: int,  # m
    group: Group,
    scatters: bool,
    count: int,
) -> Tensor:
    """The sum over the group of x M, in `count` chunks: all-reduced [s, ..., m], or with `scatters` this rank's slice [s / tp, ..., m].

    Raises ConfigError if the group's size does not divide s and it scatters.
    """
    x, ranks = x.contiguous(), group.size if scatters else 1
    length = slice_length(x, group) if scatters else x.shape[0]
    y = x.new_empty((length, *x.shape[1:-1], width))
    works: list[Work] = []
    for positions in chunk_slices(length, count):
        mine = y[positions]
        partial = empty_whole(mine, group) if scatters else mine
        product(_rows(x, ranks, positions), partial.view(ranks, -1, width))
        works.append(
            reduce_scatter(mine, partial, group, async_op=True) if scatters else all_reduce(mine, group, async_op=True)
        )
    for work in works:
        work.wait()
    return y


def _arriving(x: Tensor, group: Group, count: int) -> Iterator[tuple[slice, Tensor]]:
    """(positions in a rank's slice, these positions of all ranks one after another), with one chunk under way ahead: two are held."""

    def launch(positions: slice) -> tuple[Work, Tensor]:
        mine = x[positions]
        gathered = empty_whole(mine, group)
        return all_gather(gathered, mine, group, async_op=True), gathered

    chunks = chunk_slices(x.shape[0], count)
    ahead = launch(chunks[0])
    for i, positions in enumerate(chunks):
        work, gathered = ahead
        if i + 1 < len(chunks):
            ahead = launch(chunks[i + 1])
        work.wait()
        yield positions, gathered


def _rows(whole: Tensor, ranks: int, positions: slice) -> Tensor:
    """Of a tensor [ranks x n, ..., m] of one slice after another the same positions of each: [ranks, rows, m], a view."""
    by_rank = whole.view(ranks, -1, whole.shape[-1])
    per_position = by_rank.shape[1] * ranks // max(1, whole.shape[0])
    return by_rank[:, positions.start * per_position : positions.stop * per_position]
