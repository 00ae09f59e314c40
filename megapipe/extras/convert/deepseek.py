"""DeepSeek-V2 and V3 in Hugging Face's terms: latent attention, experts chosen in groups, shared experts.

Their rotary pairs are neighbouring channels; here a pair is channels i and i + r / 2 of r rotated ones, so that rows of
the projections to rotated channels are reordered.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from megapipe.config.layers import LayerConfig
from megapipe.config.model import ModelConfig
from megapipe.errors import ConfigError
from megapipe.extras.convert import prediction
from megapipe.extras.convert.tables import (
    EXPERT,
    LAYER,
    Layers,
    Layout,
    Row,
    Rule,
    Settings,
    always,
    check_alike,
    fixed,
    gate_and_up,
    key,
    nullable,
    of_experts,
    of_experts_transposed,
    unwritten,
)

LATENT_EPSILON = 1e-6  # of the norms of latents, whatever rms_norm_eps is


def neighbours(heads: Callable[[ModelConfig], int], plain: Callable[[ModelConfig], int]) -> Callable[..., Layout]:
    """Return the layout of rows of so many heads, `plain` rows of each and then the rotated ones in neighbouring pairs.

    Their pair (2 i, 2 i + 1) is our (i, i + r / 2).
    """

    def layout(model: ModelConfig) -> Layout:
        rotated = model.qk_pos_emb_head_dim

        def reordered(whole: Tensor, pairs: tuple[int, int]) -> Tensor:
            own, turned = whole.reshape(heads(model), -1, *whole.shape[1:]).split((plain(model), rotated), dim=1)
            turned = turned.unflatten(1, pairs).transpose(1, 2).flatten(1, 2)
            return torch.cat((own, turned), dim=1).flatten(0, 1)

        half = rotated // 2
        return Layout(lambda parts: reordered(parts[0], (half, 2)), lambda whole: (reordered(whole, (2, half)),))

    return layout


def rows(ours: str, theirs: str) -> tuple[Row, ...]:
    """Return the rows of latent attention and of experts. ours, theirs: the names of a layer, with its number."""
    attention, their_attention = f"{ours}.self_attention", f"{theirs}.self_attn"
    of_queries = neighbours(lambda model: model.num_attention_heads, lambda model: model.qk_head_dim)
    of_keys = neighbours(lambda model: 1, lambda model: model.kv_lora_rank)
    expert, shared = f"{theirs}.mlp.experts.{EXPERT}", f"{theirs}.mlp.shared_experts"
    return (
        Row(f"{attention}.linear_q_proj", (f"{their_attention}.q_proj",), of_queries),
        Row(f"{attention}.linear_q_down_proj", (f"{their_attention}.q_a_proj",)),
        Row(f"{attention}.q_layernorm", (f"{their_attention}.q_a_layernorm",)),
        Row(f"{attention}.linear_q_up_proj", (f"{their_attention}.q_b_proj",), of_queries),
        Row(f"{attention}.linear_kv_down_proj", (f"{their_attention}.kv_a_proj_with_mqa",), of_keys),
        Row(f"{attention}.kv_layernorm", (f"{their_attention}.kv_a_layernorm",)),
        Row(f"{attention}.linear_kv_up_proj", (f"{their_attention}.kv_b_proj",)),
        Row(f"{ours}.mlp.router", (f"{theirs}.mlp.gate",)),
        Row(f"{ours}.mlp.router.expert_bias", (f"{theirs}.mlp.gate.e_score_correction_bias",)),
        Row(f"{ours}.mlp.experts.weight1", (f"{expert}.gate_proj.weight", f"{expert}.up_proj.weight"), of_experts),
        Row(f"{ours}.mlp.experts.weight2", (f"{expert}.down_proj.weight",), of_experts_transposed),
        Row(f"{ours}.mlp.shared_experts.linear_fc1", (f"{shared}.gate_proj", f"{shared}.up_proj"), gate_and_up),
        Row(f"{ours}.mlp.shared_experts.linear_fc2", (f"{shared}.down_proj",)),
    )


ROWS = (*rows(f"decoder.layers.{LAYER}", f"model.layers.{LAYER}"), *prediction.ROWS)


def expert_layer(layers: Layers) -> LayerConfig:
    """Return the first layer with experts and latent attention. Raises ConfigError if there is none."""
    found = next((layer for layer in layers if layer.num_experts is not None), None)
    if found is None or not found.multi_latent_attention:
        raise ConfigError("the model lacks experts or latent attention, which this architecture has")
    return found


DENSE = "first_k_dense_replace"


def dense_layers(default: int) -> Rule:
    """Return the rule of the number of first layers that have no experts."""

    def read(settings: Settings) -> dict[str, Any]:
        dense, count = settings.get(DENSE, default), int(settings["num_hidden_layers"])
        if not 0 <= dense < count:
            raise ConfigError(f"{DENSE} {dense} of {count} layers cannot be expressed: no layer would have experts")
        return {"moe_layer_freq": f"[0]*{dense}+[1]*{count - dense}" if dense else None}

    return Rule((DENSE,), read, write_dense_layers)


def write_dense_layers(layers: Layers) -> dict[str, Any]:
    expert_layer(layers)
    return {DENSE: next(number for number, layer in enumerate(layers) if layer.num_experts is not None)}


WIDTH, SHARED = "moe_intermediate_size", "n_shared_experts"


def shared_experts(default_width: int, default_count: int) -> Rule:
    """Return the rule of the width of an expert, and of the shared ones, which are as wide as a number of experts."""

    def read(settings: Settings) -> dict[str, Any]:
        width, count = settings.get(WIDTH, default_width), settings.get(SHARED, default_count)
        if not count:
            raise ConfigError(f"{SHARED} {count} cannot be expressed: this architecture has shared experts")
        return {"moe_ffn_hidden_size": width, "moe_shared_expert_intermediate_size": count * width}

    return Rule((WIDTH, SHARED), read, write_shared)


def write_shared(layers: Layers) -> dict[str, Any]:
    layer = expert_layer(layers)
    shared, width = layer.moe_shared_expert_intermediate_size or 0, layer.expert_ffn_size
    if not shared or shared % width:
        rule = f"its shared experts are as wide as a number of experts, {width} each"
        raise ConfigError(f"shared experts of {shared} channels cannot be expressed: {rule}")
    return {WIDTH: width, SHARED: shared // width}


GROUPS, TAKEN, TOPK = "n_group", "topk_group", "num_experts_per_tok"


def read_choice(settings: Settings) -> dict[str, Any]:
    """Read how a token chooses experts. In transformers a group's score is the sum of its two best experts'."""
    groups, taken, topk = (settings.get(name, default) for name, default in ((GROUPS, 8), (TAKEN, 4), (TOPK, 8)))
    if topk < 2:
        raise ConfigError(f"{TOPK} {topk} cannot be expressed: weights of one chosen expert are not normalized here")
    fields = {"moe_router_topk": topk, "moe_router_num_groups": None, "moe_router_group_topk": None}
    if groups == taken:  # all groups are taken
        return fields
    if topk != 2 * taken:
        rule = f"here a group's score is the sum of its {TOPK} / {TAKEN} best experts', there of two"
        raise ConfigError(f"{TOPK} {topk} with {TAKEN} {taken} cannot be expressed: {rule}")
    return fields | {"moe_router_num_groups": groups, "moe_router_group_topk": taken}


def write_choice(layers: Layers) -> dict[str, Any]:
    layer = expert_layer(layers)
    groups, taken = layer.moe_router_num_groups or 1, layer.moe_router_group_topk or 1
    return {TOPK: layer.moe_router_topk, GROUPS: groups, TAKEN: taken}


BY_GROUP, GREEDY, METHOD = "group_limited_greedy", "greedy", "topk_method"


def read_choice_of_v2(settings: Settings) -> dict[str, Any]:
    """Read how a token chooses experts in DeepSeek-V2, where a group's score is that of its best expert."""
    groups, taken, topk = settings.get(GROUPS) or 1, settings.get(TAKEN) or 1, settings.get(TOPK)
    method = settings.get(METHOD) or GREEDY
    if method not in (GREEDY, BY_GROUP):
        raise ConfigError(f"{METHOD} {method!r} cannot be expressed; it can be {GREEDY}, {BY_GROUP}")
    if topk is None:
        raise ConfigError(f"the key {TOPK} is missing")
    if method == GREEDY or groups == taken:
        return {"moe_router_topk": topk}
    if topk != taken:
        rule = f"a group's score is that of its best expert there, and here the sum of its {TOPK} / {TAKEN} best"
        raise ConfigError(f"{METHOD} {BY_GROUP} with {TOPK} {topk} and {TAKEN} {taken} cannot be expressed: {rule}")
    return {"moe_router_topk": topk, "moe_router_num_groups": groups, "moe_router_group_topk": taken}


