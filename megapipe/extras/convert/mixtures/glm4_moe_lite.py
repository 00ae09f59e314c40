"""GLM-4.7-Flash (Glm4MoeLiteForCausalLM): latent attention of DeepSeek-V3, experts of GLM-4.5."""

from __future__ import annotations

from dataclasses import replace

from megapipe.extras.convert import experts
from megapipe.extras.convert.family import deepseek_family

PREDICTION = experts.PREDICTION

FAMILY = deepseek_family(
    "Glm4MoeLiteForCausalLM",
    (
        *experts.LATENT_ATTENTION,
        *experts.latent_sizes(768, 192, 256, 1e-5),
        *experts.deepseek_experts(64, 4, 1536),
        experts.scaling(1.8),
        experts.groups(1, 1),
        experts.normalized(True),
        experts.mlp_types(1),
        *experts.OF_SIGMOIDS,
        replace(PREDICTION, write=lambda layers: PREDICTION.write(layers) if layers[0].mtp_num_layers else {}),
        experts.SIGMOID,
    ),
)
