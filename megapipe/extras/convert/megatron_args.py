"""Megatron's args <-> our configuration, by a table of rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megapipe.config.config import Config
from megapipe.config.layer_pattern import block_words
from megapipe.config.layers import LayerConfig
from megapipe.config.model import EXPERT_SCORES, LOAD_BALANCING, ModelConfig, PrecisionConfig
from megapipe.config.rules.check import check
from megapipe.config.training import OptimizerConfig, TrainingConfig
from megapipe.data.dataset import SkippedSamples
from megapipe.errors import ConfigError
from megapipe.extras.convert.layer_types import regular_period
from megapipe.extras.convert.tables import (
    Layers,
    Rule,
    Settings,
    check_expressed,
    fixed,
    key,
    read_fields,
    stated,
    write_keys,
)

AXES = "tensor_model", "pipeline_model", "expert_model", "expert_tensor"  # of MegatronGrid, in the names of args


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

    @staticmethod
    def of(args: Settings) -> MegatronGrid:
        """Return the ranks that a checkpoint was written by."""
        sizes = (args.get(f"{axis}_parallel_size") for axis in AXES)
        tp, pp, ep, etp = (None if size is None else int(size) for size in sizes)
        return MegatronGrid(tp or 1, pp or 1, ep or 1, etp or None)


# args that change what the model computes and that megapipe lacks, with the value that has no effect
UNSUPPORTED: dict[str, Any] = {
    "apply_residual_connection_post_layernorm": False,
    "mtp_num_layers": None,
    "hybrid_override_pattern": None,
    "hybrid_layer_pattern": None,
    "experimental_attention_variant": None,
    "apply_query_key_layer_scaling": False,
    "normalize_attention_scores": True,
    "use_legacy_models": False,
    "moe_input_jitter_eps": None,
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
        fields[ours] = default if name is None else stated(args, name, default)
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


def read_positions(args: Settings) -> dict[str, Any]:
    skipped = args.get(WITHOUT_ROPE)
    kind = args.get(POSITIONS) or "learned_absolute"
    is_rotary = kind == "yarn" or (kind == "none" and args.get(LATENT))  # latent attention has its own
    return {POSITIONS: "rope" if is_rotary else kind, WITHOUT_ROPE: None if skipped is None else str(skipped)}


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


DEFAULTS = vars(ModelConfig())  # those of Megatron's args, too, where these have the name and meaning of our field
HEAD_SIZE = key("kv_channels", "kv_channels", lambda args: args["hidden_size"] // args["num_attention_heads"])
LATENT_SIZES = "q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim".split()


def with_defaults(args: Settings, names: Sequence[str]) -> dict[str, Any]:
    """Return these args, each with its default where it is missing or None."""
    return {name: stated(args, name, DEFAULTS[name]) for name in names}


def read_blocks(args: Settings) -> dict[str, Any]:
    """Read the block configurations of heterogeneous layers, which are the content of a file."""
    text, given = args.get(BLOCKS), args.get(BLOCKS_PATH)
    if not text and given:
        raise ConfigError(f"{BLOCKS_PATH} {given}: its content, {BLOCKS}, is not in the checkpoint; add it to the args")
    return {"layer_pattern": block_words(text, BLOCKS)} if text else {}


# ---------------------------------------------------------------------------------------------------- experts

FREQUENCY, BALANCE, COEFFICIENT = "moe_layer_freq", "moe_router_load_balancing_type", "moe_aux_loss_coeff"
# args with the name and meaning of our field
OF_EXPERTS = """
    num_experts moe_ffn_hidden_size moe_shared_expert_intermediate_size moe_shared_expert_gate moe_router_topk
    moe_router_score_function moe_router_pre_softmax moe_router_topk_scaling_factor moe_router_num_groups
    moe_router_group_topk moe_router_dtype moe_apply_probs_on_input moe_router_enable_expert_bias
    moe_router_bias_update_rate moe_z_loss_coeff moe_expert_capacity_factor moe_token_drop_policy
    moe_pad_expert_input_to_capacity
