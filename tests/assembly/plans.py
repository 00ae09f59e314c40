"""Plans of a tiny model for tests of a runtime on real ranks."""

from __future__ import annotations

from typing import Any

from megapipe.plan.resolve import resolve
from megapipe.plan.run_plan import RunPlan
from tests.tiny import tiny_config
from tests.train.runs import FOUR_LAYERS

UNEVEN = {"pipeline_model_parallel_layout": "Ettt|tt|t|L", "num_layers": 6}
UNLIKE: dict[str, Any] = {
    "device": "cpu",  # CUDA's kernel for fp32 and several query groups keeps its output twice
    "norm_position": "after",
    "qk_layernorm": True,
    "normalization": "RMSNorm",
    "layer_pattern": (
        "1 qk_layernorm_scope=projection",
        "1 attention=none ffn_hidden_size=32",
        "1 norm_position=around num_query_groups=2",
        "1 mlp=none",
    ),
}


def make_plan(world_size: int, dtype: str, **changes: Any) -> RunPlan:
    untied = {"untie_embeddings_and_output_weights": True, "attention_dropout": 0.0, "global_batch_size": 24}
    untied["device"] = "cpu"
    per_node = changes.pop("ranks_per_node", None)
    return resolve(tiny_config(**FOUR_LAYERS | untied | {"dtype": dtype} | changes), world_size, per_node)
