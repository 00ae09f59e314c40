"""Experts in Hugging Face's configurations and tensors: rules and rows of the architectures that have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from megapipe.config.layers import LayerConfig
from megapipe.errors import ConfigError
from megapipe.extras.convert.layer_types import regular_period, runs_text
from megapipe.extras.convert.tables import (
    EXPERT,
    LLAMA,
    OURS,
    REQUIRED,
    Layers,
    Row,
    Rule,
    Settings,
    always,
    check_alike,
    fixed,
    gate_and_up,
    interleaved_experts,
    key,
    of_experts,
    of_experts_transposed,
    stacked_experts,
    unwritten,
)

SHARED = "moe_shared_expert_intermediate_size"


def expert_rows(block: str, router: str, gate: str, up: str, down: str) -> tuple[Row, ...]:
    """Return the rows of router and experts. The names are theirs, in a layer, in the block and in an expert."""
    expert = f"{LLAMA}.{block}.experts.{EXPERT}"
    return (
        Row(f"{OURS}.mlp.router", (f"{LLAMA}.{block}.{router}",)),
        Row(f"{OURS}.mlp.experts.weight1", (f"{expert}.{gate}.weight", f"{expert}.{up}.weight"), of_experts),
        Row(f"{OURS}.mlp.experts.weight2", (f"{expert}.{down}.weight",), of_experts_transposed),
    )


def shared_rows(name: str) -> tuple[Row, ...]:
    """Return the rows of shared experts. name: theirs, in the layer."""
    ours, theirs = f"{OURS}.mlp.shared_experts", f"{LLAMA}.{name}"
    return (
        Row(f"{ours}.linear_fc1", (f"{theirs}.gate_proj", f"{theirs}.up_proj"), gate_and_up),
        Row(f"{ours}.linear_fc2", (f"{theirs}.down_proj",)),
    )


MIXTRAL_ROWS = expert_rows("block_sparse_moe", "gate", "w1", "w3", "w2")
ROWS = expert_rows("mlp", "gate", "gate_proj", "up_proj", "down_proj")
GLM_ROWS = (
    *ROWS,
    *shared_rows("mlp.shared_experts"),
    Row(f"{OURS}.mlp.router.expert_bias", (f"{LLAMA}.mlp.gate.e_score_correction_bias",)),
)
GPT_OSS_ROWS = (
    Row(f"{OURS}.self_attention.softmax_offset", (f"{LLAMA}.self_attn.sinks",)),
    Row(f"{OURS}.mlp.router", (f"{LLAMA}.mlp.router",)),
    Row(f"{OURS}.mlp.experts.weight1", (f"{LLAMA}.mlp.experts.gate_up_proj",), interleaved_experts),
    Row(f"{OURS}.mlp.experts.weight2", (f"{LLAMA}.mlp.experts.down_proj",), stacked_experts),
    Row(f"{OURS}.mlp.experts.bias1", (f"{LLAMA}.mlp.experts.gate_up_proj_bias",), interleaved_experts),
    Row(f"{OURS}.mlp.experts.bias2", (f"{LLAMA}.mlp.experts.down_proj_bias",), stacked_experts),
)
QWEN_2_ROWS = (
    *ROWS,
    *shared_rows("mlp.shared_expert"),
    Row(f"{OURS}.mlp.shared_experts.gate_weight", (f"{LLAMA}.mlp.shared_expert_gate.weight",)),
)


def of_expert_layer(layers: Layers) -> LayerConfig:
    """Return the first layer with experts. Raises ConfigError if there is none."""
    found = next((layer for layer in layers if layer.num_experts is not None and layer.has_mlp), None)
    if found is None:
        raise ConfigError("the model has no experts")
    return found


def expert_key(theirs: str, ours: str, default: Any = REQUIRED, words: Mapping[Any, Any] | None = None) -> Rule:
    """Return the rule of one key that corresponds to one field of layers with experts. Arguments as of `key`."""
    rule = key(theirs, ours, default, words)
    return replace(rule, write=lambda layers: rule.write((of_expert_layer(layers),)))


def count_and_choice(names: Sequence[str], topk: int) -> tuple[Rule, Rule]:
    """Return the rules of the number of experts, which has one of several names, and of how many see a token."""

    def read(settings: Settings) -> dict[str, Any]:
        values = {name: settings[name] for name in names if settings.get(name) is not None}
        check_alike(values)
        if not values:
            raise ConfigError(f"the key {names[0]} is missing")
        return {"num_experts": next(iter(values.values()))}

    count = Rule(tuple(names), read, lambda layers: {names[0]: of_expert_layer(layers).num_experts})
    return count, expert_key("num_experts_per_tok", "moe_router_topk", topk)


WIDTH = "moe_intermediate_size"
EXPERT_WIDTH = Rule(
    (WIDTH,),
    key(WIDTH, "moe_ffn_hidden_size").read,
    lambda layers: {WIDTH: of_expert_layer(layers).expert_ffn_size},
)


def all_layers(num_experts: Sequence[str], topk: int) -> tuple[Rule, ...]:
    """Return the rules of experts in all layers, whose width is intermediate_size. Arguments of `count_and_choice`."""
    width = "intermediate_size"
    return (
        *count_and_choice(num_experts, topk),
        replace(key(width, "ffn_hidden_size"), write=lambda layers: {width: of_expert_layer(layers).expert_ffn_size}),
    )


def some_layers(num_experts: Sequence[str], topk: int) -> tuple[Rule, ...]:
    """Return the rules of experts in some layers, of another width than the MLPs of the others. Arguments likewise."""
    width = "intermediate_size"

    def write(layers: Layers) -> dict[str, Any]:
        dense = [layer.ffn_hidden_size for layer in layers if layer.num_experts is None and layer.has_mlp]
        return {width: (dense or [layers[0].ffn_hidden_size])[0]}

    return (*count_and_choice(num_experts, topk), replace(key(width, "ffn_hidden_size"), write=write), EXPERT_WIDTH)


NORMALIZED = "norm_topk_prob"  # a softmax over all experts, divided by the sum over the chosen ones, or as it is
MAYBE_NORMALIZED = expert_key(NORMALIZED, "moe_router_pre_softmax", False, {True: False, False: True})


def expert_layers(marks: list[bool], why: str) -> dict[str, Any]:
    """Return our field for the layers that have experts. Raises ConfigError if none has. why: the keys that say so."""
    if True not in marks:
        raise ConfigError(f"{why} leave no layer with experts")
    return {"moe_layer_freq": None if all(marks) else runs_text([int(mark) for mark in marks])}


STEP, DENSE = "decoder_sparse_step", "mlp_only_layers"


def read_sparse_step(settings: Settings) -> dict[str, Any]:
    """Read Qwen's layers with experts: every decoder_sparse_step-th, without those of mlp_only_layers."""
    step, dense, num_layers = settings.get(STEP), settings.get(DENSE) or (), int(settings["num_hidden_layers"])
    step = 1 if step is None else step
    if not step > 0:
        raise ConfigError(f"{STEP} {step} cannot be expressed: it is the distance of layers with experts")
    marks = [layer % step == 0 and layer - 1 not in dense for layer in range(1, num_layers + 1)]
    return expert_layers(marks, f"{STEP} {step} and {DENSE}")


