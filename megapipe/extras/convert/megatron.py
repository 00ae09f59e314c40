"""Common parts of Megatron's two checkpoint formats: folders, parameter names, args <-> our configuration."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megapipe.config.config import Config
from megapipe.config.layer_pattern import block_words
from megapipe.config.layers import LayerConfig
from megapipe.config.model import ModelConfig, PrecisionConfig
from megapipe.config.rules.check import check
from megapipe.config.training import OptimizerConfig, TrainingConfig
from megapipe.data.dataset import SkippedSamples
from megapipe.errors import CheckpointError, ConfigError
from megapipe.extras.convert.deepseek import neighbours
from megapipe.extras.convert.layer_types import regular_period
from megapipe.extras.convert.megatron_experts import EXPERT_RULE
from megapipe.extras.convert.snapshot import LazyTensor, Snapshot, fresh_state
from megapipe.extras.convert.tables import (
    Layers,
    Layout,
    Rule,
    Settings,
    check_expressed,
    fixed,
    key,
    read_fields,
    unpadded,
    write_keys,
)
from megapipe.sharding.boxes import pieces
from megapipe.sharding.spec import Fused, ParamSpec

TRACKER, COMMON = "latest_checkpointed_iteration.txt", "common.pt"
MOMENTS = "exp_avg", "exp_avg_sq"
HEAD = "output_layer.weight"
EXTRA_STATE = "_extra_state"  # Transformer Engine's fp8 scales, empty without fp8
# Transformer Engine stores a norm's weights in the linear layer that follows it
INPUT_NORM, MLP_NORM = "input_layernorm.", "pre_mlp_layernorm."
FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_": INPUT_NORM,
    "mlp.linear_fc1.layer_norm_": MLP_NORM,
    "self_attention.linear_q_up_proj.layer_norm_": "self_attention.q_layernorm.",
    "self_attention.linear_kv_up_proj.layer_norm_": "self_attention.kv_layernorm.",
}
SINKS = ("self_attention.core_attention.softmax_offset", "self_attention.softmax_offset")  # Megatron's name, and ours
LATENT_LINEARS = ("linear_q_down_proj.weight", "linear_kv_down_proj.weight")
TRY_WEIGHTS_ONLY = "convert with --weights-only"


@dataclass(frozen=True)
class MegatronGrid:
    """The ranks that a checkpoint is written for. etp: tp unless given."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    experts_tp: int | None = None

    @property
    def etp(self) -> int:
        return self.tp if self.experts_tp is None else self.experts_tp


def iteration_folder(root: Path, step: int | None) -> Path:
    """Return the folder of `step`, else of the iteration in the tracker file, else root. Raises CheckpointError."""
    if step is None and not (root / TRACKER).exists():
        return root
    iteration = (root / TRACKER).read_text().strip() if step is None else step
    folder = root / ("release" if iteration == "release" else f"iter_{int(iteration):07d}")
    if not folder.is_dir():
        raise CheckpointError(f"{root} has no {folder.name}")
    return folder


def renamed(name: str, shift: int = 0) -> str:
    """Return our name of one of Megatron's parameters. shift: added to the number of its layer."""
    name = _shifted(name, shift)
    for theirs, plain in FUSED_NORMS.items():
        name = name.replace(theirs, plain)
    return name.replace(*SINKS)


def their_name(name: str, layer: LayerConfig | None, transformer_engine: bool, is_dist: bool, shift: int = 0) -> str:
    """Return Megatron's name of one of our parameters, by whose layers it has, in `torch` or `torch_dist`.

    layer: the configuration of the parameter's layer; None outside of layers. Megatron's own layers store the norms of
    attention and MLP under Transformer Engine's names in `torch_dist`, unless attention is latent. An own norm is one
    that no linear follows: before a router, and before latent attention.
    """
    name = _shifted(name, shift).replace(*SINKS[::-1])
    if layer is None:
        return name
    is_latent = layer.multi_latent_attention
    likewise = is_dist and not is_latent
    is_fused = {
        INPUT_NORM: not is_latent and (transformer_engine or likewise),
        MLP_NORM: layer.num_experts is None if transformer_engine else likewise,
    }
    for theirs, plain in FUSED_NORMS.items():
        if is_fused.get(plain, is_latent and transformer_engine):
            name = name.replace(plain, theirs)
    return name


