"""Hunyuan-3 (HYV3ForCausalLM): normalized queries and keys, sigmoid scores with biases, shared experts."""

from __future__ import annotations

from megapipe.extras.convert import experts
from megapipe.extras.convert.family import NO_ATTENTION_BIAS, llama_relative
from megapipe.extras.convert.tables import Rule, always, fixed, key

FAMILY = llama_relative(
    "HYV3ForCausalLM",
    key("head_dim", "kv_channels", 128),
    *NO_ATTENTION_BIAS,
    fixed("mlp_bias", False, "linears have biases in attention and MLPs, or in none"),
    always(qk_layernorm=True),
    experts.SIGMOID,
    experts.scaling(2.826, "router_scaling_factor"),
    experts.shared_experts(1, 1536, "num_shared_experts"),
    experts.mlp_types(1),
    # in which precision two results are added, in half types
    Rule(("enable_moe_fp32_combine",), lambda settings: {}, lambda layers: {}),
    mlp=experts.some_layers(("num_experts", "num_local_experts"), 8),
    more_rows=experts.expert_rows(router="router.gate", shared="shared_mlp", bias="expert_bias"),
)