def write_sparse_step(layers: Layers) -> dict[str, Any]:
    marks = [layer.num_experts is not None for layer in layers]
    period = regular_period(marks)
    dense = [number for number, mark in enumerate(marks) if not mark] if period is None else []
    return {STEP: period or 1, DENSE: dense}


SPARSE_STEP = Rule((STEP, DENSE), read_sparse_step, write_sparse_step)
SHARED_GATED = (expert_key("shared_expert_intermediate_size", SHARED, 5632), always(moe_shared_expert_gate=True))


# --------------------------------------------------------------------------------------- GLM and its relatives

FIRST, SHARED_COUNT = "first_k_dense_replace", "n_shared_experts"
GROUPS, TAKEN, TOPK = "n_group", "topk_group", "num_experts_per_tok"


def read_first_dense(settings: Settings) -> dict[str, Any]:
    first, num_layers = settings.get(FIRST), int(settings["num_hidden_layers"])
    first = 1 if first is None else first
    return expert_layers([layer >= first for layer in range(num_layers)], f"{FIRST} {first}")


def write_first_dense(layers: Layers) -> dict[str, Any]:
    return {FIRST: [layer.num_experts is not None for layer in layers].index(True)}


def read_shared_width(settings: Settings) -> dict[str, Any]:
    """Read the width of all shared experts together, a multiple of that of one expert."""
    count = settings.get(SHARED_COUNT)
    count = 1 if count is None else count
    if not count >= 1:
        raise ConfigError(f"{SHARED_COUNT} {count} cannot be expressed: shared experts of width 0 hold empty tensors")
    return {SHARED: count * settings[WIDTH]}


