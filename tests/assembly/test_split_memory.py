"""Memory between F, I and W.

After each action a rank holds the planned bytes: tensors saved by autograd, and tensors that wait for their weight
gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from megapipe.assembly.microbatches import Keys
from megapipe.assembly.runtime import TrainingRuntime
from megapipe.comm.groups import build_process_groups
from megapipe.model.microbatch import Microbatch
from megapipe.plan.activations import deferred_bytes
from megapipe.plan.memory import SliceBytes, peak_of_row, stage_activation_bytes
from megapipe.plan.run_plan import RunPlan
from megapipe.schedule.action import COMPUTE_OPS, Op
from megapipe.train.step import TrainStep
from tests.assembly.test_planned_memory import UNLIKE, LivePeak, make_plan
from tests.harness import RankPool
from tests.model.test_planned_bytes import tensors_of

CASES: dict[str, dict[str, Any]] = {
    "zb-h1": {},
    "zb-h2": {"untie_embeddings_and_output_weights": False},
    "zb-auto": {"pipeline_memory_limit": 3},
    "zb-v": {"untie_embeddings_and_output_weights": False},
    "v-half": {"recompute_granularity": "selective", "recompute_modules": ("core_attn", "layernorm", "mlp")},
    "v-min": {},
    "zb-h1 chunked loss": {"cross_entropy_chunk_size": 5},
    "zb-h1 unlike layers": UNLIKE,
    "zb-v unlike layers": UNLIKE | {"recompute_granularity": "selective", "recompute_modules": ("layernorm", "mlp")},
    "breadth-first": {"num_virtual_stages_per_pipeline_rank": 2},
}


def bytes_after_each_action(rank: int, world_size: int, changes: dict[str, Any]) -> list[int]:
    """Run a step and return the bytes held for backwards after each compute action of this rank's row."""
    plan = make_plan(world_size, "fp32", **changes)
    runtime = TrainingRuntime(plan, build_process_groups(plan.topology, rank, "gloo", 30), torch.device("cpu"))
    generator = torch.Generator().manual_seed(rank)
    count = plan.batch.full // plan.batch.samples_per_microbatch
    tokens = [torch.randint(29, (2, 8), generator=generator) for _ in range(count)]
    microbatches = [
        Microbatch(each, labels=each.clone(), dropout_key=Keys(1, 2, 0, 1).of(k)) for k, each in enumerate(tokens)
    ]
    buffers = [buffer for stage in runtime.buffers.values() for buffer in stage.buffers]
    live = LivePeak([buffer.parameters for buffer in buffers])
    flat = [tensor for buffer in buffers for tensor in (buffer.parameters, buffer.gradients)]
    given = [tensor for each in microbatches for tensor in (each.tokens, each.labels) if tensor is not None]
    known = {tensor.untyped_storage().data_ptr() for tensor in (*flat, *given)}
    found: list[int] = []

    def recorded(act: Callable[[Any], None]) -> Callable[[Any], None]:
        def run(run: Any) -> None:
            act(run)
            waiting = [
                tensor for runner in runtime.runners.values() for tensor in tensors_of(runner.weight_gradients.waiting)
            ]
            storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in waiting}
            alone = [size for address, size in storages.items() if address not in known and not live._holders[address]]
            found.append(live._now + sum(alone))

        return run

    engine = runtime.engine(count)
    engine._acts = tuple(
        each._replace(act=recorded(each.act)) if each.action.op in COMPUTE_OPS else each for each in engine._acts
    )
    with live.hooks:
        TrainStep(runtime).gradients(microbatches).sum()
    return found


def planned_bytes(plan: RunPlan, pp_rank: int) -> tuple[list[int], int]:
    """Return the planned bytes after each compute action, and their peak."""
    stages = plan.placement.stages_of(pp_rank)
    kept = {stage: sum(stage_activation_bytes(plan, stage).values()) for stage in stages}
    waiting = {stage: deferred_bytes(plan.model, plan.shape, plan.partition.stages[stage]) for stage in stages}
    row = plan.schedule(plan.batch.full // plan.batch.samples_per_microbatch).rows[pp_rank]
    levels, level = [], 0
    for stage, op, _ in row:
        change = {Op.F: kept[stage], Op.B: -kept[stage], Op.I: waiting[stage] - kept[stage], Op.W: -waiting[stage]}.get(
            op
        )
        if change is not None:
            level += change
            levels.append(level)
    return levels, peak_of_row(row, pp_rank, plan.placement, [SliceBytes(kept, waiting, {}, 0)], 2).activation_bytes


@pytest.mark.parametrize("name", CASES)
def test_a_rank_holds_the_bytes_in_the_plan_after_every_action(
    rank_pools: Callable[[int], RankPool], name: str
) -> None:
    changes = {"pipeline_model_parallel_size": 2, "pipeline_schedule": name.split()[0]} | CASES[name]
    plan = make_plan(2, "fp32", **changes)
    for pp_rank, found in enumerate(rank_pools(2).run(bytes_after_each_action, changes)):
        levels, peak = planned_bytes(plan, pp_rank)
        assert found == levels
        assert max(found) == peak
        assert levels[-1] == 0