def write_choice_of_v2(layers: Layers) -> dict[str, Any]:
    layer = expert_layer(layers)
    groups, taken = layer.moe_router_num_groups, layer.moe_router_group_topk
    return {TOPK: layer.moe_router_topk, GROUPS: groups, TAKEN: taken, METHOD: BY_GROUP if groups else GREEDY}


def read_head_sizes(settings: Settings) -> dict[str, Any]:
    """Check keys that repeat others."""
    rotated, plain = settings.get("qk_rope_head_dim", 64), settings.get("qk_nope_head_dim", 128)
    heads = settings["num_attention_heads"]
    repeated = {"head_dim": rotated, "qk_head_dim": rotated + plain, "num_key_value_heads": heads}
    for name, value in repeated.items():
        found = settings.get(name)
        check_alike({name: found, "its value by the other keys": value})
    return {}


QUANTIZATION = "quantization_config"  # the reader of tensors dequantizes


SCALE = "routed_scaling_factor"


def scale(default: float) -> Rule:
    """Return the rule of the factor on the weights of chosen experts."""

    def read(settings: Settings) -> dict[str, Any]:
        value = settings.get(SCALE, default)
        return {"moe_router_topk_scaling_factor": None if value == 1.0 else value}

    return Rule((SCALE,), read, lambda layers: {SCALE: expert_layer(layers).moe_router_topk_scaling_factor or 1.0})


