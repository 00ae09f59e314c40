"""Hunyuan-A13B (HunYuanMoEV1ForCausalLM): queries and keys are normalized after their rotation, and every layer has one
shared expert as wide as the others. Hunyuan-3 (HYV3ForCausalLM): normalized queries and keys, sigmoid scores with
biases, shared experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megapipe.errors import ConfigError
from megapipe.extras.convert import experts
from megapipe.extras.convert.family import llama_relative
from megapipe.extras.convert.layer_types import PARAMETERS, ROPE, SCALING, THETA
from megapipe.extras.convert.tables import Layers, Rule, Settings, again, always, fixed, unwritten

ALPHA = "alpha"  # of rope_type dynamic: a factor on the base, whatever the length is


def read_rope(settings: Settings) -> dict[str, Any]:
    """Read rotary positions; with alpha the base is theta x alpha^(d / (d - 2)) for heads of d channels."""
    found = dict(settings)
    for name in (SCALING, PARAMETERS):
        given = settings.get(name)
        kind = given.get("rope_type", given.get("type")) if isinstance(given, Mapping) else None
        if kind == "dynamic" and given is not None and given.get(ALPHA):
            size = settings.get("head_dim") or settings["hidden_size"] // settings["num_attention_heads"]
            theta = given.get(THETA) or settings.get(THETA) or 1e4
            found[name], found[THETA] = {}, theta * given[ALPHA] ** (size / (size - 2))
    return ROPE.read(found)


def same_of_all(rule: Rule) -> Rule:
    """Return the rule whose values may be lists with the same value for every layer."""

    def value(name: str, given: Any) -> Any:
        if isinstance(given, list) and len(set(given)) > 1:
            raise ConfigError(f"{name} {given} cannot be expressed: all layers have the same number here")
        return given[0] if isinstance(given, list) else given

    def read(settings: Settings) -> dict[str, Any]:
        return rule.read({**settings, **{name: value(name, settings[name]) for name in rule.keys if name in settings}})

    return Rule(rule.keys, read, rule.write)


def write_shared(layers: Layers) -> dict[str, Any]:
    layer = experts.of_expert_layer(layers)
    if layer.moe_shared_expert_intermediate_size != layer.expert_ffn_size:
        raise ConfigError("this architecture has one shared expert, as wide as the others")
    return {}


FAMILY = llama_relative(
    "HunYuanMoEV1ForCausalLM",
    always(qk_layernorm_after_rope=True, moe_router_dtype="fp32"),
    Rule((), lambda settings: {experts.SHARED: settings[experts.DENSE_WIDTH]}, write_shared),
    unwritten(fixed("use_qk_norm", True, "this architecture normalizes queries and keys")),
    unwritten(fixed("use_cla", False, "every layer has its own keys and values here")),
    unwritten(fixed("mlp_bias", False, "linears of this architecture have no biases")),
    same_of_all(unwritten(fixed("num_shared_expert", 1, "this architecture has one shared expert in every layer"))),
    same_of_all(again(experts.WIDTH, experts.DENSE_WIDTH)),
    rope=Rule(ROPE.keys, read_rope, ROPE.write),
    mlp=(
        same_of_all(experts.expert_key(("num_experts", "num_local_experts"), "num_experts", 1)),
        same_of_all(experts.expert_key(("moe_topk", experts.TOPK), "moe_router_topk", 1)),
        experts.expert_width(experts.DENSE_WIDTH, "ffn_hidden_size"),
    ),
    more_rows=experts.expert_rows(router="gate.wg", shared="shared_mlp"),
    of_heads=("query_layernorm", "key_layernorm"),
)
HUNYUAN_3 = llama_relative(
    "HYV3ForCausalLM",
    fixed("mlp_bias", False, "linears have biases in attention and MLPs, or in none"),
    experts.SIGMOID,
    experts.scaling(2.826, "router_scaling_factor"),
    experts.shared_experts(1, 1536, "num_shared_experts"),
    experts.mlp_types(1),
    # in which precision two results are added, in half types
    Rule(("enable_moe_fp32_combine",), lambda settings: {}, lambda layers: {}),
    mlp=experts.some_layers(("num_experts", "num_local_experts"), 8),
    more_rows=experts.expert_rows(router="router.gate", shared="shared_mlp", bias="expert_bias"),
)