""".split()


def read_experts(args: Settings) -> dict[str, Any]:
    """Read the options of experts, which have no effect without --num-experts."""
    if not args.get("num_experts"):
        return {}
    fields = with_defaults(args, OF_EXPERTS)
    if fields["moe_router_score_function"] not in EXPERT_SCORES:
        raise ConfigError(f"moe_router_score_function {fields['moe_router_score_function']} cannot be expressed")
    kinds, coefficients = (
        tuple(given) if isinstance(given, list) else (given,)
        for given in (stated(args, BALANCE, "aux_loss"), stated(args, COEFFICIENT, 0.0))
    )
    for kind in kinds:
        if kind not in LOAD_BALANCING:
            raise ConfigError(f"{BALANCE} {kind} cannot be expressed; it can be {', '.join(LOAD_BALANCING)}")
    frequency = args.get(FREQUENCY)
    return fields | {
        BALANCE: kinds,
        COEFFICIENT: (0.0,) if kinds == ("none",) else coefficients,
        FREQUENCY: None if frequency in (None, 1) else str(frequency),
    }


def write_experts(layers: Layers) -> dict[str, Any]:
    marks = [int(layer.num_experts is not None) for layer in layers]
    layer = layers[marks.index(1)] if any(marks) else layers[0]
    if layer.moe_router_enable_expert_bias and layer.moe_router_score_function == "softmax" and any(marks):
        raise ConfigError(
            "biases of experts beside softmax scores cannot be expressed: Megatron's add to sigmoid scores"
        )
    if layer.moe_apply_probs_on_input and layer.moe_router_topk > 1 and any(marks):
        raise ConfigError("weights on the inputs of several experts cannot be expressed: Megatron takes one a token")
    args = {name: getattr(layer, name) if any(marks) else DEFAULTS[name] for name in OF_EXPERTS}
    width = layer.expert_ffn_size if any(marks) else None
    return args | {
        "moe_ffn_hidden_size": width,
        BALANCE: one_or_list(layer.moe_router_load_balancing_type),
        COEFFICIENT: one_or_list(layer.moe_aux_loss_coeff),
        FREQUENCY: 1 if all(marks) or not any(marks) else marks,
    }


def one_or_list(values: Sequence[Any]) -> Any:
    """Return what Megatron stores: a single value as it is, several as a list."""
    return values[0] if len(values) == 1 else list(values)


# ---------------------------------------------------------------------------------------------- all settings

EPSILONS = ("norm_epsilon", "layernorm_epsilon")  # the second in older versions
ZERO_CENTERED = ("layernorm_zero_centered_gamma", "apply_layernorm_1p")  # the second before version 0.17
SAME_NAME = """
    rotary_base rotary_percent normalization add_bias_linear add_qkv_bias untie_embeddings_and_output_weights
    qk_layernorm qk_l2_norm attention_output_gate softmax_type glu_linear_offset activation_func_clamp_value
    hidden_dropout attention_dropout init_method_std make_vocab_size_divisible_by
""".split()
SIZES = "num_layers hidden_size num_attention_heads seq_length max_position_embeddings ffn_hidden_size".split()
MODEL_RULES = (
    *(key(name, name) for name in SIZES),
    *(key(name, name, DEFAULTS[name]) for name in SAME_NAME),
    Rule(
        ZERO_CENTERED,
        lambda args: {"layernorm_zero_centered_gamma": any(bool(args.get(name)) for name in ZERO_CENTERED)},
        lambda layers: dict.fromkeys(ZERO_CENTERED, layers[0].layernorm_zero_centered_gamma),
    ),
    Rule(
        tuple(ACTIVATIONS),
        lambda args: {"activation": next((ours for theirs, ours in ACTIVATIONS.items() if args.get(theirs)), "gelu")},
        lambda layers: {
            **{theirs: layers[0].activation == ours for theirs, ours in ACTIVATIONS.items()},
            "openai_gelu": False,
            "bias_swiglu_fusion": layers[0].activation == "swiglu",
        },
    ),
    Rule(
        ("group_query_attention", "num_query_groups"),
        lambda args: {"num_query_groups": args["num_query_groups"] if args.get("group_query_attention") else None},
        lambda layers: (
            {"group_query_attention": False, "num_query_groups": 1}
            if layers[0].num_query_groups == layers[0].num_attention_heads
            else {"group_query_attention": True, "num_query_groups": layers[0].num_query_groups}
        ),
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
    Rule(
        (LATENT, *HEAD_SIZE.keys, *LATENT_SIZES),
        lambda args: {LATENT: True, **with_defaults(args, LATENT_SIZES)} if args.get(LATENT) else HEAD_SIZE.read(args),
        lambda layers: (
            # kv_channels as Megatron sets it, without effect
            {LATENT: True, "kv_channels": layers[0].hidden_size // layers[0].num_attention_heads}
            | {name: getattr(layers[0], name) for name in LATENT_SIZES}
            if layers[0].multi_latent_attention
            else {LATENT: False, **HEAD_SIZE.write(layers)}
        ),
    ),
    Rule(
        (WINDOW, WITHOUT_WINDOW),
        read_window,
        lambda layers: {
            WINDOW: next(((own.window_size - 1, 0) for own in layers if own.window_size is not None), None),
            WITHOUT_WINDOW: marked([own.window_size is None for own in layers], 0),
        },
    ),
    Rule((POSITIONS, WITHOUT_ROPE), read_positions, write_positions),
    Rule((INTERLEAVED,), lambda args: {}, lambda layers: {INTERLEAVED: False}),  # `in_halves` reorders the channels
    Rule((*OF_EXPERTS, BALANCE, COEFFICIENT, FREQUENCY), read_experts, write_experts),
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


def write_args(config: Config, state: Mapping[str, Any], padded_vocab_size: int, grid: MegatronGrid) -> dict[str, Any]:
    """Return args of a Megatron run of this configuration. Raises ConfigError naming what they cannot express."""
    model = config.model
    args = write_keys(MODEL_RULES, model)
    args |= {"padded_vocab_size": padded_vocab_size, "vocab_size": model.vocab_size}
    check_expressed(model, read_config(args, model.vocab_size).model, "Megatron's args")
    dtype = config.precision.dtype
    args |= {"bf16": dtype == "bf16", "fp16": dtype == "fp16"}
    sizes = grid.tp, grid.pp, grid.ep, grid.etp
    args |= {f"{axis}_parallel_size": size for axis, size in zip(AXES, sizes, strict=True)}
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
        "ckpt_format": "torch_dist",
        "use_mcore_models": True,
    }