def _shifted(name: str, shift: int) -> str:
    return re.sub(r"^decoder\.layers\.(\d+)\.", lambda match: f"decoder.layers.{int(match[1]) + shift}.", name)


def joined(spec: ParamSpec, parts: Sequence[Tensor], num_rows: int) -> Tensor:
    """Return the first `num_rows` rows of a tensor, without vocabulary padding, from the slices of all tp ranks."""
    whole = torch.empty(spec.shape, dtype=parts[0].dtype)
    for tp_rank, part in enumerate(parts):
        for piece in pieces(spec, tp_rank, len(parts)):
            if piece.owned:
                whole[piece.box.slices] = part.flatten()[piece.start : piece.stop].view(piece.box.shape)
    return whole if num_rows == spec.shape[0] else whole[:num_rows].clone()


def in_halves(config: Config, tensors: Mapping[str, LazyTensor]) -> dict[str, LazyTensor]:
    """Return tensors of a model with rotary_interleaved by `key/name`, unread, with channels of its heads reordered.

    A rotary pair is two neighbouring channels there, and channels i and i + n / 2 of n rotated ones here. Queries and
    keys take the same order, so their products stay as they are; elementwise optimizer state moves with its weight.
    """
    size = unpadded(config.model).head_size()
    rotated = int(size * config.model.rotary_percent)
    order = torch.tensor([*range(0, rotated, 2), *range(1, rotated, 2), *range(rotated, size)])

    def of_heads(tensor: LazyTensor) -> Tensor:  # [groups x (queries of a group, key, value) x size, ...]
        groups = unpadded(config.model).query_groups()
        whole = tensor.detach().reshape(groups, -1, size, *tensor.shape[1:])
        return torch.cat([whole[:, :-1, order], whole[:, -1:]], 1).reshape(tensor.shape)

    def of_head(tensor: LazyTensor) -> Tensor:  # [size]
        return tensor.detach()[order]

    found = dict(tensors)
    for name, tensor in tensors.items():
        if ".linear_qkv." in name:
            found[name] = LazyTensor(tensor.shape, tensor.dtype, partial(of_heads, tensor))
        elif ".q_layernorm." in name or ".k_layernorm." in name:
            found[name] = LazyTensor(tensor.shape, tensor.dtype, partial(of_head, tensor))
    return found


def with_neighbours(model: ModelConfig, tensors: Mapping[str, LazyTensor], to_theirs: bool) -> dict[str, LazyTensor]:
    """Return tensors of latent attention by `key/name`, unread, with the rows of rotated channels in the other order.

    Megatron's pairs of channels are neighbours in latent attention, as in DeepSeek's files; ours are two halves.
    """
    queries = neighbours(lambda m: m.num_attention_heads, lambda m: m.qk_head_dim)(model)
    keys = neighbours(lambda m: 1, lambda m: m.kv_lora_rank)(model)
    layouts = {"linear_q_proj": queries, "linear_q_up_proj": queries, "linear_kv_down_proj": keys}

    def moved(layout: Layout, tensor: LazyTensor) -> Tensor:
        whole = tensor.detach()
        return layout.split(whole)[0] if to_theirs else layout.join([whole])

    found = dict(tensors)
    for name, tensor in tensors.items():
        layout = layouts.get(name.split(".")[-2]) if name.endswith(".weight") else None
        if layout is not None:
            found[name] = LazyTensor(tensor.shape, tensor.dtype, partial(moved, layout, tensor))
    return found


def with_cut_latents(spec: ParamSpec) -> ParamSpec:
    """Return a parameter as Megatron's own linears cut it: rows of linears to latents over tp. Others stay."""
    return dataclasses.replace(spec, slicing=Fused(0)) if spec.name.endswith(LATENT_LINEARS) else spec