def experts(default: int) -> Rule:
    """Return the rule of the number of experts."""
    name = "n_routed_experts"
    rule = key(name, "num_experts", default)
    return Rule((name,), rule.read, lambda layers: {name: expert_layer(layers).num_experts})


COMMON = (
    key("kv_lora_rank", "kv_lora_rank", 512),
    nullable("q_lora_rank", "q_lora_rank", 1536),
    key("qk_nope_head_dim", "qk_head_dim", 128),
    key("qk_rope_head_dim", "qk_pos_emb_head_dim", 64),
    key("v_head_dim", "v_head_dim", 128),
    Rule(
        ("head_dim", "qk_head_dim", "num_key_value_heads"),
        read_head_sizes,
        lambda layers: {"num_key_value_heads": layers[0].num_attention_heads},
    ),
    key("rms_norm_eps", "norm_epsilon", 1e-6),
    fixed("attention_bias", False, "projections of latent attention have no biases here"),
    unwritten(fixed("moe_layer_freq", 1, "all layers after the dense ones have experts")),
    # of training, without effect here
    Rule(("aux_loss_alpha", "ep_size", "seq_aux"), lambda settings: {}, lambda layers: {}),
    Rule((QUANTIZATION,), lambda settings: {}, lambda layers: {}),
    always(
        multi_latent_attention=True,
        qk_layernorm=True,
        latent_norm_epsilon=LATENT_EPSILON,
        add_bias_linear=False,
        moe_router_dtype="fp32",
        moe_shared_expert_gate=False,
    ),
)
RULES = (
    *COMMON,
    experts(256),
    scale(2.5),
    dense_layers(3),
    shared_experts(2048, 1),
    Rule((GROUPS, TAKEN, TOPK), read_choice, write_choice),
    fixed("norm_topk_prob", True, "weights of the chosen experts are normalized here"),
    fixed("rope_interleave", True, "rotary pairs of this architecture are read as neighbouring channels"),
    unwritten(fixed("scoring_func", "sigmoid", "scores of this architecture are sigmoids")),
    unwritten(fixed(METHOD, "noaux_tc", "experts of this architecture are chosen with a bias")),
    prediction.RULE,
    always(moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True),
)
RULES_OF_V2 = (
    *COMMON,
    experts(64),
    scale(1.0),
    dense_layers(0),
    shared_experts(1407, 2),
    Rule((GROUPS, TAKEN, TOPK, METHOD), read_choice_of_v2, write_choice_of_v2),
    fixed("norm_topk_prob", False, "transformers never normalizes the weights of the chosen experts in DeepSeek-V2"),
    fixed("mlp_bias", False, "projections of latent attention have no biases, and here all linears have or none has"),
    unwritten(fixed("scoring_func", "softmax", "scores of this architecture are a softmax")),
    always(moe_router_score_function="softmax", moe_router_pre_softmax=True),
)
