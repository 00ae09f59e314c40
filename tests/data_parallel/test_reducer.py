from __future__ import annotations

import pytest
import torch
from torch import Tensor

from megapipe.comm.groups import build_process_groups
from megapipe.comm.trace import Tracer
from megapipe.data_parallel.buffers import StageBuffers
from megapipe.data_parallel.store import Sharing
from megapipe.data_parallel.stores import Stores
from megapipe.sharding.spec import Fused, ParamSpec, QueryGroups
from megapipe.topology import Topology
from tests.data_parallel.toy import Toy, draw, groups_of, stage_buffers, tokens_of, toy_specs
from tests.harness import RankFailure, RankPool

NUM_MICROBATCHES = 3


def shards_of(buffers: StageBuffers) -> dict[str, list[tuple[int, int, Tensor]]]:
    """Return the slices of each gradient that this rank holds after a reduction: (start, stop, values)."""
    found: dict[str, list[tuple[int, int, Tensor]]] = {}
    for buffer in buffers.buffers:
        for bucket in buffer.layout.buckets:
            start, stop = buffer.shard_range(bucket)
            for slot in bucket.slots:
                low, high = max(start, slot.start), min(stop, slot.stop)
                if low < high:
                    found.setdefault(slot.spec.name, []).append(
                        (low - slot.start, high - slot.start, buffer.gradients[low:high].clone())
                    )
    return found


def num_reducing(stores: Stores) -> int:
    """Return the reductions in flight."""
    return sum(len(store.reducing) for store in stores.all)


def reduce_toy(rank: int, world: int, sharded: bool, overlap: bool, bf16: bool) -> tuple[dict, list[int]]:
    groups = groups_of(rank, dp=world)
    buffers, module = stage_buffers(toy_specs(), Sharing.of(groups, int(sharded))), Toy()
    buffers.materialize(module, draw)
    reducer = Stores({0: buffers}, groups, overlap_reduce=overlap, reduce_in_bf16=bf16)
    launched = []
    for step in range(2):  # the second step shows that the first one left no state behind
        reducer.begin_step(NUM_MICROBATCHES)
        launched = []
        for microbatch in range(NUM_MICROBATCHES):
            module(tokens_of(step, microbatch * world + rank)).backward()
            launched.append(num_reducing(reducer))
        reducer.reduce(0)
        launched.append(num_reducing(reducer))
        reducer.finish_gradients()
    return shards_of(buffers), launched


def whole_toy(world: int) -> dict[str, Tensor]:
    """Compute the gradient sums of the second step in one process."""
    buffers, module = stage_buffers(toy_specs()), Toy()
    buffers.materialize(module, draw)
    for microbatch in range(NUM_MICROBATCHES * world):
        module(tokens_of(1, microbatch)).backward()
    return {name: buffers.main_grad(name).flatten().clone() for name in buffers.names}


@pytest.mark.parametrize("bf16", [False, True], ids=["exact", "bf16"])
@pytest.mark.parametrize("overlap", [False, True], ids=["at the end", "overlapped"])
@pytest.mark.parametrize("sharded", [False, True], ids=["all-reduce", "reduce-scatter"])
def test_gradients_equal_the_sum_over_all_microbatches(
    two_ranks: RankPool, sharded: bool, overlap: bool, bf16: bool
) -> None:
    expected, tolerance = whole_toy(2), 2e-2 if bf16 else 1e-12
    results = two_ranks.run(reduce_toy, sharded, overlap, bf16)
    covered = {name: torch.zeros_like(values) for name, values in expected.items()}
    for found, launched in results:
        for name, parts in found.items():
            for start, stop, values in parts:
                covered[name][start:stop] += 1
                assert (values - expected[name][start:stop]).abs().max() <= tolerance * expected[name].abs().max(), name
        num_buckets = len(stage_buffers(toy_specs()).buffers[0].layout.buckets)
        # all under the last backward, or none before finish()
        assert launched == ([0, 0, num_buckets, num_buckets] if overlap else [0, 0, 0, 0])
    assert all((times == (1 if sharded else 2)).all() for times in covered.values())
    if bf16:
        exact = {
            name: parts
            for found, _ in two_ranks.run(reduce_toy, sharded, overlap, False)
            for name, parts in found.items()
        }
        rounded = {name: parts for found, _ in results for name, parts in found.items()}
        assert any(
            not torch.equal(part[2], other[2])
            for name in exact
            for part, other in zip(exact[name], rounded[name], strict=True)
        )


