"""Llama-4, text (Llama4ForCausalLM): chunked attention with norms without weights in layers with rotary positions, and
queries that grow with their position in the others; the scores of experts multiply their inputs.
"""

from __future__ import annotations

from typing import Any

from megapipe.errors import ConfigError
from megapipe.extras.convert import experts, tables
from megapipe.extras.convert.family import llama_relative
from megapipe.extras.convert.layer_types import (
    FULL,
    INTERVAL,
    ROPE,
    ROTATED,
    SLIDING,
    TYPES,
    at_distance,
    by_type,
    rope,
    rotated_layers,
    write_rotated,
)
from megapipe.extras.convert.tables import Layers, Rule, Settings, always, fixed, key, unwritten

CHUNK, NORMS = "attention_chunk_size", "use_qk_norm"
GROWS, STEP, SCALE = "attn_temperature_tuning", "floor_scale", "attn_scale"
MIXED, MIXED_STEP = "moe_layers", "interleave_moe_layer_step"
POSITIONS = rope(5e5)


def layer_types(rotated: list[bool]) -> list[str]:
    """Return the types of layers with and without rotary positions."""
    return ["chunked_attention" if each else FULL for each in rotated]


def read_layers(settings: Settings) -> dict[str, Any]:
    """Read positions, chunks, norms of q and k, and the growth of queries."""
    count, rotated = int(settings["num_hidden_layers"]), rotated_layers(settings)
    if len(rotated) != count or settings.get(TYPES) not in (None, layer_types(rotated)):
        rule = f"each of the {count} layers has rotary positions and chunks, or neither"
        raise ConfigError(f"{ROTATED} and {TYPES} cannot be expressed: {rule}")
    whole = {"window_size": None, "attention_kind": "softmax", "position_embedding_type": "none", "qk_l2_norm": False}
    local = {"window_size": settings.get(CHUNK, 8192), "attention_kind": "chunked", "position_embedding_type": "rope"}
    local |= {"qk_l2_norm": settings.get(NORMS, True)}
    fields = by_type([SLIDING if each else FULL for each in rotated], {FULL: whole, SLIDING: local})
    if settings.get(GROWS, True) and not all(rotated):
        fields |= {"nope_query_scale": settings.get(SCALE, 0.1), "nope_query_scale_length": settings.get(STEP, 8192)}
    return POSITIONS.read(settings) | fields


def write_layers(layers: Layers) -> dict[str, Any]:
    rotated = [layer.position_embedding_type == "rope" for layer in layers]
    local = layers[rotated.index(True) if any(rotated) else 0]
    keys = {TYPES: layer_types(rotated), CHUNK: local.window_size, NORMS: local.qk_l2_norm}
    scale = {SCALE: local.nope_query_scale, STEP: local.nope_query_scale_length} if local.nope_query_scale else {}
    return POSITIONS.write((local,)) | write_rotated(layers) | keys | {GROWS: bool(scale)} | scale


def read_mixed(settings: Settings) -> dict[str, Any]:
    """Read the layers with experts: those of a list, or every so many."""
    step, count, mixed = settings.get(MIXED_STEP, 1), int(settings["num_hidden_layers"]), settings.get(MIXED)
    marks = [(layer + 1) % step == 0 if mixed is None else layer in mixed for layer in range(count)]
    return experts.expert_layers(marks, f"{MIXED} and {MIXED_STEP}")


def write_mixed(layers: Layers) -> dict[str, Any]:
    marks = [layer.num_experts is not None for layer in layers]
    return {MIXED: [number for number, mark in enumerate(marks) if mark]} | at_distance(MIXED_STEP, marks)


FAMILY = llama_relative(
    "Llama4ForCausalLM",
    unwritten(fixed("router_jitter_noise", 0.0, "routers add no noise here")),
    always(moe_router_score_function="sigmoid", moe_router_norm_topk_prob=False, moe_apply_probs_on_input=True),
    Rule((MIXED, MIXED_STEP), read_mixed, write_mixed),
    Rule((), lambda settings: {experts.SHARED: settings[experts.DENSE_WIDTH]}, lambda layers: {}),
    rope=Rule((*ROPE.keys, ROTATED, INTERVAL, TYPES, CHUNK, NORMS, GROWS, STEP, SCALE), read_layers, write_layers),
    mlp=(
        *experts.count_and_choice(("num_local_experts",), 1),
        key("intermediate_size_mlp", "ffn_hidden_size", 16384, value_of=experts.dense_width),
        experts.expert_width(experts.DENSE_WIDTH, "moe_ffn_hidden_size"),
    ),
    more_rows=(
        *experts.expert_rows("feed_forward", router="router", shared="shared_expert"),
        *tables.rows_of("llama4"),
    ),
    qkv=tables.separate_qkv_of_pairs,
)
