"""Gathers of updated weights that end as late as possible: every part of a model waits for what it reads.

Over gloo on one machine a gather is done before anything reads its result, so that a missing wait would not be seen.
Here it runs when it is waited for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megapipe.comm.collectives import all_gather
from megapipe.comm.groups import Group
from megapipe.data_parallel import store
from megapipe.optimizer.schedule import Rates
from tests.harness import RankPool
from tests.tiny import LLAMA, tiny_config
from tests.train.grids import runtime_of, step_microbatches, trainer

PP = {"pipeline_model_parallel_size": 2}
EXPERTS = LLAMA | {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 8, "expert_model_parallel_size": 2}
LATENT = LLAMA | {"multi_latent_attention": True, "kv_lora_rank": 4, "qk_head_dim": 4, "qk_pos_emb_head_dim": 4}
LATENT |= {"v_head_dim": 6, "kv_channels": None, "num_query_groups": None}
CHUNKS = {"num_virtual_stages_per_pipeline_rank": 2, "num_layers": 8}
IN_PARTS = {"overlap_moe_expert_parallel_comm": True, "num_layers": 4, "pipeline_schedule": "dualpipe-v"}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "dense": (2, {}),
    "latent attention, prediction ahead": (2, LATENT | {"mtp_num_layers": 1}),
    "experts": (4, EXPERTS | {"moe_shared_expert_intermediate_size": 8}),
    "experts in parts": (8, PP | EXPERTS | IN_PARTS | {"moe_shared_expert_intermediate_size": 8}),
    "recomputed norms and activations, two chunks": (
        4,
        PP | LLAMA | CHUNKS | {"recompute_granularity": "selective", "recompute_modules": ("layernorm", "mlp")},
    ),
    "full recompute, tied, two chunks": (
        4,
        PP | CHUNKS | {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2},
    ),
    "slices": (4, PP | LLAMA | {"pipe_sp_splits": 2}),
}


class Late:
    """An all-gather in flight that runs when it is waited for."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def wait(self) -> None:
        all_gather(*self.arguments)


def late(output: Tensor, part: Tensor, group: Group, async_op: bool = False) -> Any:
    return Late(output, part, group) if async_op else all_gather(output, part, group)


def trained(rank: int, world_size: int, changes: dict[str, Any], is_late: bool) -> list[float]:
    options = {"dtype": "fp64", "vocab_size": 28, "make_vocab_size_divisible_by": 1, "global_batch_size": 16}
    sharded = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": is_late}
    with pytest.MonkeyPatch.context() as patch:
        if is_late:
            patch.setattr(store, "all_gather", late)
        runtime = runtime_of(tiny_config(**options | sharded | changes), rank, world_size)
        step, random, numbers = trainer(runtime), np.random.RandomState(0), []
        for number in range(3):
            rows = random.randint(0, 28, (16, 9))
            result = step.run(step_microbatches(runtime, rows, number), Rates(1e-2, 0.01))
            numbers += [result.loss, result.update.grad_norm]
        runtime.stores.finish_weights()
    return numbers


@pytest.mark.parametrize("name", CASES)
def test_everything_waits_for_the_weights_that_it_reads(name: str, rank_pools: Callable[[int], RankPool]) -> None:
    world_size, changes = CASES[name]
    found, expected = (rank_pools(world_size).run(trained, changes, is_late) for is_late in (True, False))
    assert found == expected


def test_a_gather_that_nothing_waits_for_leaves_old_weights(rank_pools: Callable[[int], RankPool]) -> None:
    found, expected = (rank_pools(2).run(without_waits, is_late) for is_late in (True, False))
    assert found != expected


def without_waits(rank: int, world_size: int, is_late: bool) -> list[float]:
    """Train as `trained`, but without the hooks of blocks that wait."""
    with pytest.MonkeyPatch.context() as patch:
        if is_late:
            patch.setattr(torch.nn.Module, "register_forward_pre_hook", lambda *_: None)
        return trained(rank, world_size, {}, is_late)
