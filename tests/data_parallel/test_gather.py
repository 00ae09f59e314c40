from __future__ import annotations

import pytest
import torch
from torch import nn

from megapipe.comm.groups import ProcessGroups, build_process_groups
from megapipe.comm.trace import Tracer
from megapipe.data_parallel.store import Sharing
from megapipe.data_parallel.stores import Stores
from megapipe.sharding.spec import ParamSpec
from megapipe.topology import Topology
from tests.data_parallel.toy import groups_of, stage_buffers
from tests.harness import RankPool

NUM_STAGES = 3


def specs_of(stage: int) -> tuple[ParamSpec, ...]:
    return tuple(ParamSpec(f"{stage}.{index}", (3 + stage, 7), owner=stage) for index in range(5))


def pending_stages(stores: Stores, order: list[int]) -> tuple[int, ...]:
    return tuple(stage for stage in order if any(store.gathering for store in stores.stages[stage].buffers))


def gather(rank: int, world: int, order: list[int], overlap: bool) -> tuple[list[tuple[int, ...]], bool, list[int]]:
    """Write the rank's number into its shards, gather all of them, and wait for the stages in order."""
    groups = groups_of(rank, dp=world)
    sharing = Sharing.of(groups, 1)
    stages = {stage: stage_buffers(specs_of(stage), sharing) for stage in range(NUM_STAGES)}
    expected = {}
    for stage, buffers in stages.items():
        for buffer in buffers.buffers:
            whole = torch.zeros_like(buffer.parameters)
            for bucket in buffer.layout.buckets:
                for replica in range(world):
                    low, high = bucket.shard(replica, world)
                    whole[low:high] = 1 + replica
                low, high = buffer.shard_range(bucket)
                buffer.parameters[low:high] = 1 + rank
            expected[stage] = whole
    gathering = Stores(stages, groups, order, overlap_gather=overlap)
    gathering.start_gather()
    pending = [pending_stages(gathering, order)]
    correct = True
    for stage in order:
        gathering.wait(stage)
        pending.append(pending_stages(gathering, order))
        correct &= torch.equal(stages[stage].buffers[0].parameters, expected[stage])
    return pending, correct, [len(buffers.buffers[0].layout.buckets) for buffers in stages.values()]


@pytest.mark.parametrize("order", [[0, 1, 2], [2, 0, 1]], ids=["model order", "another order"])
def test_stages_are_complete_when_waited_for_in_order_of_first_use(two_ranks: RankPool, order: list[int]) -> None:
    for pending, correct, num_buckets in two_ranks.run(gather, order, True):
        assert pending == [tuple(order[i:]) for i in range(NUM_STAGES + 1)]
        assert correct
        assert min(num_buckets) > 1


def test_without_overlap_all_is_there_at_once(two_ranks: RankPool) -> None:
    for pending, correct, _ in two_ranks.run(gather, [0, 1, 2], False):
        assert set(pending) == {()}
        assert correct


def unsharded(rank: int, world: int) -> int:
    tracer = Tracer()
    groups = build_process_groups(Topology(dp=world), rank, "gloo", 30.0, tracer)
    gathering = Stores({0: stage_buffers(specs_of(0), Sharing.of(groups, 0))}, groups)
    gathering.start_gather()
    gathering.finish_weights()
    return len(tracer.events)


def test_unsharded_parameters_are_not_sent(two_ranks: RankPool) -> None:
    assert two_ranks.run(unsharded) == [0, 0]


def part_by_part(rank: int, world: int) -> tuple[list[str], list[list[str]], list[int]]:
    """Gather the parameters of a stage part by part.

    Return the order in which the buckets are collected, the parameters in flight after the call of each part, and
    the values of the last part.
    """
    groups = groups_of(rank, dp=world)
    module = nn.ModuleDict({str(index): nn.Linear(7, 3, bias=False, device="meta") for index in range(5)})
    specs = tuple(ParamSpec(f"{index}.weight", (3, 7), owner=0) for index in range(5))
    buffers = stage_buffers(specs, Sharing.of(groups, 1), bucket_size=1)
    buffers.materialize(module)
    gathering = Stores({0: buffers}, groups)
    order = [3, 0, 1, 2, 4]
    gathering.wait_inside(0, module, [module[str(index)] for index in order])
    (buffer,) = buffers.buffers
    for bucket in buffer.layout.buckets:
        low, high = buffer.shard_range(bucket)
        buffer.parameters[low:high] = 1 + rank
    gathering.start_gather()

    def waiting() -> list[str]:
        places = {bucket.start: bucket for bucket in buffer.layout.buckets}
        return [slot.spec.name for start in buffer.gathering for slot in places[start].slots]

    first, left = waiting(), []
    for index in order:
        module[str(index)](torch.zeros(1, 7, dtype=torch.float64))
        left.append(waiting())
    return first, left, buffers.parameter("4.weight").unique().tolist()


def test_each_part_waits_for_its_own_parameters_only(two_ranks: RankPool) -> None:
    names = ["3.weight", "0.weight", "1.weight", "2.weight", "4.weight"]
    for first, left, _ in two_ranks.run(part_by_part):
        assert first == names
        assert left == [names[index + 1 :] for index in range(5)]


def test_a_parameter_that_no_part_waits_for_is_refused() -> None:
    module = nn.ModuleDict({str(index): nn.Linear(7, 3, bias=False) for index in range(2)})
    gathering = Stores({0: stage_buffers(specs_of(0))}, ProcessGroups.alone())
    with pytest.raises(ValueError, match=r"stage 0: .*1\.weight"):
        gathering.wait_inside(0, module, [module["0"]])


def test_order_must_name_the_stages() -> None:
    with pytest.raises(ValueError, match=r"names stages \[0, 2\], this rank holds \[0\]"):
        Stores({0: stage_buffers(specs_of(0))}, ProcessGroups.alone(), [0, 2])


def wait_of_a_borrower(rank: int, world: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Wait for a part of stage 1 that uses a parameter of stage 0.

    Return the stages in flight before and after it ran.
    """
    groups = groups_of(rank, dp=world)
    specs = {0: (ParamSpec("shared", (5, 7), owner=0),), 1: (ParamSpec("own", (5, 7), owner=1),)}
    stages = {stage: stage_buffers(held, Sharing.of(groups, 1)) for stage, held in specs.items()}
    module = nn.Module()
    module.head, module.rest = nn.Identity(), nn.Identity()
    module.head.register_parameter("weight", nn.Parameter(stages[0].parameter("shared")))
    module.rest.register_parameter("weight", nn.Parameter(stages[1].parameter("own")))
    names = {"head.weight": "shared", "rest.weight": "own"}
    module.named_parameters = lambda: ((names[name], p) for name, p in nn.Module.named_parameters(module))
    gathering = Stores(stages, groups, [1, 0])
    gathering.wait_inside(1, module, [module.head, module.rest])
    gathering.start_gather()
    before = pending_stages(gathering, [1, 0])
    module.head(torch.ones(1))
    after = pending_stages(gathering, [1, 0])
    gathering.finish_weights()
    return before, after


def test_a_stage_that_borrows_a_parameter_waits_for_its_holder(two_ranks: RankPool) -> None:
    for before, after in two_ranks.run(wait_of_a_borrower):
        assert (before, after) == ((1, 0), (1,))