def layer_order(is_latent: bool, transformer_engine: bool) -> list[str]:
    """Return the modules of a layer in the order in which Megatron creates them.

    Its own norms are modules before the attention or at its end; Transformer Engine's are part of the linear layer that
    follows.
    """
    attention, norms = ["self_attention", "self_attention.linear_proj"], ["q_layernorm", "k_layernorm", "kv_layernorm"]
    order = ["linear_qkv", "linear_q_proj", "linear_q_down_proj", "linear_q_up_proj"]
    order += ["linear_kv_down_proj", "linear_kv_up_proj", *norms]
    if transformer_engine and is_latent:
        order = ["linear_q_proj", "linear_q_down_proj", "q_layernorm", "linear_q_up_proj"]
        order += ["linear_kv_down_proj", "kv_layernorm", "linear_kv_up_proj"]
    before, after = ([], [INPUT_NORM[:-1]]) if transformer_engine and not is_latent else ([INPUT_NORM[:-1]], [])
    shared = "mlp.shared_experts"
    return [
        *before, *attention, *after, *(f"self_attention.{name}" for name in order), MLP_NORM[:-1], "mlp.router",
        "mlp.experts", shared, f"{shared}.linear_fc1", f"{shared}.linear_fc2", "mlp.linear_fc1", "mlp.linear_fc2",
    ]  # fmt: skip


def place_in_layer(order: Sequence[str], spec: ParamSpec) -> int:
    """Return the place of a layer's parameter in Megatron's order. Raises CheckpointError for one without a place."""
    module = spec.name.split(".", 3)[3].rpartition(".")[0]
    if module not in order:
        raise CheckpointError(f"optimizer state of {spec.name} cannot be found by its order; {TRY_WEIGHTS_ONLY}")
    return order.index(module)


def in_order(specs: Iterable[ParamSpec], order: Sequence[str]) -> list[ParamSpec]:
    """Return parameters in the order in which Megatron creates them. order: of the modules of a layer."""
    kinds = {"embedding": -1, "head": sys.maxsize}
    return sorted(
        specs,
        key=lambda s: (s.owner, place_in_layer(order, s)) if isinstance(s.owner, int) else (kinds[s.owner], 0),
    )


# args that change what the model computes and that megapipe lacks, with the value that has no effect
UNSUPPORTED: dict[str, Any] = {
    "apply_residual_connection_post_layernorm": False,
    "mtp_num_layers": None,
    "qk_l2_norm": False,
    "attention_output_gate": False,
    "hybrid_override_pattern": None,
    "hybrid_layer_pattern": None,
    "experimental_attention_variant": None,
    "apply_query_key_layer_scaling": False,
    "normalize_attention_scores": True,
    "use_legacy_models": False,
    "moe_input_jitter_eps": None,
    "moe_apply_probs_on_input": False,
    "moe_latent_size": None,
    "linear_attention_freq": None,
    "use_mup": False,
}
ACTIVATIONS = {
    "swiglu": "swiglu",
    "quick_geglu": "quick_geglu",
    "squared_relu": "squared_relu",
    "openai_gelu": "gelu_tanh",
    "bias_gelu_fusion": "gelu_tanh",  # otherwise GELU is exact
}
INTERLEAVED = "rotary_interleaved"
LINEAR, LLAMA3, FACTOR = "rotary_seq_len_interpolation_factor", "use_rope_scaling", "rope_scaling_factor"


def write_query_groups(layers: Layers) -> dict[str, Any]:
    groups, heads = layers[0].num_query_groups, layers[0].num_attention_heads
    return {"group_query_attention": groups != heads, "num_query_groups": groups if groups != heads else 1}