def reduce_mirrored(rank: int, world: int, sharded: bool) -> tuple[dict, list[int]]:
    """Reduce two stages that both ranks of a mirrored pipeline hold.

    Rank 0 runs microbatches 0, 2, ... of stage 0 and completes that stage last; rank 1 does the same with stage 1.
    """
    groups = build_process_groups(Topology(pp=world, mirrored_pipeline=True), rank, "gloo", 30.0)
    stages, modules = {}, {}
    for stage in range(2):
        stages[stage], modules[stage] = stage_buffers(toy_specs(), Sharing.of(groups, int(sharded))), Toy()
        stages[stage].materialize(modules[stage], draw)
    reducer = Stores(stages, groups)
    reducer.begin_step(2)  # the number of microbatches on this rank, by which a bucket could detect that it is complete
    launched = []
    for stage in (1 - rank, rank):
        for microbatch in range(int(stage != rank), 4, 2):
            modules[stage](tokens_of(1, microbatch + 4 * stage)).backward()
        launched.append(num_reducing(reducer))
    for stage in (1, 0):
        reducer.reduce(stage)
    reducer.finish_gradients()
    return {stage: shards_of(buffers) for stage, buffers in stages.items()}, launched


@pytest.mark.parametrize("sharded", [False, True], ids=["all-reduce", "reduce-scatter"])
def test_opposite_ranks_that_complete_their_stages_in_opposite_orders_sum_each(
    two_ranks: RankPool, sharded: bool
) -> None:
    results = two_ranks.run(reduce_mirrored, sharded)
    # no bucket is reduced before the schedule's row says so
    assert [launched for _, launched in results] == [[0, 0], [0, 0]]
    for stage in range(2):
        buffers, module = stage_buffers(toy_specs()), Toy()
        buffers.materialize(module, draw)
        for microbatch in range(4):
            module(tokens_of(1, microbatch + 4 * stage)).backward()
        expected = {name: buffers.main_grad(name).flatten() for name in buffers.names}
        covered = {name: torch.zeros_like(values) for name, values in expected.items()}
        for found, _ in results:
            for name, parts in found[stage].items():
                for start, stop, values in parts:
                    covered[name][start:stop] += 1
                    assert (values - expected[name][start:stop]).abs().max() <= 1e-12 * expected[name].abs().max(), name
        assert all((times == (1 if sharded else 2)).all() for times in covered.values())


def unused_parameter(rank: int, world: int) -> tuple[list[int], Tensor]:
    groups = groups_of(rank, dp=world)
    buffers, module = stage_buffers(toy_specs(), Sharing.of(groups, 1)), Toy()
    buffers.materialize(module, draw)
    reducer = Stores({0: buffers}, groups)
    reducer.begin_step(1)
    hidden = module.up(module.norm(module.embedding(tokens_of(0, rank))))
    hidden.sum().backward()  # `down`, in the first bucket, gets no gradient
    launched = [num_reducing(reducer)]
    reducer.reduce(0)
    launched.append(num_reducing(reducer))
    reducer.finish_gradients()
    return launched, torch.cat([buffer.gradients for buffer in buffers.buffers])


def test_bucket_of_an_unused_parameter_is_reduced_at_the_end_of_its_stage(two_ranks: RankPool) -> None:
    for launched, gradients in two_ranks.run(unused_parameter):
        assert launched == [0, 3]
        assert torch.isfinite(gradients).all()


