"""Plans of sharded gradients and weights: rows, units, memory, traffic and times."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest

from megapipe.config.load import load_config
from megapipe.config.parallel import RecomputeConfig
from megapipe.extras.cli.planning import plan_for, with_vocabulary
from megapipe.plan.resolve import resolve, vary
from megapipe.plan.run_plan import RunPlan
from megapipe.schedule.action import Op
from megapipe.schedule.validate import validate

FLAGS = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 8 --seq-length 32 --vocab-size 128 --bf16 "
    "--micro-batch-size 1 --train-iters 10 --make-vocab-size-divisible-by 1 --untie-embeddings-and-output-weights "
)
ZERO_2 = "--data-parallel-sharding-strategy optim_grads "
ZERO_3 = "--data-parallel-sharding-strategy optim_grads_params "


def planned(flags: str, world_size: int = 4) -> RunPlan:
    return plan_for((FLAGS + flags).split(), world_size, None)


def ops(plan: RunPlan, pp_rank: int = 0) -> Counter[Op]:
    return Counter(op for _, op, _ in plan.schedule(plan.batch.num_microbatches).rows[pp_rank])


@pytest.mark.parametrize("units", [1, 2, 3])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "breadth-first", "zb-h1", "zb-v", "dualpipe", "dualpipe-v"])
def test_every_schedule_gathers_its_units_and_holds_every_layer_once(schedule: str, units: int) -> None:
    chunks = "--num-virtual-stages-per-pipeline-rank 2 " if schedule == "breadth-first" else ""
    grid = f"--pipeline-model-parallel-size 2 --pipeline-schedule {schedule} --global-batch-size 16 {chunks}"
    plan = planned(f"{ZERO_3} --data-parallel-sharding-units {units} {grid}")
    whole = planned(grid)
    stages = [min(units, count) for count in whole.partition.layer_counts]
    assert plan.placement.num_stages == sum(stages)
    assert plan.partition.num_layers == 8
    assert plan.whole_stages().partition == whole.partition
    assert plan.num_chunks == whole.num_chunks
    for count in (plan.batch.num_microbatches, 4):
        validate(plan.schedule(count))
        validate(plan.forward_schedule(count))
        assert Op.UNSHARD in plan.forward_schedule(count).ops
    assert ops(plan)[Op.UNSHARD] >= len(plan.placement.stages_of(0))


def test_one_rank_of_a_pipeline_is_split_into_units() -> None:
    plan = planned(f"{ZERO_3} --data-parallel-sharding-units 4 --global-batch-size 16")
    assert plan.partition.layer_counts == (2, 2, 2, 2)
    # each of 4 microbatches gathers 4 units twice, the last only once, which turns
    assert ops(plan)[Op.UNSHARD] == 4 * (2 * 4 - 1)
    assert ops(plan)[Op.REDUCE_GRAD] == 4 * 4


def test_gradients_alone_are_not_gathered() -> None:
    plan = planned(f"{ZERO_2} --data-parallel-sharding-granularity microbatch --global-batch-size 16")
    assert ops(plan)[Op.UNSHARD] == 0 and ops(plan)[Op.REDUCE_GRAD] == 4


def test_a_varied_plan_keeps_its_units() -> None:
    flags = f"{ZERO_3} --data-parallel-sharding-units 2 --pipeline-model-parallel-size 2 --global-batch-size 16"
    config = with_vocabulary(load_config((FLAGS + flags).split(), is_job=False).config)
    other = dataclasses.replace(config, recompute=RecomputeConfig("full", "uniform", 1))
    assert vary(resolve(config, 4), other) == resolve(other, 4)


def test_the_head_start_of_sharded_weights_begins_with_their_gather() -> None:
    flags = "--pipeline-model-parallel-size 4 --pipeline-schedule zb-h2 --optimizer-post-validation"
    plan = planned(f"{ZERO_3} {flags} --global-batch-size 16")
    row, length = plan.schedule(16).rows[0], plan.head_start(16)[0]
    forwards = [action for action in row[:length] if action.op is Op.F]
    assert row[0].op is Op.UNSHARD and len(forwards) == 3 and row[length - 1].op in (Op.F, Op.SEND_F)
