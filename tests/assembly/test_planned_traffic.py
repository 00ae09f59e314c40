"""Real steps send exactly the planned bytes over tp, pp, replicas and the embedding group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from megapipe.assembly.microbatches import Keys
from megapipe.assembly.runtime import TrainingRuntime
from megapipe.comm import collectives
from megapipe.comm.channels import NUMBER_BITS, Channel
from megapipe.comm.groups import Group, build_process_groups
from megapipe.model.microbatch import Microbatch
from megapipe.optimizer.schedule import Rates
from megapipe.plan.traffic import step_bytes
from megapipe.train.step import train_step
from tests.assembly.test_planned_memory import UNLIKE, make_plan
from tests.harness import RankPool

TP2, SP, PP2 = {"tensor_model_parallel_size": 2}, {"sequence_parallel": True}, {"pipeline_model_parallel_size": 2}
TIED, ZERO1 = {"untie_embeddings_and_output_weights": False}, {"use_distributed_optimizer": True}
OVERLAP = {"tp_comm_overlap": True, "tp_comm_overlap_chunks": 3}
EXPERTS = {
    "num_experts": 4,
    "moe_router_force_load_balancing": True,
    "moe_layer_freq": "2",
    "add_bias_linear": False,
}
GRIDS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, TP2),
    "tp2_sequence_parallel": (2, TP2 | SP),
    "tp2_sequence_parallel_in_chunks": (2, TP2 | SP | OVERLAP),
    "tp2_full_recompute_in_chunks": (
        2,
        TP2 | OVERLAP | {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    ),
    "tp2_sequence_parallel_mlp_recompute": (
        2,
        TP2 | SP | {"recompute_granularity": "selective", "recompute_modules": ("mlp",)},
    ),
    "tp2_unlike_layers": (2, TP2 | UNLIKE),
    "tp2_sequence_parallel_unlike_layers_mlp_recompute": (
        2,
        TP2 | SP | UNLIKE | {"recompute_granularity": "selective", "recompute_modules": ("mlp", "layernorm")},
    ),
    "tp2_sequence_parallel_budget": (2, TP2 | SP | {"recompute_memory_budget": 0.4}),
    "pp2_2_chunks_fp8_messages": (
        2,
        PP2 | {"num_virtual_stages_per_pipeline_rank": 2, "pipeline_message_dtype": "fp8"},
    ),
    "tp2_sequence_parallel_pp2_fp8_messages": (4, TP2 | SP | PP2 | {"pipeline_message_dtype": "fp8"}),
    "pp2_tied_dp2": (4, PP2 | TIED),
    "pp2_2_chunks_tied_zero1_dp2": (4, PP2 | TIED | ZERO1 | {"num_virtual_stages_per_pipeline_rank": 2}),
    "dualpipe_zero1": (4, PP2 | ZERO1 | {"pipeline_schedule": "dualpipe"}),
    "tp2_sequence_parallel_pp2_zero1": (4, TP2 | SP | PP2 | ZERO1),
    "experts_ep2_zero1": (4, EXPERTS | ZERO1 | {"expert_model_parallel_size": 2}),
    "experts_ep2_padded": (
        2,
        EXPERTS
        | {"expert_model_parallel_size": 2, "moe_router_force_load_balancing": False}
        | {"moe_expert_capacity_factor": 1.5, "moe_pad_expert_input_to_capacity": True},
    ),
    "experts_tp2_ep2_full_recompute": (
        4,
        EXPERTS
        | TP2
        | SP
        | {"expert_model_parallel_size": 2, "moe_shared_expert_intermediate_size": 8}
        | {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    ),
}
PASSES = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}
HIDDEN = 16


def sent(rank: int, world_size: int, changes: dict[str, Any]) -> dict[str, float]:
    """Run a step and return the bytes handed to each group.

    Over tp only hidden states count, as in the plan.
    """
    plan = make_plan(world_size, "fp32", **changes)
    runtime = TrainingRuntime(plan, build_process_groups(plan.topology, rank, "gloo", 30), torch.device("cpu"))
    found: Counter[str] = Counter()
    run, post = collectives._run, Channel._post

    def counted(name: str, group: Group, tensors: tuple[Tensor, ...], *rest: Any) -> Any:
        whole = max(tensors, key=Tensor.numel, default=None)
        if (
            whole is not None
            and name in PASSES
            and (group.name != "tp" or (whole.ndim == 3 and whole.shape[-1] == HIDDEN))
        ):
            found[group.name] += PASSES[name] * whole.nbytes * (group.size - 1) / group.size  # type: ignore[assignment]
        return run(name, group, tensors, *rest)

    def counted_post(channel: Channel, tensor: Tensor, tag: int) -> Any:
        is_header = tag >> NUMBER_BITS & 1
        found["pp"] += tensor.nbytes if channel.sends and not is_header else 0
        return post(channel, tensor, tag)

    count = plan.batch.full // plan.batch.samples_per_microbatch
    keys = Keys(1, 2, runtime.coordinates.dp_rank, plan.topology.dp)
    tokens = torch.randint(29, (count, 2, 8), generator=torch.Generator().manual_seed(rank))
    microbatches = [Microbatch(each, labels=each.clone(), dropout_key=keys.of(k)) for k, each in enumerate(tokens)]
    with mock.patch.object(collectives, "_run", counted), mock.patch.object(Channel, "_post", counted_post):
        train_step(runtime).run(microbatches, Rates(1e-2, 0.0))
        runtime.gather.finish()
    return dict(found)


@pytest.mark.parametrize("name", GRIDS)
def test_a_step_sends_the_bytes_in_the_plan(name: str, rank_pools: Callable[[int], RankPool]) -> None:
    world_size, changes = GRIDS[name]
    plan = make_plan(world_size, "fp32", **changes)
    for rank, real in enumerate(rank_pools(world_size).run(sent, changes)):
        planned = step_bytes(plan, plan.topology.coordinates(rank).pp_rank)
        assert {group: real.get(group, 0) for group in planned} == planned, (rank, real)
