"""MiniMax-M2 (MiniMaxM2ForCausalLM): queries and keys are normalized over all heads and rotated in part; sigmoid scores
with biases, no shared experts.
"""

from __future__ import annotations

from typing import Any

from megapipe.errors import ConfigError
from megapipe.extras.convert import experts
from megapipe.extras.convert.family import llama_relative
from megapipe.extras.convert.layer_types import PARTIAL, rope
from megapipe.extras.convert.tables import Layers, Rule, Settings, check_alike, fixed, unwritten

ROTATED = "rotary_dim"  # of a head, in the published files in place of partial_rotary_factor
ROPE = rope(5e6, 1.0)


def read_rope(settings: Settings) -> dict[str, Any]:
    """Read rotary positions, whose part of a head may be stated by its channels."""
    if settings.get(ROTATED) is None:
        return ROPE.read(settings)
    part = settings[ROTATED] / settings.get("head_dim", 128)
    check_alike({ROTATED: part, PARTIAL: settings.get(PARTIAL)})
    return ROPE.read({**settings, PARTIAL: part})


def write_rope(layers: Layers) -> dict[str, Any]:
    return {name: value for name, value in ROPE.write(layers).items() if (name, value) != (PARTIAL, 1.0)}


def read_attention_types(settings: Settings) -> dict[str, Any]:
    """Check that all layers have softmax attention, 1 in attn_type_list."""
    types = settings.get("attn_type_list") or ()
    if any(kind != 1 for kind in types):
        raise ConfigError("attn_type_list: layers of another type than 1 (softmax attention) cannot be expressed")
    return {}


FAMILY = llama_relative(
    "MiniMaxM2ForCausalLM",
    experts.SIGMOID,
    fixed("router_jitter_noise", 0.0, "the router sees its input without noise here"),
    unwritten(fixed("use_qk_norm", True, "this architecture normalizes queries and keys")),
    unwritten(fixed("qk_norm_type", "per_layer", "queries and keys are normalized over all heads")),
    unwritten(fixed("use_routing_bias", True, "experts of this architecture are chosen with a bias")),
    unwritten(fixed("scoring_func", "sigmoid", "scores of this architecture are sigmoids")),
    unwritten(fixed("shared_intermediate_size", 0, "this architecture has no shared experts")),
    Rule(("attn_type_list",), read_attention_types, lambda layers: {}),
    # without effect in transformers: of layers and modules that the files do not have, and of 8-bit weights
    Rule(
        (
            *("mlp_intermediate_size", "shared_moe_mode", "use_mtp", "num_mtp_modules", "mtp_transformer_layers"),
            *("layernorm_full_attention_beta", "layernorm_linear_attention_beta", "layernorm_mlp_beta"),
            experts.QUANTIZATION,
        ),
        lambda settings: {},
        lambda layers: {},
    ),
    rope=Rule((*ROPE.keys, ROTATED), read_rope, write_rope),
    mlp=experts.all_layers(("num_local_experts", "num_experts"), 8),
    more_rows=experts.expert_rows("block_sparse_moe", experts.MIXTRAL_MLP, bias=experts.BIAS),
)
