"""`Visibility`: blocks hold every pair of query and key that sees each other once, for any part, slice and window."""

from __future__ import annotations

from dataclasses import replace

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given

from megapipe.model.context import masked_blocks, visible, whole_mask
from megapipe.sharding.sequence import KeyBlock, SequencePart, SequenceSlice, Visibility


@st.composite
def visibilities(draw: st.DrawFn) -> Visibility:
    ranks, count = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    lengths = draw(st.lists(st.integers(1, 4), min_size=count, max_size=count))
    ends = np.cumsum([2 * ranks * length for length in lengths]).tolist()
    place = SequenceSlice(tuple(ends), draw(st.integers(0, count - 1)))
    window = draw(st.none() | st.integers(1, ends[-1] + 1))
    part = SequencePart(draw(st.integers(0, ranks - 1)), ranks)
    return Visibility.of(place, False, part, window, draw(st.booleans()))


def positions(runs: tuple[range, ...]) -> list[int]:
    return [position for run in runs for position in run]


def sees(seen: Visibility, query: int, key: int) -> bool:
    if seen.window is None or key > query:
        return key <= query
    return key // seen.window == query // seen.window if seen.has_chunks else key > query - seen.window


@given(visibilities())
def test_blocks_hold_what_queries_see(seen: Visibility) -> None:
    queries, found = positions(seen.query_runs), set[tuple[int, int]]()
    for source in seen.sources:
        keys = positions(seen.key_runs(source))
        for block in seen.blocks(source):
            assert not block.can_be_empty
            for row in range(*block.queries):
                shown = [column for column in range(*block.keys) if sees(seen, queries[row], keys[column])]
                if block.kind == "all":
                    assert len(shown) == block.keys[1] - block.keys[0]
                if block.kind == "causal":
                    assert len(shown) == row - block.queries[0] + 1
                assert shown
                pairs = {(queries[row], keys[column]) for column in shown}
                assert not pairs & found
                found |= pairs
    assert found == {(query, key) for query in queries for key in range(seen.place.stop) if sees(seen, query, key)}
    ranks = range(seen.part.ranks)
    left_out = [source for source in ranks if source not in seen.sources]
    for rank in ranks:  # all ranks of a ring take the same steps
        other = replace(seen, part=SequencePart(rank, seen.part.ranks))
        steps = [(rank - source) % seen.part.ranks for source in other.sources]
        assert steps == [(seen.part.rank - source) % seen.part.ranks for source in seen.sources]
    assert all(not seen.blocks(source) for source in left_out)


@given(visibilities())
def test_gradients_of_keys_are_sums_where_two_blocks_of_a_rank_hold_a_key(seen: Visibility) -> None:
    ranks = range(seen.part.ranks)
    counts = [
        sum(key in range(*block.keys) for block in replace(seen, part=SequencePart(rank, len(ranks))).blocks(source))
        for rank in ranks
        for source in ranks
        if source != rank
        for key in range(seen.place.stop // len(ranks))
    ]
    assert seen.adds_key_gradients == (max(counts, default=0) > 1)


def test_without_windows_and_slices_no_ring_sums_gradients_of_keys() -> None:
    for ranks in (2, 4, 8):
        part = SequencePart(1, ranks)
        assert not Visibility(SequenceSlice((4 * ranks,)), part=part).adds_key_gradients
        assert Visibility(SequenceSlice((4 * ranks, 8 * ranks), 1), part=part).adds_key_gradients
        assert Visibility(SequenceSlice((4 * ranks,)), 3 * ranks, part=part).adds_key_gradients


@given(visibilities())
def test_each_query_comes_first_in_a_block_with_its_own_key(seen: Visibility) -> None:
    rank, met = seen.part.rank, set[int]()
    queries, keys = positions(seen.query_runs), positions(seen.key_runs(rank))
    for block in seen.blocks(rank):
        held = keys[slice(*block.keys)]
        assert all(queries[row] in held for row in set(range(*block.queries)) - met)
        met |= set(range(*block.queries))
    assert len(met) == len(queries)


@given(visibilities())
def test_mean_keys_are_those_of_a_continuous_sequence(seen: Visibility) -> None:
    whole = replace(seen, part=SequencePart())
    pairs = sum(
        sees(seen, query, key) for query in range(seen.place.start, seen.place.stop) for key in range(query + 1)
    )
    # the diagonal counts as half, and so does the last key of a full window
    assert whole.mean_keys == pytest.approx(pairs / seen.place.length, abs=0.5)


@given(visibilities(), st.booleans())
def test_masks_of_blocks_are_parts_of_the_whole_mask(seen: Visibility, has_documents: bool) -> None:
    seen = replace(seen, has_documents=has_documents)
    documents = (torch.arange(seen.place.seq) // 3)[None] if has_documents else None
    device, dtype = torch.device("cpu"), torch.float32
    queries = torch.tensor(positions(seen.query_runs))
    for source, blocks in masked_blocks(seen, device, dtype, documents).items():
        keys = torch.tensor(positions(seen.key_runs(source)))
        for block, mask, empty, _ in (each.made() for each in blocks):
            rows, columns = slice(*block.queries), slice(*block.keys)
            shown = visible(seen, queries[rows], keys[columns], documents)
            assert (mask is None) == (block.kind != "masked")
            if mask is not None:
                assert torch.equal(mask == 0, shown)
            hidden = ~shown.any(-1)
            assert torch.equal(hidden, empty) if empty is not None else not hidden.any()
    whole = replace(seen, part=SequencePart())
    assert whole_mask(whole, device, dtype, documents).shape[-2:] == (seen.place.length, seen.place.stop)


def test_a_ring_sees_earlier_slices_whole_and_its_own_slice_as_without_slices() -> None:
    last = Visibility.of(SequenceSlice((8, 16), 1), part=SequencePart(1, 2))
    assert last.blocks(1) == (KeyBlock((0, 4), (4, 8), "causal"), KeyBlock((0, 4), (0, 4), "all"))
    assert last.blocks(0) == (KeyBlock((0, 4), (0, 6), "all"),)
    first = replace(last, part=SequencePart(0, 2))
    assert first.blocks(1) == (KeyBlock((0, 2), (0, 4), "all"), KeyBlock((2, 4), (0, 8), "all"))
