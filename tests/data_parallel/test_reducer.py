from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from megapipe.comm.collectives import broadcast_object
from megapipe.comm.groups import build_process_groups
from megapipe.data_parallel.store import Sharing
from megapipe.data_parallel.stores import Stores
from megapipe.topology import Topology
from tests.data_parallel.toy import Toy, draw, groups_of, stage_buffers, tokens_of, toy_specs
from tests.harness import RankFailure, RankPool


def num_reducing(stores: Stores) -> int:
    """Return the reductions in flight."""
    return sum(len(store.reducing) for store in stores.all)


def reduce_mirrored(rank: int, world: int) -> tuple[list[int], dict[int, dict[str, Tensor]]]:
    """Reduce two stages that both ranks of a mirrored pipeline hold.

    Rank 0 runs microbatches 0, 2, ... of stage 0 and completes that stage last; rank 1 does the same with stage 1.
    """
    groups = build_process_groups(Topology(pp=world, mirrored_pipeline=True), rank, "gloo", 30.0)
    stages, modules = {}, {}
    for stage in range(2):
        stages[stage], modules[stage] = stage_buffers(toy_specs(), Sharing.of(groups, 0)), Toy()
        stages[stage].materialize(modules[stage], draw)
    reducer = Stores(stages, groups)
    reducer.begin_step(2)  # the number of microbatches on this rank, by which a bucket could detect that it is complete
    launched = []
    for stage in (1 - rank, rank):
        for microbatch in range(int(stage != rank), 4, 2):
            modules[stage](tokens_of(stage, microbatch)).backward()
        launched.append(num_reducing(reducer))
    for stage in (1, 0):
        reducer.reduce(stage)
    reducer.finish_gradients()
    return launched, {stage: {name: held.main_grad(name) for name in held.names} for stage, held in stages.items()}


def test_opposite_ranks_that_complete_their_stages_in_opposite_orders_sum_each(two_ranks: RankPool) -> None:
    for launched, gradients in two_ranks.run(reduce_mirrored):
        assert launched == [0, 0]  # no bucket is reduced before the schedule's row says so
        for stage, found in gradients.items():
            buffers, module = stage_buffers(toy_specs()), Toy()
            buffers.materialize(module, draw)
            for microbatch in range(4):
                module(tokens_of(stage, microbatch)).backward()
            for name, values in found.items():
                torch.testing.assert_close(values, buffers.main_grad(name), rtol=1e-9, atol=1e-9)


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


def at_both_ends(rank: int, world: int) -> Tensor:
    """Sum a tied embedding; the second rank sends the first one a message before that one begins."""
    groups = build_process_groups(Topology(pp=world), rank, "gloo", 10.0)
    specs = [replace(spec, tied=spec.name.startswith("embedding")) for spec in toy_specs()]
    buffers, module = stage_buffers(specs, tied_kind="tied"), Toy()
    buffers.materialize(module, draw)
    stores = Stores({rank: buffers}, groups)
    stores.begin_step(1)
    module(tokens_of(0, rank)).backward()
    if rank == 0:
        broadcast_object(None, groups.world, source=1)
    stores.finish_own_gradients()
    if rank == 1:
        broadcast_object(None, groups.world, source=1)
    stores.finish_tied()
    return buffers.main_grad("embedding.weight")


def test_an_end_of_the_pipeline_goes_on_while_the_other_joins_the_sum_of_a_tied_embedding(two_ranks: RankPool) -> None:
    expected, module = stage_buffers(toy_specs()), Toy()
    expected.materialize(module, draw)
    for rank in range(2):
        module(tokens_of(0, rank)).backward()
    for found in two_ranks.run(at_both_ends):
        torch.testing.assert_close(found, expected.main_grad("embedding.weight"), rtol=1e-12, atol=1e-12)