# our field -> the arg of YaRN with latent attention, without it, and both defaults
YARN: dict[str, tuple[str | None, str, Any, Any]] = {
    "rope_scaling_factor": ("rotary_scaling_factor", "rotary_scaling_factor", 40.0, 1.0),
    "rope_original_max_position_embeddings": (
        "original_max_position_embeddings", "yarn_original_max_position_embeddings", 4096, 4096
    ),
    "yarn_beta_fast": ("beta_fast", "yarn_beta_fast", 32.0, 32.0),
    "yarn_beta_slow": ("beta_slow", "yarn_beta_slow", 1.0, 1.0),
    "yarn_mscale": ("mscale", "mscale", 1.0, 1.0),
    "yarn_mscale_all_dim": ("mscale_all_dim", "mscale_all_dim", 0.0, 0.0),
    "yarn_correction_range_round_to_int": (None, "yarn_correction_range_round_to_int", True, True),
}  # fmt: skip
LATENT_ONLY = ("original_max_position_embeddings", "beta_fast", "beta_slow")  # read; no flag of Megatron's sets them
ROPE_TYPE, LATENT = "rope_type", "multi_latent_attention"


def read_yarn(args: Settings) -> dict[str, Any]:
    """Read YaRN, which rotates whole heads in Megatron. A factor of 1 has no effect."""
    fields: dict[str, Any] = {"rope_scaling_type": "yarn", "rotary_percent": 1.0}
    for ours, (latent, plain, *defaults) in YARN.items():
        name, default = (latent, defaults[0]) if args.get(LATENT) else (plain, defaults[1])
        value = None if name is None else args.get(name)
        fields[ours] = default if value is None else value
    if fields["rope_scaling_factor"] == 1:
        return {"rotary_percent": 1.0}
    if not fields["yarn_mscale"] and fields["yarn_mscale_all_dim"]:
        raise ConfigError(f"mscale 0 with mscale_all_dim {fields['yarn_mscale_all_dim']} cannot be expressed")
    return fields


def write_yarn(layer: LayerConfig) -> dict[str, Any]:
    """Return the args of YaRN, and of which kind rotary positions of latent attention are."""
    is_latent, is_yarn = layer.multi_latent_attention, layer.rope_scaling_type == "yarn"
    kind = {ROPE_TYPE: ("yarn" if is_yarn else "rope") if is_latent else None}
    if not is_yarn:
        return kind
    names = {ours: latent if is_latent else plain for ours, (latent, plain, *_) in YARN.items()}
    return kind | {
        name: getattr(layer, ours) for ours, name in names.items() if name is not None and name not in LATENT_ONLY
    }


def read_rope_scaling(args: Settings) -> dict[str, Any]:
    """Read YaRN, linear scaling, or Llama 3's, whose other parameters are fixed."""
    if args.get(LATENT):  # it takes nothing but YaRN
        if (args.get(ROPE_TYPE) or "yarn") == "yarn":
            return read_yarn(args)
        if (args.get("rotary_scaling_factor") or 1) > 1 and args.get("mscale_all_dim"):
            scaled = f"mscale_all_dim {args['mscale_all_dim']} scales its softmax"
            raise ConfigError(f"{ROPE_TYPE} rope with {LATENT} cannot be expressed: {scaled}")
        return {}
    if args.get(POSITIONS) == "yarn":
        return read_yarn(args)
    linear, llama3 = args.get(LINEAR), args.get(LLAMA3)
    if linear and llama3:
        raise ConfigError(f"{LINEAR} and {LLAMA3} together cannot be expressed: here there is one scaling at a time")
    if linear:
        return {"rope_scaling_type": "linear", "rope_scaling_factor": float(linear)}
    if llama3:
        return {"rope_scaling_type": "llama3", "rope_scaling_factor": float(args.get(FACTOR) or 8.0)}
    return {}


WINDOW, POSITIONS = "window_size", "position_embedding_type"
WITHOUT_WINDOW, WITHOUT_ROPE = "window_attn_skip_freq", "no_rope_freq"
BLOCKS, BLOCKS_PATH = "heterogeneous_layers_config_encoded_json", "heterogeneous_layers_config_path"


def read_window(args: Settings) -> dict[str, Any]:
    """Read (tokens before, 0): one less than our window, which counts the token itself; and the layers without it."""
    window = args.get(WINDOW)
    if window is None or tuple(window) in ((-1, 0), (-1, -1)):  # -1: unlimited; the causal mask hides later tokens
        return {"window_size": None}
    left, right = window
    if right != 0:
        raise ConfigError(f"{WINDOW} {tuple(window)} cannot be expressed: tokens do not attend to later ones here")
    skipped = args.get(WITHOUT_WINDOW)
    return {"window_size": int(left) + 1, WITHOUT_WINDOW: None if skipped is None else str(skipped)}