def write_shared_width(layers: Layers) -> dict[str, Any]:
    layer = of_expert_layer(layers)
    return {SHARED_COUNT: (layer.moe_shared_expert_intermediate_size or 0) // layer.expert_ffn_size}


def read_groups(settings: Settings) -> dict[str, Any]:
    """Read the groups that a token chooses first. Their score is the sum of the best two experts of each."""
    groups, taken, topk = settings.get(GROUPS) or 1, settings.get(TAKEN) or 1, settings.get(TOPK) or 8
    if groups == 1:
        return {}
    if topk != 2 * taken:
        scores = f"a group's score is the sum of its {TOPK} / {TAKEN} best experts here, and of its best two there"
        raise ConfigError(f"{GROUPS} {groups} with {TOPK} {topk} and {TAKEN} {taken} cannot be expressed: {scores}")
    return {"moe_router_num_groups": groups, "moe_router_group_topk": taken}


def write_groups(layers: Layers) -> dict[str, Any]:
    layer = of_expert_layer(layers)
    return {GROUPS: layer.moe_router_num_groups or 1, TAKEN: layer.moe_router_group_topk or 1}


SCALING = "routed_scaling_factor"
SIGMOID_ROUTER = (
    always(moe_router_score_function="sigmoid", moe_router_enable_expert_bias=True, moe_router_dtype="fp32"),
    fixed(NORMALIZED, True, "sigmoid scores are divided by the sum over the chosen experts here"),
    replace(
        key(SCALING, "moe_router_topk_scaling_factor", 1.0),
        write=lambda layers: {SCALING: of_expert_layer(layers).moe_router_topk_scaling_factor or 1.0},
    ),
    Rule((GROUPS, TAKEN), read_groups, write_groups),
    Rule((SHARED_COUNT,), read_shared_width, write_shared_width),
)
FIRST_DENSE = Rule((FIRST,), read_first_dense, write_first_dense)

# ---------------------------------------------------------------------------------------------------- GPT-OSS

LIMIT = "swiglu_limit"
AGAIN, CONTEXT, LENGTH = "experts_per_token", "initial_context_length", "original_max_position_embeddings"


def read_again(settings: Settings) -> dict[str, Any]:
    """Check keys of the first files that repeat others."""
    scaling = settings.get("rope_parameters") or settings.get("rope_scaling") or GPT_OSS_ROPE
    check_alike({AGAIN: settings.get(AGAIN), TOPK: settings.get(TOPK, 4)})
    check_alike({CONTEXT: settings.get(CONTEXT), LENGTH: scaling.get(LENGTH)})
    return {}


GPT_OSS = (
    always(
        add_bias_linear=True,
        activation="quick_geglu",
        glu_linear_offset=1.0,
        softmax_type="learnable",
        moe_router_score_function="softmax",
    ),
    key(LIMIT, "activation_func_clamp_value", 7.0),
    fixed("swiglu_alpha", 1.702, "it is the factor of quick GELU here"),
    fixed("attention_bias", True, "experts and routers have biases, and here all linears have them or none"),
    Rule((AGAIN, CONTEXT), read_again, lambda layers: {}),
    unwritten(
        fixed("quantization_config", None, "weights are quantized; save them in bf16 with transformers (dequantize)")
    ),
)
GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    LENGTH: 4096,
}