def surplus_microbatch(rank: int, world: int) -> None:
    groups = groups_of(rank, dp=world)
    buffers, module = stage_buffers(toy_specs(), Sharing.of(groups, 0)), Toy()
    buffers.materialize(module, draw)
    reducer = Stores({0: buffers}, groups)
    reducer.begin_step(1)
    for _ in range(2):
        module(tokens_of(0, rank)).backward()


def test_gradient_after_its_reduction_is_an_error(two_ranks: RankPool) -> None:
    with pytest.raises(RankFailure, match=r"down\.weight got a gradient after the reduction of its bucket had started"):
        two_ranks.run(surplus_microbatch)


def trace_overlap(rank: int, world: int) -> tuple[list[int], int]:
    tracer = Tracer()
    groups = build_process_groups(Topology(dp=world), rank, "gloo", 30.0, tracer)
    buffers, module = stage_buffers(toy_specs(), Sharing.of(groups, 1)), Toy()
    buffers.materialize(module, draw)
    reducer = Stores({0: buffers}, groups)
    reducer.begin_step(1)
    module(tokens_of(0, rank)).backward()
    tracer.event("last backward", "action", 0)
    reducer.reduce(0)
    reducer.finish_gradients()
    (end,) = (event.end_ns for event in tracer.of_kind("action"))
    return [event.start_ns for event in tracer.of_kind("collective")], end


def test_reductions_start_before_the_last_backward_ends(two_ranks: RankPool) -> None:
    for starts, end_of_backward in two_ranks.run(trace_overlap):
        assert len(starts) == 3
        assert max(starts) < end_of_backward


HEADS, QUERY_GROUPS, HEAD_DIM, HIDDEN = 4, 2, 3, 5
PARTIAL_SPECS = (
    ParamSpec("norm.weight", (HIDDEN,), owner=0, weight_decay=False, partial_gradient=True),
    ParamSpec(
        "qkv.weight",
        ((HEADS + 2 * QUERY_GROUPS) * HEAD_DIM, HIDDEN),
        owner=0,
        slicing=QueryGroups(HEADS, QUERY_GROUPS, HEAD_DIM),
    ),
    ParamSpec("router.weight", (HIDDEN, HIDDEN), owner=0),  # replicated; every replica has the whole gradient
    ParamSpec("up.weight", (8, HIDDEN), owner=0, slicing=Fused(0)),
)


def filled(spec: ParamSpec, tp_rank: int, tp: int, dp_rank: int, shape: tuple[int, ...]) -> Tensor:
    return torch.randn(
        shape,
        dtype=torch.float64,
        generator=torch.Generator().manual_seed(len(spec.name) * 100 + tp_rank * 10 + dp_rank),
    )