def write_window(layers: Layers) -> dict[str, Any]:
    windows = [layer.window_size for layer in layers]
    window = next((window for window in windows if window is not None), None)
    return {
        WINDOW: None if window is None else (window - 1, 0),
        WITHOUT_WINDOW: marked([w is None for w in windows], 0),
    }


def read_positions(args: Settings) -> dict[str, Any]:
    skipped = args.get(WITHOUT_ROPE)
    kind = args.get(POSITIONS) or "learned_absolute"
    is_rotary = kind == "yarn" or (kind == "none" and args.get(LATENT))  # latent attention has its own
    return {
        POSITIONS: "rope" if is_rotary else kind,
        WITHOUT_ROPE: None if skipped is None else str(skipped),
    }


def write_positions(layers: Layers) -> dict[str, Any]:
    kinds = [layer.position_embedding_type for layer in layers]
    kind = "rope" if "rope" in kinds else kinds[0]
    is_yarn = any(layer.rope_scaling_type == "yarn" and not layer.multi_latent_attention for layer in layers)
    name = "yarn" if kind == "rope" and is_yarn else kind
    return {POSITIONS: name, WITHOUT_ROPE: marked([kind == "none" for kind in kinds], 1) if kind == "rope" else None}


def marked(marks: Sequence[bool], mark: int) -> int | list[int] | None:
    """Return Megatron's frequency or list of marked layers, None if all or none is. mark: what stands for one."""
    if len(set(marks)) == 1:
        return None
    period = regular_period(marks)
    is_whole = period is not None and len(marks) % period == 0
    return period if is_whole else [mark if found else 1 - mark for found in marks]


LATENT_SIZES = {
    "q_lora_rank": None,
    "kv_lora_rank": 32,
    "qk_head_dim": 128,
    "qk_pos_emb_head_dim": 64,
    "v_head_dim": 128,
}


