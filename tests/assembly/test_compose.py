"""The communicators of stages that compute at the same time."""

import pytest

from megapipe.assembly import compose
from megapipe.comm.groups import Group, Traffic, fake_process_groups
from megapipe.schedule.action import Op
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