def reduce_partial(rank: int, world: int, tp: int, dp: int, overlap: bool) -> dict[str, Tensor]:
    groups = groups_of(rank, tp=tp, dp=dp, kv_replicas=max(1, tp // QUERY_GROUPS))
    buffers = stage_buffers(PARTIAL_SPECS, Sharing.of(groups, 0))
    reducer = Stores({0: buffers}, groups, overlap_reduce=overlap)
    reducer.begin_step(1)
    for spec in PARTIAL_SPECS:
        gradient = buffers.main_grad(spec.name)
        gradient.copy_(filled(spec, groups.tp.rank, tp, groups.dp.rank, tuple(gradient.shape)))
    reducer.reduce(0)
    reducer.finish_gradients()
    return {spec.name: buffers.main_grad(spec.name).clone() for spec in PARTIAL_SPECS}


@pytest.mark.parametrize("overlap", [False, True], ids=["at the end", "overlapped"])
@pytest.mark.parametrize(("tp", "dp"), [(4, 1), (2, 2)], ids=["tp4: kv replicated", "tp2 dp2"])
def test_partial_gradients_are_summed_over_their_replicas_only(
    four_ranks: RankPool, tp: int, dp: int, overlap: bool
) -> None:
    results = four_ranks.run(reduce_partial, tp, dp, overlap)
    for spec in PARTIAL_SPECS:
        shape = spec.local_shape(0, tp)
        over_dp = [sum(filled(spec, tp_rank, tp, dp_rank, shape) for dp_rank in range(dp)) for tp_rank in range(tp)]
        for rank in range(4):
            tp_rank, position, expected = rank % tp, 0, over_dp[rank % tp].clone()
            for interval in spec.intervals(tp_rank, tp):
                rows = slice(position, position + interval.stop - interval.start)
                if interval in spec.summed_over_replicas(tp_rank, tp):
                    expected[rows] = sum(over_dp[replica][rows] for replica in interval.replicas)
                position = rows.stop
            assert torch.allclose(results[rank][spec.name], expected, rtol=1e-12, atol=1e-12), (spec.name, rank)
    assert PARTIAL_SPECS[1].summed_over_replicas(0, tp) if tp == 4 else not PARTIAL_SPECS[1].summed_over_replicas(0, tp)


TIED = ParamSpec("embedding.weight", (9, 7), owner="embedding", tied=True)


def reduce_tied(rank: int, world: int, pp: int, level: int) -> list[Tensor]:
    """Reduce an embedding tied over two pipeline ranks; return this rank's shard of the sum of each copy."""
    dp = world // pp
    groups = groups_of(rank, pp=pp, dp=dp)
    stages = {groups.pp.rank: stage_buffers((TIED,), Sharing.of(groups, level), tied_kind="tied")}
    reducer = Stores(stages, groups)
    reducer.begin_step(1)
    for stage, buffers in stages.items():
        buffers.main_grad(TIED.name).fill_(10.0 ** (2 * stage + groups.dp.rank))
        reducer.reduce(stage)
    reducer.finish_gradients()
    return [values for buffers in stages.values() for parts in shards_of(buffers).values() for _, _, values in parts]


@pytest.mark.parametrize("sharded", [False, True], ids=["all-reduce", "reduce-scatter"])
def test_tied_embedding_is_summed_over_replicas_and_both_ends(four_ranks: RankPool, sharded: bool) -> None:
    for shards in four_ranks.run(reduce_tied, 2, int(sharded)):
        assert len(shards) == 1
        assert (shards[0] == 1111.0).all()


HEAD_NORM = ParamSpec("head_norm.weight", (7,), owner="head")


def reduce_shared(rank: int, world: int, level: int, overlap: bool) -> tuple[list[int], Tensor]:
    """Reduce an embedding shared by stages 0 and 3 of one rank.

    Return the number of reductions in flight after each stage, and the sum.
    """
    groups = groups_of(rank, dp=world)
    sharing = Sharing.of(groups, level)
    stages = {0: stage_buffers((TIED,), sharing, tied_kind="shared"), 3: stage_buffers((HEAD_NORM,), sharing)}
    reducer = Stores(stages, groups, overlap_reduce=overlap)
    reducer.begin_step(1)
    under_way = []
    for stage in (3, 0):
        # both stages accumulate into the same memory
        stages[0].main_grad(TIED.name).add_(10.0 ** (stage + groups.dp.rank))
        reducer.reduce(stage)
        under_way.append(num_reducing(reducer))
    reducer.finish_gradients()
    (values,) = [values for parts in shards_of(stages[0]).values() for _, _, values in parts]
    return under_way, values


@pytest.mark.parametrize("sharded", [False, True], ids=["all-reduce", "reduce-scatter"])
def test_an_embedding_that_two_stages_of_a_rank_share_is_reduced_once_both_are_complete(
    two_ranks: RankPool, sharded: bool
) -> None:
    for under_way, values in two_ranks.run(reduce_shared, int(sharded), True):
        assert under_way == [1, 2]  # the head's norm, then the embedding
        assert (values == 11011.0).all()
    for under_way, values in two_ranks.run(reduce_shared, int(sharded), False):
        assert under_way == [0, 0]
        assert (values == 11011.0).all()
