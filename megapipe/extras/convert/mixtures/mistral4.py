"""Mistral-4, text (Mistral4ForCausalLM): latent attention and experts of DeepSeek with softmax scores, and queries that
grow with their position (--yarn-query-scale).
"""

from __future__ import annotations

from typing import Any

from megapipe.errors import ConfigError
from megapipe.extras.convert import experts
from megapipe.extras.convert.family import deepseek_family
from megapipe.extras.convert.layer_types import LENGTH, PARAMETERS, PARTIAL, SCALING, THETA, rope_fields, rope_scaling
from megapipe.extras.convert.tables import Layers, Rule, Settings, always, check_alike, fixed, unwritten

BETA, LONGEST = "llama_4_scaling_beta", "max_position_embeddings"
ROTATED, PLAIN = experts.ROTATED, experts.PLAIN
DEFAULT = {"type": "yarn", THETA: 1e4, "factor": 128.0, LENGTH: 8192, "mscale": 1.0, "mscale_all_dim": 1.0, BETA: 0.1}


def read_rope(settings: Settings) -> dict[str, Any]:
    """Read rotary positions, with the factor on queries among them. The rotated part of a head has keys of its own."""
    given = dict(settings.get(PARAMETERS) or settings.get(SCALING) or DEFAULT)
    rotated, plain = settings.get(ROTATED, 64), settings.get(PLAIN, 64)
    check_alike({PARTIAL: given.pop(PARTIAL, None), f"{ROTATED} / (that + {PLAIN})": rotated / (rotated + plain)})
    check_alike({LONGEST: settings.get(LONGEST), f"{LONGEST} of {PARAMETERS}": given.pop(LONGEST, None)})
    beta = given.pop(BETA, None)
    if beta is None:
        raise ConfigError(f"the key {BETA} of {PARAMETERS} is missing")
    fields = rope_fields(given, settings.get(THETA) or 1e4, {LONGEST: settings.get(LONGEST)})
    if fields["rope_scaling_type"] != "yarn" and beta:
        raise ConfigError(f"{BETA} {beta} cannot be expressed: only YaRN has the length that positions are divided by")
    return fields | {"yarn_query_scale": float(beta)}


def write_rope(layers: Layers) -> dict[str, Any]:
    layer = layers[0]
    scaling = rope_scaling(layer) or {"rope_type": "default", LENGTH: layer.max_position_embeddings}
    more = {THETA: layer.rotary_base, BETA: layer.yarn_query_scale, LONGEST: layer.max_position_embeddings}
    return {PARAMETERS: scaling | more}


FAMILY = deepseek_family(
    "Mistral4ForCausalLM",
    (
        *experts.LATENT_ATTENTION,
        *experts.latent_sizes(1024, 64, 128, 1e-6, latent=256, head=lambda rotated, plain: rotated + plain),
        *experts.deepseek_experts(128, 4, 2048),
        experts.scaling(),
        experts.dense_layers(0),
        experts.MAYBE_NORMALIZED,
        fixed(experts.GROUPS, 1, "groups are scored by shares of a softmax there, here by logits"),
        fixed(experts.TAKEN, 1, "there is one group of experts"),
        unwritten(fixed("scoring_func", "softmax", "scores of this architecture are a softmax")),
        always(moe_router_score_function="softmax"),
    ),
    rope=Rule((THETA, SCALING, PARAMETERS), read_rope, write_rope),
    expert_rows=experts.STACKED_ROWS,
)
