"""Does a run's model compute the function of the checkpoint that it loads? Compares the model section of the
configuration saved with the checkpoint with the run's, layer by layer. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Any

from megapipe.checkpoint.folder import CONFIG_NAME, CheckpointFolder, missing_extensions, read_listed, vocabulary_of
from megapipe.config.config import fields_by_key, make_config
from megapipe.config.fields import value_text
from megapipe.config.layers import ROTARY_OPTIONS, LayerConfig, layer_configs, layers_text
from megapipe.config.load import settings_of_entry
from megapipe.config.model import ModelConfig
from megapipe.config.problems import Problems
from megapipe.config.yaml_file import read_entries
from megapipe.errors import CheckpointError, ConfigError

# they change training, not the function: a difference is a remark
DROPOUTS = ("hidden_dropout", "attention_dropout")
NOT_COMPARED = (
    *DROPOUTS,
    "init_method_std",
    "attention_softmax_in_fp32",  # rounding
    "padded_vocab_size",  # padding is masked out of the softmax
    "make_vocab_size_divisible_by",
    "seq_length",  # positions of a longer sequence are computed alike; a table of positions has its own shape
    "max_position_embeddings",
    "mtp_loss_scaling_factor",  # this and the next three are of losses of training
    "moe_router_load_balancing_type",
    "moe_aux_loss_coeff",
    "moe_z_loss_coeff",
    "moe_router_dtype",  # rounding
    "moe_router_bias_update_rate",
    "moe_pad_expert_input_to_capacity",
    "moe_token_dispatcher_type",  # rounding
)
OF_EACH_LAYER = (
    "layer_pattern",
    "window_attn_skip_freq",
    "no_rope_freq",
    "moe_layer_freq",
)  # compared as what each layer has
LATENT_SIZES = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
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
    *LATENT_SIZES,
    *ROTARY_OPTIONS,
)
# --rope-scaling-type -> beginnings of the names of the rotary options that are used
ROTARY_USES = {
    "none": ("rotary_", "rope_scaling_type"),
    "linear": ("rotary_", "rope_scaling_"),
    "llama3": ("rotary_", "rope_"),
    "yarn": ("rotary_", "rope_scaling_", "rope_original_", "yarn_"),
}


@dataclass(frozen=True)
class Comparison:
    """Lines for the user. changed: options that change the function, with both values."""

    changed: tuple[str, ...]
    remarks: tuple[str, ...]


def compare_model(folder: CheckpointFolder, own: ModelConfig) -> Comparison:
    """Compare a checkpoint's model with a run's. Raises CheckpointError if the former cannot be read."""
    saved, unknown = saved_model(folder)
    names = {option.name for option in fields(ModelConfig)}
    remarks = []
    if unknown & names:  # the file was written before these options existed
        saved = replace(saved, **{name: getattr(own, name) for name in unknown & names})
    skipped = ", ".join(sorted(unknown - set(NOT_COMPARED)))
    if skipped:
        remarks.append(f"{folder.path} was written by another version, so these were not compared: model {skipped}")
    for name in DROPOUTS:
        if getattr(saved, name) != getattr(own, name):
            values = f"{getattr(saved, name)} in {folder.path}, {getattr(own, name)} from here on"
            remarks.append(f"{_flag(name)}: {values}")
    return Comparison(tuple(differences(saved, own)), tuple(remarks))


def saved_model(folder: CheckpointFolder) -> tuple[ModelConfig, set[str]]:
    """Return the model of a checkpoint, and the options that only its file or only this version knows."""
    text, known = read_listed(folder, CONFIG_NAME), {option.name for option in fields(ModelConfig)}
    problems = Problems()
    try:
        found = read_entries(text, str(folder.path / CONFIG_NAME), problems)
        problems.raise_all()
        entries = [one for one in found if one.section == "model"]
        settings = [one for entry in entries if entry.key in known for one in settings_of_entry(entry, [])]
    except ConfigError as error:
        raise CheckpointError(f"the model cannot be compared: {error}{missing_extensions(folder)}") from None
    named = {entry.key for entry in entries}
    model = make_config({setting.field.key: setting.value for setting in settings}).model
    return replace(model, vocab_size=vocabulary_of(folder)), named ^ known


def differences(saved: ModelConfig, own: ModelConfig) -> Iterator[str]:
    """Yield a line with both values for every option in which two models compute different functions."""
    if saved.num_layers != own.num_layers:
        yield _line("num_layers", saved.num_layers, own.num_layers)
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
        yield _line(name, value, other) + where


def _line(name: str, saved: Any, own: Any) -> str:
    there, here = (value if isinstance(value, str) else value_text(value) for value in (saved, own))
    return f"{_flag(name)}: {there} in the checkpoint, {here} here"


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
    )


def _function_of(layer: LayerConfig, longest: int) -> dict[str, Any]:
    """Return the options that have an effect on what a layer, and the model around it, compute for sequences up to
    `longest` tokens."""
    unused = {*NOT_COMPARED, *OF_EACH_LAYER, "num_layers"}
    if not layer.has_attention:
        unused |= {*ATTENTION_OPTIONS}
    if not layer.has_mlp:
        unused |= {"ffn_hidden_size", "activation"}
    uses = ROTARY_USES[layer.rope_scaling_type] if layer.position_embedding_type == "rope" else ()
    unused |= {name for name in ROTARY_OPTIONS if not name.startswith(uses)}
    if not layer.qk_layernorm:
        unused.add("qk_layernorm_scope")
    if not layer.multi_latent_attention:
        unused |= {*LATENT_SIZES}
    if layer.add_bias_linear:
        unused.add("add_qkv_bias")
    if layer.window_size is not None and layer.window_size >= longest:
        layer = replace(layer, window_size=None)
    return {one.name: getattr(layer, one.name) for one in fields(layer) if one.name not in unused}
