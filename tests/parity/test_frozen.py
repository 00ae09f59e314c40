"""Grids with frozen parameters equal one process that freezes the same, in fp64: loss, gradients, norm and weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.extras.verify.grids import compared
from tests.harness import RankPool
from tests.tiny import LLAMA, tiny_config

PIPELINE = LLAMA | {"pp": 2, "num_layers": 4}
TIED = {"untie_embeddings_and_output_weights": False}
EXPERTS = {"num_experts": 4, "expert_model_parallel_size": 2, "moe_ffn_hidden_size": 16, "moe_router_topk": 2}
FIRST_STAGE = ("embedding.*", "decoder.layers.[01].*")
LAST_STAGE = ("decoder.layers.[23].*", "decoder.final_layernorm.*", "output_layer.*")
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "weights beside biases": (1, {"freeze": ("*.weight",)}),
    "biases beside weights": (2, {"tp": 2, "sp": True, "freeze": ("*.bias",)}),
    "the first stage": (4, PIPELINE | {"tp": 2, "sp": True, "freeze": FIRST_STAGE}),
    "the last stage": (4, PIPELINE | {"zero": True, "freeze": LAST_STAGE}),
    "a tied embedding on two ranks": (4, PIPELINE | TIED | {"zero": True, "freeze": ("embedding.*",)}),
    "a tied embedding on one rank": (2, PIPELINE | TIED | {"pipeline_schedule": "zb-v", "freeze": ("embedding.*",)}),
    "all but a tied embedding": (2, PIPELINE | TIED | {"pipeline_schedule": "zb-h1", "freeze": ("decoder.*",)}),
    "a split backward in parts of the loss": (
        2,
        PIPELINE
        | {"pipeline_schedule": "zb-h1", "cross_entropy_chunk_size": 3}
        | {"freeze": ("output_layer.*", "*.linear_fc2.*", "decoder.layers.1.*")},
    ),
    "sharded weights": (
        4,
        PIPELINE
        | {"zero": True, "data_parallel_sharding_strategy": "optim_grads_params", "ddp_bucket_size": 2000}
        | {"freeze": (*FIRST_STAGE, "*.linear_proj.*")},
    ),
    "sharded gradients": (
        2,
        LLAMA
        | {"zero": True, "data_parallel_sharding_strategy": "optim_grads", "grad_reduce_in_bf16": False}
        | {"freeze": ("embedding.*", "decoder.layers.0.*")},
    ),
    "versions of weights": (
        2,
        PIPELINE | {"pipeline_schedule": "pipedream", "clip_grad": 0.0, "freeze": ("*.mlp.*", "embedding.*")},
    ),
    "experts": (2, LLAMA | EXPERTS | {"zero": True, "freeze": ("*.experts.*",)}),
    "all but routers": (2, LLAMA | EXPERTS | {"freeze": ("*norm*", "*linear*", "*experts*", "emb*", "out*")}),
    "Muon": (2, LLAMA | {"zero": True, "optimizer": "muon", "freeze": ("*.self_attention.*",)}),
    "SGD": (2, {"optimizer": "sgd", "weight_decay": 0.1, "freeze": ("*.mlp.*", "embedding.position*")}),
    "recomputed layers": (
        1,
        LLAMA
        | {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
        | {"freeze": ("embedding.*", "decoder.layers.0.*", "*layernorm*")},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_grid_equals_one_process_that_freezes_the_same(case: str, rank_pools: Callable[[int], RankPool]) -> None:
    world, options = CASES[case]
    steps, report = rank_pools(world).run(compared, tiny_config(**options), "fp64")[0]
    assert len(steps) == 3 and all(step.passes for step in steps), report
