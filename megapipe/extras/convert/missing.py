"""Features of Hugging Face's architectures that megapipe lacks, found in a configuration, for the message of a refusal.

Most features are stated by keys of config.json. Those that no key states are listed by model type.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

Settings = Mapping[str, Any]

# feature -> keys, or beginnings of keys that end in *, that state it where they have a value
BY_KEYS: dict[str, tuple[str, ...]] = {
    "images, sound or video": (
        *"vision_config audio_config thinker_config talker_config backbone_config patch_size image_size".split(),
    ),
    "an encoder": ("is_encoder_decoder", "encoder_layers"),
    "state-space layers (Mamba)": ("mamba_*", "ssm_*"),
    "linear attention": ("linear_num_*", "linear_attn_*"),
    "short convolutions": ("conv_L_cache", "conv_kernel_size", "cca_time0"),
    "attention to the tokens that an indexer chooses": ("index_topk", "index_n_heads"),
    "several residual streams (hyper-connections)": ("hc_mult", "hc_count"),
    "experts without weights": ("zero_expert_num",),
    "experts on a narrower hidden state": ("moe_latent_size",),
    "embeddings for each layer": ("hidden_size_per_layer_input", "ple_embed_dim"),
    "other numbers of heads in some layers": (
        *"num_attention_heads_per_layer num_sliding_attention_heads swa_num_attention_heads".split(),
    ),
    "factors on embeddings, residual branches, values or logits": (
        *"embedding_multiplier residual_multiplier attention_multiplier logits_scaling logit_scale".split(),
        *"output_multiplier attention_value_scale qk_scale_factor".split(),
    ),
    "attention whose output is gated": ("gating",),
    "queries scaled by their position": ("attn_temperature_tuning",),
    "rotary positions in sections (mrope)": ("mrope_section",),
}
LAYER_TYPES = ("full_attention", "sliding_attention")  # the known ones
TEXT_PART = "the text part of a model with images, sound or video, which is saved inside it"
NO_TABLE = "a conversion table, which docs/conversion_family.md shows how to write: here it would be for "
# model type -> what is missing, where no key states it
BY_MODEL_TYPE = {
    "afmoe": "attention whose output is gated",
    "aria_text": TEXT_PART,
    "axk1": "a norm of the outputs of layers with experts alone",
    "beam": "attention whose output is gated, and residual branches scaled by their depth",
    "dbrx": "LayerNorms without biases",
    "deepseek_ocr2_text": TEXT_PART,
    "diffusion_gemma_text": "attention to later tokens (a diffusion model)",
    "doge": "attention masks that are computed from the values",
    "dots1": f"{NO_TABLE}Qwen3's attention with DeepSeek-V3's experts",
    "ernie4_5_moe": "softmax scores with a bias in the choice of experts",
    "ernie4_5_vl_moe_text": "softmax scores with a bias in the choice of experts",
    "exaone_moe": f"{NO_TABLE}rotary positions in layers with a window alone, with DeepSeek-V3's experts",
    "flint": f"{NO_TABLE}attention sinks with normalized queries and keys, and sigmoid scores without biases",
    "glm4_moe_lite": f"{NO_TABLE}DeepSeek-V3's latent attention with GLM's experts",
    "glm4v_moe_text": TEXT_PART,
    "hunyuan_v1_moe": "norms of queries and keys after their rotation",
    "hy_v3": f"{NO_TABLE}normalized queries and keys with sigmoid scores and shared experts",
    "jetmoe": "experts in attention",
    "kolibri1": "a choice of experts by logits with a bias, where here the bias is added to scores",
    "mellum": f"{NO_TABLE}Qwen3's experts with windows and rotary positions by layer",
    "minimax_m2": f"{NO_TABLE}queries and keys normalized over all heads, with sigmoid scores and biases",
    "mistral4": "queries scaled by their position",
    "openai_privacy_filter": "attention to later tokens",
    "phimoe": "weights of experts by SparseMixer",
    "qwen3_omni_moe_talker_text": TEXT_PART,
    "qwen3_omni_moe_text": TEXT_PART,
    "qwen3_vl_moe_text": TEXT_PART,
}


def missing_features(config: Settings) -> tuple[str, ...]:
    """Return what an architecture without a table has that megapipe lacks; nothing if that is unknown."""
    parts = [part for part in (config, config.get("text_config")) if isinstance(part, Mapping)]
    found = [feature for part in parts for feature in (*_by_keys(part), *_by_layers(part))]
    named = (BY_MODEL_TYPE.get(str(part.get("model_type"))) for part in parts)
    return tuple(dict.fromkeys((*found, *(feature for feature in named if feature is not None))))


def _by_keys(config: Settings) -> Iterator[str]:
    stated = {name for name, value in config.items() if value not in (None, False, 0, [], {})}
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    stated |= rope.keys() if isinstance(rope, Mapping) else set()
    for feature, keys in BY_KEYS.items():
        if any(name.startswith(key[:-1]) if key.endswith("*") else name == key for key in keys for name in stated):
            yield feature


def _by_layers(config: Settings) -> Iterator[str]:
    """Yield the types of layers that have no counterpart here."""
    for key in ("layer_types", "layers_block_type"):
        kinds = config.get(key)
        unknown = sorted(set(map(str, kinds)) - {*LAYER_TYPES, "moe", "mlp"}) if isinstance(kinds, list) else []
        if unknown:
            yield f"layers of the type {', '.join(unknown)}"
