"""Parts of a sequence, which cp ranks hold or which pass the pipeline as slices, and `Visibility`: who sees what.

A sequence, or each slice of it, is cut into 2 cp chunks, and cp_rank i holds chunks i and 2 cp - 1 - i, in this order.
With a causal mask all ranks then have the same work. Nothing here needs torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import pairwise, permutations
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray


class SequenceSlice(NamedTuple):
    """Positions start .. stop - 1 of every sequence, which pass the pipeline together (--pipe-sp-splits).

    ends: of all slices of a sequence. number: of this one.
    """

    ends: tuple[int, ...]
    number: int = 0

    @property
    def start(self) -> int:
        return self.ends[self.number - 1] if self.number else 0

    @property
    def stop(self) -> int:
        return self.ends[self.number]

    @property
    def seq(self) -> int:
        """Length of the whole sequence."""
        return self.ends[-1]

    @property
    def length(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class SequencePart:
    """The part of every sequence that rank `rank` of `ranks` holds; the whole sequence for one rank.

    ends: of the slices of a sequence, which are divided one by one; () for one slice.
    """

    rank: int = 0
    ranks: int = 1
    ends: tuple[int, ...] = ()

    @property
    def chunks(self) -> tuple[int, int]:
        """The two chunks, of 2 x ranks."""
        return self.rank, 2 * self.ranks - 1 - self.rank

    def runs(self, place: SequenceSlice) -> tuple[range, ...]:
        """Return the positions of the chunks of a slice, whose length is a multiple of 2 x ranks."""
        if self.ranks == 1:
            return (range(place.start, place.stop),)
        size = place.length // (2 * self.ranks)
        starts = [place.start + chunk * size for chunk in self.chunks]
        return tuple(range(start, start + size) for start in starts)

    def positions(self, seq: int) -> NDArray[np.int64]:
        """Return the positions of a sequence in their order on this rank, in each slice ascending."""
        ends = self.ends or (seq,)
        runs = (run for number in range(len(ends)) for run in self.runs(SequenceSlice(ends, number)))
        return np.concatenate([np.arange(run.start, run.stop, dtype=np.int64) for run in runs])


WHOLE_SEQUENCE = SequencePart()


class KeyBlock(NamedTuple):
    """A rectangle of the matrix of queries and keys, in indices of the queries and of the keys of two ranks.

    kind: every query sees every key ('all'); query i sees the keys 0 .. i ('causal'); or a mask is needed ('masked').
    can_be_empty: for a query, whose document may begin behind the keys.
    """

    queries: tuple[int, int]
    keys: tuple[int, int]
    kind: Literal["all", "causal", "masked"]
    can_be_empty: bool = False


@dataclass(frozen=True)
class Visibility:
    """The keys that each query sees: its own and those before it, at most `window`, or with has_chunks those of its
    chunk of `window` positions; with has_documents those of its document.

    Queries are those of a part in a slice; keys those of any part in all slices up to it, in their order.
    """

    place: SequenceSlice
    window: int | None = None
    has_documents: bool = False
    part: SequencePart = WHOLE_SEQUENCE
    has_chunks: bool = False

    @classmethod
    def of(
        cls,
        place: SequenceSlice,
        has_documents: bool = False,
        part: SequencePart = WHOLE_SEQUENCE,
        window: int | None = None,
        has_chunks: bool = False,
    ) -> Visibility:
        """Return what these queries see. window: one that reaches over all keys is none."""
        if window is None or window >= place.stop:
            return cls(place, None, has_documents, part)
        return cls(place, window, has_documents, part, has_chunks)

    @property
    def is_causal(self) -> bool:
        """True if each query sees all keys before it."""
        return not self.has_documents and self.window is None

    @property
    def mean_keys(self) -> float:
        """Mean keys of a query, not counting the diagonal nor what documents hide."""
        return (self._pairs(self.place.stop) - self._pairs(self.place.start)) / max(self.place.length, 1)

    def _pairs(self, length: int) -> float:
        """Return the pairs of query and key among the first positions."""
        full = length if self.window is None else min(length, self.window)
        if self.has_chunks:
            return length // full * full * full / 2 + (length % full) ** 2 / 2 if full else 0.0
        return full * full / 2 + (length - full) * full

    def first_key(self, query: Any) -> Any:
        """Return the first position that a query with a window sees, which may be below 0; of a tensor a tensor."""
        assert self.window is not None
        return query - query % self.window if self.has_chunks else query - self.window + 1

    @cached_property
    def query_runs(self) -> tuple[range, ...]:
        """The positions of the queries."""
        return self.part.runs(self.place)

    def key_runs(self, source: int) -> tuple[range, ...]:
        """Return the positions of the keys of a rank."""
        if self.part.ranks == 1:
            return (range(self.place.stop),)
        part, places = replace(self.part, rank=source), range(self.place.number + 1)
        return tuple(run for number in places for run in part.runs(self.place._replace(number=number)))

    @property
    def sources(self) -> tuple[int, ...]:
        """The ranks of a ring whose keys are needed at all, the own one first: in step t each rank gets those of the
        rank t places before it, unless all can do without.
        """
        rank, ranks = self.part.rank, self.part.ranks

        def is_needed(step: int) -> bool:
            others = (replace(self, part=SequencePart(other, ranks)) for other in range(ranks))
            return any(each.blocks((each.part.rank - step) % ranks) for each in others)

        return tuple((rank - step) % ranks for step in range(ranks) if step == 0 or is_needed(step))

    @cached_property
    def adds_key_gradients(self) -> bool:
        """True if some rank of the ring has several blocks for a key of another rank, whose gradient is then a sum."""
        ranks = range(self.part.ranks)
        for rank, source in permutations(ranks, 2):
            keys = sorted(block.keys for block in replace(self, part=SequencePart(rank, len(ranks))).blocks(source))
            if any(before[1] > after[0] for before, after in pairwise(keys)):
                return True
        return False

    def blocks(self, source: int = 0) -> tuple[KeyBlock, ...]:
        """Return the blocks of the keys of a rank that the queries see; () if nothing.

        In the blocks of the rank's own keys, each query comes first in one that holds its own key.
        """
        return _blocks(self, source)


@cache
def _blocks(seen: Visibility, source: int) -> tuple[KeyBlock, ...]:
    blocks = (_causal_blocks if seen.window is None else _limited_blocks)(seen, source)
    if not seen.has_documents:
        return tuple(block for block, _ in blocks)
    return tuple(block._replace(kind="masked", can_be_empty=not holds_own) for block, holds_own in blocks)


def _causal_blocks(seen: Visibility, source: int) -> list[tuple[KeyBlock, bool]]:
    """Return the blocks of queries without a window, each with True if it holds the own key of every query."""
    ranks, rank, stop = seen.part.ranks, seen.part.rank, seen.place.stop // seen.part.ranks
    length = seen.place.length // ranks
    before, half = stop - length, length // 2  # keys of earlier slices, which all queries see
    if source == rank:
        found = [KeyBlock((0, length), (before, stop), "causal"), KeyBlock((0, length), (0, before), "all")]
    elif source < rank:  # both chunks see the first chunk of the keys, neither sees the second
        found = [KeyBlock((0, length), (0, before + half), "all")]
    else:
        found = [KeyBlock((0, half), (0, before), "all"), KeyBlock((half, length), (0, stop), "all")]
    return [(block, block.kind == "causal") for block in found if block.keys[1] > block.keys[0]]


def _limited_blocks(seen: Visibility, source: int) -> list[tuple[KeyBlock, bool]]:
    """Return the blocks of queries with a window, as `_causal_blocks` does."""
    assert seen.window is not None
    blocks, first_query = [], 0
    for queries in seen.query_runs:
        first_key = 0
        for keys in seen.key_runs(source):
            # the keys that the first query or a later one sees, and the queries that see one of them
            reached = range(max(keys.start, seen.first_key(queries.start)), min(keys.stop, queries.stop))
            last_key = reached.stop - 1
            last_query = (last_key - last_key % seen.window if seen.has_chunks else last_key) + seen.window - 1
            seeing = range(max(queries.start, reached.start), min(queries.stop, last_query + 1))
            if reached and seeing:
                is_whole = reached.stop - 1 <= seeing.start and seen.first_key(seeing.stop - 1) <= reached.start
                block = KeyBlock(
                    _shifted(seeing, first_query - queries.start),
                    _shifted(reached, first_key - keys.start),
                    "all" if is_whole else "masked",
                )
                blocks.append((block, queries.stop == keys.stop))
            first_key += len(keys)
        first_query += len(queries)
    return sorted(blocks, key=lambda each: not each[1])


def _shifted(run: range, by: int) -> tuple[int, int]:
    return run.start + by, run.stop + by
