"""The parameters of a model: declared by its modules, in model order, and kept for later processes as they were."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

from megapipe.config.config import resolve_model
from megapipe.errors import ConfigError
from megapipe.sharding.spec import ParamSpec
from megapipe.tensor_parallel.parameter import declarations, declared
from megapipe.trace.parameters import _as_data, _of_data, model_parameters
from tests.tiny import tiny_config

MOE = {"num_experts": 4, "moe_shared_expert_intermediate_size": 8, "moe_shared_expert_gate": True}
LATENT = {
    "multi_latent_attention": True,
    "kv_lora_rank": 8,
    "qk_head_dim": 4,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 4,
    "position_embedding_type": "rope",
}
MODELS: dict[str, dict[str, Any]] = {
    "sinks, norms over all heads, shared experts": {
        "softmax_type": "learnable",
        "qk_layernorm": True,
        "qk_layernorm_scope": "projection",
        "normalization": "RMSNorm",
        **MOE,
    },
    "latents": LATENT | {"qk_layernorm": True},
}


def specs_of(**options: Any) -> tuple[ParamSpec, ...]:
    return model_parameters(resolve_model(tiny_config(**options).model, 1), True, 2)


@pytest.mark.parametrize("model", MODELS)
def test_specs_are_read_as_they_were_written(model: str) -> None:
    specs = specs_of(**MODELS[model])
    assert tuple(_of_data(json.loads(json.dumps(_as_data(spec)))) for spec in specs) == specs


def test_parameters_are_in_the_order_of_a_forward() -> None:
    model = MODELS["sinks, norms over all heads, shared experts"]
    names = [spec.name for spec in specs_of(**model, add_bias_linear=False, norm_position="around")]
    inside = "decoder.layers.0."
    assert [name.removeprefix(inside) for name in names if name.startswith(inside)] == [
        "input_layernorm.weight",
        "self_attention.linear_qkv.weight",
        "self_attention.q_layernorm.weight",
        "self_attention.k_layernorm.weight",
        "self_attention.softmax_offset",
        "self_attention.linear_proj.weight",
        "post_self_attn_layernorm.weight",
        "pre_mlp_layernorm.weight",
        "mlp.router.weight",
        "mlp.experts.weight1",
        "mlp.experts.weight2",
        "mlp.shared_experts.linear_fc1.weight",
        "mlp.shared_experts.linear_fc2.weight",
        "mlp.shared_experts.gate_weight",
        "post_mlp_layernorm.weight",
    ]


def test_a_parameter_that_is_not_declared_is_refused_by_its_name() -> None:
    module = nn.Module()
    module.known = declared(ParamSpec("", (4, 2), 0))
    assert [(spec.name, spec.owner) for spec in declarations(module, "part.", "head")] == [("part.known", "head")]
    module.unknown = nn.Parameter(torch.empty(3))
    with pytest.raises(ConfigError, match=r"part\.unknown"):
        list(declarations(module, "part."))