def read_heads(args: Settings) -> dict[str, Any]:
    """Read the channels of a head, which latent attention derives from its own sizes."""
    if not args.get(LATENT):
        channels = args.get("kv_channels")
        return {"kv_channels": args["hidden_size"] // args["num_attention_heads"] if channels is None else channels}
    sizes = {name: default if args.get(name) is None else args[name] for name, default in LATENT_SIZES.items()}
    return {LATENT: True, **sizes}


def write_heads(layers: Layers) -> dict[str, Any]:
    layer = layers[0]
    if not layer.multi_latent_attention:
        return {LATENT: False, "kv_channels": layer.kv_channels}
    channels = layer.hidden_size // layer.num_attention_heads  # as Megatron sets it, without effect
    return {LATENT: True, "kv_channels": channels} | {name: getattr(layer, name) for name in LATENT_SIZES}


def read_blocks(args: Settings) -> dict[str, Any]:
    """Read the block configurations of heterogeneous layers, which are the content of a file."""
    text, given = args.get(BLOCKS), args.get(BLOCKS_PATH)
    if not text and given:
        raise ConfigError(f"{BLOCKS_PATH} {given}: its content, {BLOCKS}, is not in the checkpoint; add it to the args")
    return {"layer_pattern": block_words(text, BLOCKS)} if text else {}


EPSILONS = ("norm_epsilon", "layernorm_epsilon")  # the second in older versions
ZERO_CENTERED = ("layernorm_zero_centered_gamma", "apply_layernorm_1p")  # the second before version 0.17
SAME_NAME = {  # args with the name and meaning of our field, with their defaults
    "rotary_base": 10000.0,
    "rotary_percent": 1.0,
    "normalization": "LayerNorm",
    "add_bias_linear": True,
    "add_qkv_bias": False,
    "untie_embeddings_and_output_weights": False,
    "qk_layernorm": False,
    "softmax_type": "vanilla",
    "glu_linear_offset": 0.0,
    "activation_func_clamp_value": None,
    "hidden_dropout": 0.1,
    "attention_dropout": 0.1,
    "init_method_std": 0.02,
    "make_vocab_size_divisible_by": 128,
}
SIZES = "num_layers hidden_size num_attention_heads seq_length max_position_embeddings ffn_hidden_size".split()
MODEL_RULES = (
    *(key(name, name) for name in SIZES),
    *(key(name, name, default) for name, default in SAME_NAME.items()),
    Rule(
        ZERO_CENTERED,
        lambda args: {"layernorm_zero_centered_gamma": any(bool(args.get(name)) for name in ZERO_CENTERED)},
        lambda layers: dict.fromkeys(ZERO_CENTERED, layers[0].layernorm_zero_centered_gamma),
    ),
    Rule(
        tuple(ACTIVATIONS),
        lambda args: {"activation": next((ours for theirs, ours in ACTIVATIONS.items() if args.get(theirs)), "gelu")},
        lambda layers: {
            "swiglu": layers[0].activation == "swiglu",
            "quick_geglu": layers[0].activation == "quick_geglu",
            "squared_relu": layers[0].activation == "squared_relu",
            "openai_gelu": False,
            "bias_gelu_fusion": layers[0].activation == "gelu_tanh",
            "bias_swiglu_fusion": layers[0].activation == "swiglu",
        },
    ),
    Rule(
        ("group_query_attention", "num_query_groups"),
        lambda args: {"num_query_groups": args["num_query_groups"] if args.get("group_query_attention") else None},
        write_query_groups,
    ),
    Rule(
        (LINEAR, LLAMA3, FACTOR, ROPE_TYPE, *(name for names in YARN.values() for name in names[:2] if name)),
        read_rope_scaling,
        lambda layers: {
            **write_yarn(layers[0]),
            LINEAR: layers[0].rope_scaling_factor if layers[0].rope_scaling_type == "linear" else None,
            LLAMA3: layers[0].rope_scaling_type == "llama3",
            FACTOR: layers[0].rope_scaling_factor,
        },
    ),
    Rule((LATENT, "kv_channels", *LATENT_SIZES), read_heads, write_heads),
    Rule((WINDOW, WITHOUT_WINDOW), read_window, write_window),
    Rule((POSITIONS, WITHOUT_ROPE), read_positions, write_positions),
    Rule((INTERLEAVED,), lambda args: {}, lambda layers: {INTERLEAVED: False}),  # `in_halves` reorders the channels
    EXPERT_RULE,
    Rule((BLOCKS, BLOCKS_PATH), read_blocks, lambda layers: {BLOCKS: None, BLOCKS_PATH: None}),
    Rule(
        EPSILONS,
        lambda args: {"norm_epsilon": next((args[name] for name in EPSILONS if args.get(name) is not None), 1e-5)},
        lambda layers: dict.fromkeys(EPSILONS, layers[0].norm_epsilon),
    ),
    *(fixed(name, value, "megapipe has no counterpart") for name, value in UNSUPPORTED.items()),
)
# our fields with args of the same name, read if present
OPTIMIZER = """
    optimizer lr min_lr lr_decay_style lr_decay_iters lr_decay_samples lr_warmup_fraction lr_warmup_iters
    lr_warmup_samples lr_warmup_init lr_wsd_decay_style lr_wsd_decay_iters lr_wsd_decay_samples weight_decay
    start_weight_decay end_weight_decay weight_decay_incr_style clip_grad adam_beta1 adam_beta2 adam_eps
    sgd_momentum decoupled_lr decoupled_min_lr
"""
TRAINING = "micro_batch_size global_batch_size train_iters train_samples seed"


def read_config(args: Settings, vocab_size: int | None) -> Config:
    """Return our configuration of a Megatron run. vocab_size: overrides args.

    Raises ConfigError naming the argument that cannot be expressed, or if the true vocabulary size is unknown.
    """
    fields = read_fields(MODEL_RULES, args)
    padded = args["padded_vocab_size"]
    if vocab_size is None and args.get("vocab_size") is None:
        raise ConfigError(
            f"the checkpoint only has padded_vocab_size {padded}: give the true size (the tokenizer's) with "
            f"--vocab-size, or --vocab-size {padded} if there is no padding"
        )
    if vocab_size is None:
        adds_eod = args.get("tokenizer_type") == "NullTokenizer" and "null_tokenizer_eod_id" not in args  # before 0.17
        vocab_size = int(args["vocab_size"]) + adds_eod
    if vocab_size > padded:
        raise ConfigError(f"a vocabulary of {vocab_size} tokens does not fit into padded_vocab_size {padded}")
    config = Config(
        ModelConfig(**fields, vocab_size=vocab_size),
        training=TrainingConfig(**_given(args, TRAINING)),
        optimizer=OptimizerConfig(**_given(args, OPTIMIZER)),
        precision=PrecisionConfig(next((dtype for dtype in ("bf16", "fp16") if args.get(dtype)), "fp32")),
    )
    check(config)
    return config


def read_run_config(args: Settings, vocab_size: int | None, keeps_padding: bool) -> tuple[Config, tuple[str, ...]]:
    """Return our configuration of a Megatron run and remarks on its vocabulary.

    keeps_padding: the padding rows, which Megatron trains and counts in the softmax, become part of the vocabulary.
    """
    padded = int(args["padded_vocab_size"])
    if not keeps_padding:
        return read_config(args, vocab_size), ()
    config = read_config(args, padded)
    if vocab_size is None and args.get("vocab_size") is None:
        tokens = "an unknown number are tokens"
    else:
        true_size = read_config(args, vocab_size).model.vocab_size
        if true_size == padded:
            return config, ()
        tokens = f"{true_size} are tokens"
    remark = (
        f"kept all {padded} rows of the vocabulary, of which {tokens}: Megatron trains its padding and counts it in "
        "the softmax, so losses continue as they were; --drop-vocab-padding leaves it out"
    )
    if args.get("tokenizer_type") == "NullTokenizer":
        remark += (
            f"; the end of a document by NullTokenizer would now be token {padded - 1}: it has no effect on losses "
        )
        remark += "without --eod-mask-loss, --reset-position-ids and --reset-attention-mask"
    return config, (remark,)


def _given(args: Settings, names: str) -> dict[str, Any]:
    return {name: args[name] for name in names.split() if args.get(name) is not None}


@dataclass(frozen=True)
class OptimizerState:
    """The state of one rank."""

    tensors: list[dict[str, dict[str, Tensor]]]  # of each chunk, by key and name; masters if they are not the weights
    num_steps: int  # updates made
    scaler: Mapping[str, Any] | None


def run_snapshot(
    config: Config,
    tensors: Mapping[str, LazyTensor],
    args: Settings,
    content: Mapping[str, Any],
    optimizer: OptimizerState | None,
    remarks: tuple[str, ...] = (),
) -> Snapshot:
    """Return the Snapshot of a run, or without optimizer state that of a model at step 0.

    tensors: under our names, with Megatron's order of the channels. content: of a checkpoint file, for everything
    other than tensors.
    """
    if args.get(LATENT):
        tensors = with_neighbours(config.model, tensors, to_theirs=False)
    elif args.get(INTERLEAVED):
        tensors = in_halves(config, tensors)
        remarks = (
            *remarks,
            "reordered the channels of queries and keys (rotary_interleaved): rotary pairs lie in the two halves of a "
            "head now; leave out --rotary-interleaved if the run goes back to Megatron",
        )
    state = fresh_state(config.precision.dtype)
    if optimizer is None:
        return Snapshot(config, tensors, state, remarks=remarks)
    step = int(content.get("iteration", args.get("iteration", 0)))
    samples = int(args.get("consumed_train_samples") or 0)
    state["training"] = {
        "step": step,
        "consumed_samples": samples,
        "consumed_tokens": samples * config.model.seq_length,
        "skipped_steps": max(0, step - optimizer.num_steps),
    }
    loss_scaler = {"scale": 1.0, "good_steps": 0, "overflows_left": 1}  # a constant scale has no state
    scaler = optimizer.scaler
    if scaler and "growth_tracker" in scaler:  # Megatron's dynamic scaler, which counts like ours
        loss_scaler = {
            "scale": float(scaler["scale"]),
            "good_steps": int(scaler["growth_tracker"]),
            "overflows_left": int(scaler["hysteresis_tracker"]),
        }
    rule = config.optimizer.optimizer
    state["optimizer"] = {"num_steps": optimizer.num_steps, "loss_scaler": loss_scaler, "rule": rule}
    state["random"] = {"seed": config.training.seed}
    if content.get("opt_param_scheduler") is not None:
        state["schedules"] = read_schedules(content["opt_param_scheduler"], args)
    return Snapshot(config, tensors, state, remarks=remarks)


def read_schedules(scheduler: Mapping[str, Any], args: Settings) -> dict[str, Any]:
    """Return the state of Megatron's OptimizerParamScheduler, whose steps are samples, as our `schedules`."""

    def either(*names: str) -> Any:
        found = next((scheduler[name] for name in names if name in scheduler), None)
        if found is None:
            raise CheckpointError(f"the checkpoint's opt_param_scheduler lacks {names[0]}")
        return found

    style = either("lr_decay_style", "decay_style")
    wsd_iters, wsd_samples = args.get("lr_wsd_decay_iters"), args.get("lr_wsd_decay_samples")
    lr = {
        "max_lr": either("max_lr", "start_lr"),
        "min_lr": either("min_lr"),
        "init_lr": args.get("lr_warmup_init") or 0.0,
        "style": style,
        "warmup_samples": either("lr_warmup_steps", "warmup_steps", "warmup_iter"),
        "decay_samples": either("lr_decay_steps", "decay_steps", "end_iter"),
        "wsd_style": args.get("lr_wsd_decay_style") or "exponential",
        "wsd_samples": wsd_samples or (wsd_iters or 0) * (args.get("global_batch_size") or 0),
    }
    decoupled = {"max_lr": args.get("decoupled_lr"), "min_lr": args.get("decoupled_min_lr")}
    decay = {
        "start": either("start_wd"),
        "end": either("end_wd"),
        "style": either("wd_incr_style"),
        "ramp_samples": either("wd_incr_steps"),
    }
    return {"lr": lr, "decoupled_lr": lr | {k: v for k, v in decoupled.items() if v is not None}, "weight_decay": decay}


def write_args(config: Config, state: Mapping[str, Any], padded_vocab_size: int, grid: MegatronGrid) -> dict[str, Any]:
    """Return args of a Megatron run of this configuration. Raises ConfigError naming what they cannot express."""
    model = config.model
    args = write_keys(MODEL_RULES, model)
    args |= {"padded_vocab_size": padded_vocab_size, "vocab_size": model.vocab_size}
    check_expressed(model, read_config(args, model.vocab_size).model, "Megatron's args")
    dtype = config.precision.dtype
    args |= {
        "bf16": dtype == "bf16",
        "fp16": dtype == "fp16",
        "tensor_model_parallel_size": grid.tp,
        "pipeline_model_parallel_size": grid.pp,
        "expert_model_parallel_size": grid.ep,
        "expert_tensor_parallel_size": grid.etp,
    }
    args |= {name: getattr(config.optimizer, name) for name in OPTIMIZER.split()}
    args |= {name: getattr(config.training, name) for name in TRAINING.split()}
    training = state["training"]
    # Megatron has no skipped windows: its count is the place in the data set
    skipped = SkippedSamples.of((state.get("account") or {}).get("skipped_samples", ()))
    consumed = skipped.index(training["consumed_samples"])
    return args | {
        "iteration": training["step"],
        "consumed_train_samples": consumed,
        "consumed_valid_samples": 0,
        "skipped_train_samples": consumed - training["consumed_samples"],
        "virtual_pipeline_model_parallel_size": None,
        "use_distributed_optimizer": False,
        "ckpt_format": "torch",
        "use_mcore_models": True,
    }
