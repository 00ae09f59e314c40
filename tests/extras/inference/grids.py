"""Build a model on ranks for the inference tests, with weights drawn as in training or given as whole tensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megapipe.assembly.runtime import InferenceRuntime
from megapipe.comm.groups import build_process_groups
from megapipe.config.config import Config
from megapipe.config.model import ModelConfig, PrecisionConfig
from megapipe.config.parallel import ParallelConfig
from megapipe.config.training import TrainingConfig
from megapipe.extras.verify.oracle import drawn_slices
from megapipe.plan.resolve import resolve
from tests.extras.verify.grids import given_slices

SIZES = {
    "num_layers": 4,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "seq_length": 12,
    "max_position_embeddings": 24,
    "vocab_size": 29,
    "make_vocab_size_divisible_by": 8,
    "ffn_hidden_size": 32,
    "hidden_dropout": 0.1,
    "attention_dropout": 0.1,
}


EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "moe_router_score_function": "sigmoid",
    "moe_shared_expert_intermediate_size": 8,
    "add_bias_linear": False,
}
EXPERT_GRIDS: dict[str, dict[str, Any]] = {
    "ep4": {"expert_model_parallel_size": 4},
    "tp2_ep2_etp2": {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "expert_model_parallel_size": 2,
    },
    "tp2_pp2_ep2_etp1": {
        "tensor_model_parallel_size": 2,
        "sequence_parallel": True,
        "pipeline_model_parallel_size": 2,
        "expert_model_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
    },
}


def runtime_on(
    rank: int,
    world_size: int,
    grid: dict[str, int],
    model: dict[str, Any],
    weights: Mapping[str, Tensor] | None = None,
    dtype: str = "fp64",
) -> InferenceRuntime:
    """Build the runtime. grid: sizes of ParallelConfig. weights: whole tensors, drawn at random if None."""
    config = Config(
        model=ModelConfig(**(SIZES | model)),
        parallel=ParallelConfig(**grid),
        training=TrainingConfig(micro_batch_size=2, train_iters=1),
        precision=PrecisionConfig(dtype=dtype),
    )
    plan = resolve(config, world_size)
    groups = build_process_groups(plan.topology, rank, "gloo", 60)
    slices = drawn_slices(7, torch.float64) if weights is None else given_slices(weights)
    runtime = InferenceRuntime(plan, groups, torch.device("cpu"), slices)
    for _, box in runtime.held_states():
        if weights is not None:
            box.values.copy_(weights[box.name.removeprefix("weights/")])
    return runtime
