"""Parts of a sequence: the positions that each cp rank holds, or that pass the pipeline as a slice, and the blocks of
attention that they make.

A sequence is cut into 2 cp chunks, and cp_rank i holds chunks i and 2 cp - 1 - i, in this order. With a causal mask all
ranks then have the same work. Nothing here needs torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class SequencePart:
    """The part of every sequence that rank `rank` of `ranks` holds; the whole sequence for one rank."""

    rank: int = 0
    ranks: int = 1

    @property
    def chunks(self) -> tuple[int, int]:
        """The two chunks, of 2 x ranks."""
        return self.rank, 2 * self.ranks - 1 - self.rank

    def runs(self, seq: int) -> tuple[range, range]:
        """Return the positions of the two chunks. seq: length of the whole sequence, a multiple of 2 x ranks."""
        size = seq // (2 * self.ranks)
        first, second = (range(chunk * size, (chunk + 1) * size) for chunk in self.chunks)
        return first, second

    def positions(self, seq: int) -> NDArray[np.int64]:
        """Return the positions in their order on this rank, [seq / ranks], ascending. seq: of the whole sequence."""
        if self.ranks == 1:
            return np.arange(seq, dtype=np.int64)
        return np.concatenate([np.arange(run.start, run.stop, dtype=np.int64) for run in self.runs(seq)])


WHOLE_SEQUENCE = SequencePart()


class SequenceSlice(NamedTuple):
    """Positions start .. stop - 1 of every sequence, which pass the pipeline together (--pipe-sp-splits).

    seq: length of the whole sequence.
    """

    start: int
    stop: int
    seq: int

    @property
    def length(self) -> int:
        return self.stop - self.start

    def first_key(self, window: int | None) -> int:
        """Return the first position that a query of the slice sees."""
        return 0 if window is None else max(0, self.start - window + 1)

    def blocks(self, window: int | None, has_documents: bool) -> tuple[Block, ...]:
        """Return what the queries see, keys counted from position 0: their own keys, then those of slices before.

        Windows and documents make one block, which needs a mask.
        """
        queries = (0, self.length)
        if has_documents or (window is not None and window < self.stop):
            return (Block(queries, (self.first_key(window), self.stop), "masked"),)
        own = Block(queries, (self.start, self.stop), "causal")
        return (own, Block(queries, (0, self.start), "all")) if self.start else (own,)


class Block(NamedTuple):
    """A rectangle of the matrix of queries and keys, in indices of the local sequences of two ranks.

    kind: every query sees every key ('all'); query i sees the keys 0 .. i ('causal'); or a mask is needed ('masked').
    """

    queries: tuple[int, int]
    keys: tuple[int, int]
    kind: Literal["all", "causal", "masked"]


@cache
def attention_blocks(part: SequencePart, source: int, seq: int, window: int | None) -> tuple[Block, ...]:
    """Return what the queries of a part see of the keys of rank `source`; () if nothing.

    In the blocks of the rank's own keys, each query comes first in one that holds its own key. window: a query sees
    itself and the window - 1 keys before it.
    """
    length = seq // part.ranks
    if window is None or window >= seq:
        half, rank = length // 2, part.rank
        if source == rank:
            return (Block((0, length), (0, length), "causal"),)
        if source < rank:  # both chunks see the first chunk of the keys, neither sees the second
            return (Block((0, length), (0, half), "all"),)
        return (Block((half, length), (0, length), "all"),)
    blocks = []
    query_runs, key_runs = part.runs(seq), SequencePart(source, part.ranks).runs(seq)
    for query_half, queries in enumerate(query_runs):
        for key_half, keys in enumerate(key_runs):
            # the keys that the first query or a later one sees, and the queries that see one of them
            seen = range(max(keys.start, queries.start - window + 1), min(keys.stop, queries.stop))
            seeing = range(max(queries.start, seen.start), min(queries.stop, seen.stop - 1 + window))
            if not seen or not seeing:
                continue
            at, start = query_half * (length // 2) - queries.start, key_half * (length // 2) - keys.start
            kind: Literal["all", "masked"] = "masked"
            if seen.stop - 1 <= seeing.start and seeing.stop - 1 - seen.start < window:
                kind = "all"
            block = Block((at + seeing.start, at + seeing.stop), (start + seen.start, start + seen.stop), kind)
            blocks.append((queries != keys, block))
    return tuple(block for _, block in sorted(blocks, key=lambda each: each[0]))


@cache
def ring_steps(ranks: int, seq: int, window: int | None) -> tuple[int, ...]:
    """Return the distances t of a ring at which some rank r needs the keys of rank r - t; a window skips the others."""
    return tuple(
        step
        for step in range(1, ranks)
        if any(attention_blocks(SequencePart(rank, ranks), (rank - step) % ranks, seq, window) for rank in range(ranks))
    )
