"""Matrices that Muon updates: every element is in one of them, and every matrix meets on one rank."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from megapipe.sharding.buffers import layout_buffers
from megapipe.sharding.matrices import matrices_of, share_out
from megapipe.sharding.spec import ExpertRows, Fused, ParamSpec, QueryGroups, Replicated

SIZES = st.integers(1, 4)


@st.composite
def parameters(draw: st.DrawFn) -> tuple[list[ParamSpec], int, int]:
    """Return parameters of one kind, dense or experts, the ranks that cut them, and how many of these meet."""
    ep, tp, columns = draw(st.sampled_from((1, 2))), draw(st.sampled_from((1, 2, 4))), draw(SIZES) * 4
    if draw(st.booleans()):
        count = ep * draw(SIZES)
        specs = [
            ParamSpec("w1", (count * 2 * 4 * tp, columns), 0, ExpertRows(count, 2, tp), matrix="outputs x inputs"),
            ParamSpec("w2", (count * 4 * tp, columns), 0, ExpertRows(count, 1, tp), matrix="inputs x outputs"),
        ]
        return specs, ep * tp, tp
    groups = draw(st.sampled_from((1, 2, 4)))
    heads, width = 4 * draw(SIZES), 2
    heads, is_gated = heads // groups * groups, draw(st.booleans())
    qkv = ((2 if is_gated else 1) * heads + 2 * groups) * width
    specs = [
        ParamSpec(
            "qkv", (qkv, columns), 0, QueryGroups(heads, groups, width, is_gated=is_gated), matrix="outputs x inputs"
        ),
        ParamSpec("proj", (columns, heads * width), 0, Fused(1), matrix="outputs x inputs"),
        ParamSpec("norm", (columns,), 0, weight_decay=False),
        ParamSpec("fc1", (2 * 4 * tp, columns), 0, Fused(0, 2), matrix="outputs x inputs"),
        ParamSpec("down", (7, columns), 0, Replicated(), matrix="outputs x inputs"),
    ]
    return specs, tp, tp


@given(parameters(), SIZES, st.booleans(), st.sampled_from((10, 100, 10_000)), st.booleans())
def test_every_matrix_is_joined_from_the_shards(
    drawn: tuple[list[ParamSpec], int, int], replicas: int, sharded: bool, bucket_size: int, splits_qkv: bool
) -> None:
    """Number the elements, move them as an update does, and compare with rows of the whole parameter."""
    specs, ranks, columns = drawn
    whole = {spec.name: torch.arange(spec.num_elements).view(spec.shape) for spec in specs}
    expected = {
        (spec.name, index): torch.cat([whole[spec.name][rows.start : rows.stop] for rows in matrix.rows])
        for spec in specs
        for index, matrix in enumerate(matrices_of(spec, splits_qkv))
    }
    for spec in specs:
        if spec.matrix is not None:
            rows = [row for matrix in matrices_of(spec, splits_qkv) for span in matrix.rows for row in span]
            assert sorted(rows) == list(range(spec.shape[0]))
    num_shards = replicas if sharded else 1
    found = {key: torch.full_like(values, -1) for key, values in expected.items()}
    owners: dict[tuple[str, int], set[tuple[int, int]]] = {}
    for rank in range(ranks):
        is_expert = specs[0].is_expert
        counts = {"num_expert_ranks": ranks, "num_expert_shards": num_shards} if is_expert else {}
        (*layouts,) = layout_buffers(
            specs,
            0 if is_expert else rank,
            1 if is_expert else ranks,
            num_shards,
            bucket_size,
            matrices_apart=True,
            **counts,
        )
        buckets = [bucket for layout in layouts for bucket in layout.buckets if bucket.has_matrices]
        assert sum(len(bucket.slots) for bucket in buckets) == sum(spec.matrix is not None for spec in specs)
        for matrix in share_out(buckets, (rank, ranks), replicas, columns, 5, splits_qkv):
            spec = matrix.slot.spec
            key = spec.name, matrices_of(spec, splits_qkv).index(matrix.matrix)
            owners.setdefault(key, set()).add((matrix.replica, matrix.column))
            dim = spec.slicing.dim or 0
            local = torch.cat(
                [whole[spec.name].narrow(dim, i.start, i.stop - i.start) for i in spec.intervals(rank, ranks)], dim
            )
            held = torch.full((math.prod(matrix.local_shape),), -1)
            for replica in range(replicas if sharded else 1):
                for part in matrix.parts(replica, num_shards):
                    start = part.start - matrix.slot.start
                    assert (held[part.at : part.at + part.numel] == -1).all()
                    held[part.at : part.at + part.numel] = local.flatten()[start : start + part.numel]
            assert (held >= 0).all()
            held, first = held.view(matrix.local_shape), 0
            wide = matrix.matrix.columns(rank, ranks)
            for rows in matrix.rows:
                place = found[key][rows.at : rows.at + rows.count, wide.start : wide.stop]
                place.copy_(held[first : first + rows.count])
                first += rows.count
    assert all(len(places) == 1 for places in owners.values())
    for key, values in expected.items():
        assert torch.equal(found[key], values), key


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(1, 4), st.integers(1, 3))
def test_no_owner_has_much_more_than_its_share(sizes: list[int], replicas: int, columns: int) -> None:
    specs = [ParamSpec(f"w{index}", (size, 8), 0, matrix="outputs x inputs") for index, size in enumerate(sizes)]
    (layout,) = layout_buffers(specs, 0, 1, replicas, 100, matrices_apart=True)
    work: dict[tuple[int, int], int] = {}
    costs = []
    for matrix in share_out(layout.buckets, (0, 1), replicas, columns, 5, True):
        costs.append(matrix.matrix.flops(5))
        place = matrix.replica, matrix.column
        work[place] = work.get(place, 0) + costs[-1]
    # list scheduling, largest first (Graham 1969): no more than the mean and one more piece
    assert max(work.values()) <= sum(costs) / (replicas * columns) + max(costs)
