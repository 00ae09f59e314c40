"""Flat buffers: each parameter is in one bucket and aligned; shards are of equal size and cover everything."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from megapipe.sharding.audit import audit_buffers
from megapipe.sharding.buffers import ALIGNMENT, BufferKind, layout_buffers, shard_pieces
from megapipe.trace.parameters import model_parameters
from tests.sharding.test_slicing import resolved_model


@given(
    tp=st.sampled_from([1, 2, 4]),
    num_shards=st.integers(1, 5),
    bucket_size=st.sampled_from([1, 300, 10**6]),
    groups=st.sampled_from([1, 2, 12]),
    sequence_parallel=st.booleans(),
    tied_kind=st.sampled_from(["plain", "tied", "shared"]),
)
def test_shards_of_all_ranks_cover_every_local_element_once(
    tp: int, num_shards: int, bucket_size: int, groups: int, sequence_parallel: bool, tied_kind: BufferKind
) -> None:
    specs = model_parameters(
        resolved_model(num_layers=2, num_query_groups=groups, qk_layernorm=True), sequence_parallel
    )
    tp_rank = tp - 1
    layouts = layout_buffers(specs, tp_rank, tp, num_shards, bucket_size, tied_kind)
    audit_buffers(specs, layouts, tp_rank, tp)
    covered: dict[str, int] = {}
    for layout in layouts:
        assert layout.kind in ("plain", "partial", tied_kind)
        for bucket in layout.buckets:
            edges = [bucket.shard(i, num_shards) for i in range(num_shards)]
            assert edges[0][0] == bucket.start
            assert edges[-1][1] == bucket.stop
            for start, stop in edges:
                assert start % ALIGNMENT == 0
                for position, piece in shard_pieces(bucket, tp_rank, tp, start, stop):
                    assert start <= position < stop
                    covered[piece.spec.name] = covered.get(piece.spec.name, 0) + piece.box.num_elements
            assert all(slot.start % ALIGNMENT == 0 for slot in bucket.slots)
    assert covered == {
        s.name: int(slot.numel) for s in specs for lay in layouts for slot in lay.slots if slot.spec is s
    }


@given(
    tp=st.sampled_from([1, 2]),
    frozen=st.sets(st.integers(0, 30)),
    bucket_size=st.sampled_from([1, 300, 10**6]),
    tied_kind=st.sampled_from(["plain", "tied", "shared"]),
)
def test_frozen_parameters_are_in_buffers_of_their_own_and_change_no_others(
    tp: int, frozen: set[int], bucket_size: int, tied_kind: BufferKind
) -> None:
    whole = model_parameters(resolved_model(num_layers=2), tp > 1)
    specs = tuple(replace(spec, trainable=place not in frozen) for place, spec in enumerate(whole))
    layouts = layout_buffers(specs, 0, tp, 3, bucket_size, tied_kind)
    audit_buffers(specs, layouts, 0, tp)
    assert all(slot.spec.trainable == layout.trainable for layout in layouts for slot in layout.slots)
    assert not any(layout.kind == "partial" and not layout.trainable for layout in layouts)  # nothing is summed
    alone = layout_buffers([spec for spec in specs if spec.trainable], 0, tp, 3, bucket_size, tied_kind)
    assert tuple(layout for layout in layouts if layout.trainable) == alone


def test_buckets_fill_from_the_last_layer_back() -> None:
    specs = model_parameters(resolved_model(num_layers=4), False)
    (plain,) = layout_buffers(specs, 0, 1, 1, 2000)
    position = {spec.name: index for index, spec in enumerate(specs)}
    buckets = [[position[slot.spec.name] for slot in bucket.slots] for bucket in plain.buckets]
    assert len(buckets) > 3
    assert all(min(earlier) > max(later) for earlier, later in pairwise(buckets))
