"""Ernie-4.5: with experts (Ernie4_5_MoeForCausalLM), a softmax with biases in their choice; and dense
(Ernie4_5ForCausalLM). Rotary pairs are neighbouring channels.
"""

from __future__ import annotations

from typing import Any

from megapipe.errors import ConfigError
from megapipe.extras.convert import experts
from megapipe.extras.convert.family import ATTENTION_DROPOUT, llama_relative
from megapipe.extras.convert.tables import (
    Layers,
    Rule,
    Settings,
    always,
    fixed,
    key,
    rows_of,
    separate_qkv_of_pairs,
    unwritten,
)

FIRST, LAST, STEP = "moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval"


def read_layers(settings: Settings) -> dict[str, Any]:
    """Read the layers with experts: every so many, from a first to a last one."""
    given = {FIRST: 1, LAST: -1, STEP: 1} | {name: settings[name] for name in (FIRST, LAST, STEP) if name in settings}
    count = int(settings["num_hidden_layers"])
    last = count - 1 if given[LAST] == -1 else given[LAST]
    if not given[STEP] > 0:
        raise ConfigError(f"{STEP} {given[STEP]} cannot be expressed: it is the distance of layers with experts")
    marks = [(layer + 1) % given[STEP] == 0 and given[FIRST] <= layer <= last for layer in range(count)]
    return experts.expert_layers(marks, f"{FIRST} {given[FIRST]}, {LAST} {given[LAST]} and {STEP} {given[STEP]}")


def write_layers(layers: Layers) -> dict[str, Any]:
    numbers = [number for number, layer in enumerate(layers) if layer.num_experts is not None]
    if not numbers:
        raise ConfigError("the model has no experts")
    step = numbers[1] - numbers[0] if len(numbers) > 1 else 1
    return {FIRST: numbers[0], LAST: numbers[-1], STEP: step if (numbers[0] + 1) % step == 0 else 1}


NO_DROPOUT = unwritten(ATTENTION_DROPOUT)  # a key that this architecture does not have
FAMILY = llama_relative(
    "Ernie4_5_MoeForCausalLM",
    fixed("use_bias", False, "the output layer has no bias here"),
    fixed("moe_norm_min", 1e-12, "the sum of the chosen scores has no lower bound here"),
    unwritten(fixed("moe_use_aux_free", True, "experts of this architecture are chosen with a bias")),
    unwritten(fixed("moe_gate", "topk", "the router of this architecture is a softmax of one product")),
    always(moe_router_score_function="softmax", moe_router_enable_expert_bias=True, moe_router_dtype="fp32"),
    experts.shared_experts(2, name="moe_num_shared_experts", least=0),
    Rule((FIRST, LAST, STEP), read_layers, write_layers),
    mlp=(
        experts.expert_key(("moe_num_experts", "num_experts"), "num_experts", 64),
        experts.expert_key(("moe_k", experts.TOPK), "moe_router_topk", 6),
        key("intermediate_size", "ffn_hidden_size", value_of=experts.dense_width),
        experts.EXPERT_WIDTH,
    ),
    attention_dropout=NO_DROPOUT,
    qkv=separate_qkv_of_pairs,
    more_rows=(*experts.GLM_ROWS, *rows_of("ernie4_5_moe")),
)
DENSE = llama_relative(
    "Ernie4_5ForCausalLM",
    key("use_bias", "add_bias_linear", False),
    attention_dropout=NO_DROPOUT,
    qkv=separate_qkv_of_pairs,
)
