"""The communicators of stages that compute at the same time, and of weights in shards."""

import dataclasses

import pytest
import torch

from megapipe.assembly import compose
from megapipe.comm.groups import FakeHandle, Group, Traffic, fake_process_groups
from megapipe.data_parallel.store import Sharing, Store
from megapipe.schedule.action import Op
from megapipe.sharding.buffers import layout_buffers
from tests.data_parallel.toy import toy_specs
from tests.tiny import plan_for

SHARDED = "--data-parallel-sharding-strategy optim_grads_params --use-distributed-optimizer"


@pytest.mark.parametrize("units", [1, 2, 3])
@pytest.mark.parametrize("schedule", ["dualpipe", "dualpipe-v"])
def test_halves_of_a_pair_have_communicators_of_their_own_on_every_rank(
    schedule: str, units: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = (
        "--num-layers 12 --vocab-size 256 --untie-embeddings-and-output-weights --global-batch-size 16"
        " --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
        f" --pipeline-schedule {schedule} {SHARDED} --data-parallel-sharding-units {units}"
    )
    plan = plan_for(flags.split(), 8)
    made: list[str] = []

    def second(group: Group) -> str:
        made.append(group.name)
        return f"{group.name} 2"

    monkeypatch.setattr(compose, "second_communicator", second)
    schedule_of_step = plan.schedule(min(plan.decisive_counts))
    for rank in range(plan.topology.world_size):
        groups = fake_process_groups(plan.topology, rank, Traffic())
        made.clear()
        held = plan.placement.stages_of(groups.pp.rank)
        own = dict(zip(held, compose.communicators(plan, groups, trains=True), strict=True))
        assert made == ["tp"]  # a collective: the same on every rank
        row = schedule_of_step.rows[groups.pp.rank]
        pairs = {(row[slot + 1].stage, row[slot + 2].stage) for slot, pair in enumerate(row) if pair.op is Op.OVERLAP}
        assert pairs
        assert all(own[first].tp != own[second].tp for first, second in pairs)


@pytest.mark.parametrize(
    ("flags", "num_second"),
    [
        ("", 0),
        ("--use-distributed-optimizer", 0),
        ("--data-parallel-sharding-strategy optim_grads --use-distributed-optimizer", 0),
        (SHARDED, 1),
        (f"{SHARDED} --num-distributed-optimizer-instances 2", 1),
        (f"{SHARDED} --num-experts 4 --expert-model-parallel-size 2", 2),
    ],
    ids=["whole", "zero-1", "zero-2", "zero-3", "hsdp", "experts"],
)
def test_sharded_weights_are_gathered_over_communicators_of_their_own_on_every_rank(
    flags: str, num_second: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = "--num-layers 4 --vocab-size 256 --global-batch-size 16 --pipeline-model-parallel-size 2 " + flags
    plan, traffic = plan_for(flags.split(), 8), Traffic()
    made: list[str] = []

    def second(group: Group) -> Group:
        made.append(group.name)
        return dataclasses.replace(group, handle=FakeHandle(f"{group.name} 2", traffic))

    monkeypatch.setattr(compose, "second_communicator", second)
    for rank in range(plan.topology.world_size):
        groups = fake_process_groups(plan.topology, rank, traffic)
        for backend, count in (("gloo", 0), ("nccl", num_second)):
            made.clear()
            monkeypatch.setattr(compose, "backend_of", lambda _, backend=backend: backend)
            own = compose.communicators(plan, groups, trains=True)
            assert len(made) == count  # a collective: the same on every rank
            assert len({id(each.sharings) for each in own}) == 1
        made.clear()
        compose.communicators(plan, groups, trains=False)
        assert not made, "nothing is reduced"


def test_gathers_and_reductions_of_sharded_weights_do_not_share_a_communicator() -> None:
    traffic = Traffic()
    shards = Group("shards", (0, 1), 0, FakeHandle("shards", traffic))
    gatherers = dataclasses.replace(shards, handle=FakeHandle("gatherers", traffic))
    (layout, *_) = layout_buffers(toy_specs(), 0, 1, 2, 60)
    store = Store(layout, Sharing(3, shards, gatherers=gatherers), torch.device("meta"), torch.float32, torch.float32)
    store.unshard()
    store.begin_step(1)
    store.accumulate()
    store.reduce()
    assert set(traffic.counts) == {("gatherers", "all_gather"), ("shards", "reduce_scatter")}
