"""The comparison of two models: the options in which they compute different functions, layer by layer. Imports no
torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

from megapipe.config.changes import FUNCTION, classes
from megapipe.config.config import fields_by_key
from megapipe.config.fields import value_text
from megapipe.config.layers import ROTARY_OPTIONS, LayerConfig, layer_configs, layers_text
from megapipe.config.model import ModelConfig

OF_EACH_LAYER = (
    "layer_pattern",
    "window_attn_skip_freq",
    "no_rope_freq",
    "moe_layer_freq",
)  # compared as what each layer has
LATENT_OPTIONS = (
    "q_lora_rank",
    "kv_lora_rank",
    "qk_head_dim",
    "qk_pos_emb_head_dim",
    "v_head_dim",
    "latent_norm_epsilon",
)
ATTENTION_OPTIONS = (
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "window_size",
    "qk_layernorm",
    "qk_layernorm_scope",
    "attn_logit_softcapping",
    "attention_kind",
    "softmax_type",
    "softmax_scale",
    "add_qkv_bias",
    "multi_latent_attention",
    *LATENT_OPTIONS,
    *ROTARY_OPTIONS,
)
# --rope-scaling-type -> beginnings of the names of the rotary options that are used
ROTARY_USES = {
    "none": ("rotary_", "rope_scaling_type"),
    "linear": ("rotary_", "rope_scaling_"),
    "llama3": ("rotary_", "rope_"),
    "yarn": ("rotary_", "rope_scaling_", "rope_original_", "yarn_"),
}


def differences(saved: ModelConfig, own: ModelConfig) -> Iterator[str]:
    """Yield a line with both values for every option in which two models compute different functions."""
    if saved.num_layers != own.num_layers:
        yield change_text(_flag("num_layers"), saved.num_layers, own.num_layers)
    longest = max(saved.seq_length, own.seq_length)
    found: dict[tuple[str, Any, Any], list[int]] = {}
    layers = list(zip(layer_configs(_sized(saved)), layer_configs(_sized(own)), strict=False))
    for number, (before, now) in enumerate(layers):
        if before == now:
            continue
        there, here = _function_of(before, longest), _function_of(now, longest)
        for name in there:  # one that only one of them uses follows from another that differs
            if name in here and there[name] != here[name]:
                found.setdefault((name, there[name], here[name]), []).append(number)
    for (name, value, other), numbers in found.items():
        where = "" if len(numbers) == len(layers) else f" ({layers_text(numbers)})"
        yield change_text(_flag(name), value, other) + where


def change_text(flag: str, saved: Any, own: Any) -> str:
    """Return the line for a setting that has changed since a checkpoint."""
    there, here = (value if isinstance(value, str) else value_text(value) for value in (saved, own))
    return f"{flag}: {there} in the checkpoint, {here} here"


def _flag(name: str) -> str:
    field = fields_by_key().get(f"model.{name}")
    return f"--layer-pattern {name.removeprefix('has_')}" if field is None else field.main_flag


def _sized(model: ModelConfig) -> ModelConfig:
    """Fill in the sizes that `plan.resolve` derives from others."""
    of_experts = model.moe_ffn_hidden_size
    return replace(
        model,
        moe_ffn_hidden_size=model.feed_forward_size() if of_experts is None and model.num_experts else of_experts,
        ffn_hidden_size=model.feed_forward_size(),
        num_query_groups=model.query_groups(),
        kv_channels=model.head_size(),
        softmax_scale=model.attention_scale(),
        latent_norm_epsilon=model.latent_epsilon(),
    )


def _function_of(layer: LayerConfig, longest: int) -> dict[str, Any]:
    """Return the options that have an effect on what a layer, and the model around it, compute for sequences up to
    `longest` tokens."""
    unused = {key.removeprefix("model.") for key, kind in classes().items() if kind != FUNCTION}
    unused |= {*OF_EACH_LAYER, "num_layers"}
    if not layer.has_attention:
        unused |= {*ATTENTION_OPTIONS}
    if not layer.has_mlp:
        unused |= {"ffn_hidden_size", "activation"}
    uses = ROTARY_USES[layer.rope_scaling_type] if layer.position_embedding_type == "rope" else ()
    unused |= {name for name in ROTARY_OPTIONS if not name.startswith(uses)}
    if not layer.qk_layernorm:
        unused |= {"qk_layernorm_scope", "latent_norm_epsilon"}
    if not layer.multi_latent_attention:
        unused |= {*LATENT_OPTIONS}
    if layer.add_bias_linear:
        unused.add("add_qkv_bias")
    if layer.window_size is not None and layer.window_size >= longest:
        layer = replace(layer, window_size=None)
    return {one.name: getattr(layer, one.name) for one in fields(layer) if one.name not in unused}
