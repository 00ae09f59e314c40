"""GLM-4.7-Flash (Glm4MoeLiteForCausalLM): latent attention of DeepSeek-V3, experts of GLM-4.5."""

from __future__ import annotations

from typing import Any

from megapipe.errors import ConfigError
from megapipe.extras.convert import experts
from megapipe.extras.convert.family import deepseek_family
from megapipe.extras.convert.tables import Layers, Rule, Settings

TYPES = "mlp_layer_types"
WORDS = {"dense": False, "sparse": True}


def read_types(settings: Settings) -> dict[str, Any]:
    """Read the layers with experts: all but the first, if nothing else is said."""
    count, first = int(settings["num_hidden_layers"]), settings.get(experts.FIRST)
    dense = 1 if first is None else first
    types = settings.get(TYPES) or ["dense"] * dense + ["sparse"] * (count - dense)
    if unknown := sorted(set(types) - WORDS.keys()):
        raise ConfigError(f"{TYPES} {unknown[0]!r} cannot be expressed; it can be {', '.join(WORDS)}")
    if len(types) != count:
        raise ConfigError(f"{TYPES} has {len(types)} entries, num_hidden_layers is {count}")
    marks = [WORDS[kind] for kind in types]
    if first is not None and marks != [layer >= first for layer in range(count)]:
        raise ConfigError(f"{TYPES} and {experts.FIRST} {first} contradict each other; correct the file")
    return experts.expert_layers(marks, TYPES)


def write_types(layers: Layers) -> dict[str, Any]:
    return {TYPES: ["dense" if layer.num_experts is None else "sparse" for layer in layers]}


def write_prediction(layers: Layers) -> dict[str, Any]:
    return experts.PREDICTION.write(layers) if layers[0].mtp_num_layers else {}


FAMILY = deepseek_family(
    "Glm4MoeLiteForCausalLM",
    "glm4_moe_lite",
    202752,
    (
        *experts.LATENT_ATTENTION,
        *experts.latent_sizes(768, 192, 256, 1e-5),
        experts.expert_key(experts.COUNT, "num_experts", 64),
        experts.scaling(1.8),
        experts.expert_width(experts.WIDTH, "moe_ffn_hidden_size", 1536),
        experts.shared_experts(1, 1536),
        experts.expert_key(experts.TOPK, "moe_router_topk", 4),
        experts.groups(1, 1),
        experts.normalized(True),
        Rule((TYPES, experts.FIRST), read_types, write_types),
        *experts.OF_SIGMOIDS,
        Rule(experts.PREDICTION.keys, experts.PREDICTION.read, write_prediction),
        experts.SIGMOID,
    ),
)
