"""Megatron's args (the Namespace in its checkpoints) <-> our configuration, and a Megatron run as a Snapshot."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megapipe.config.config import Config
from megapipe.config.model import ModelConfig, PrecisionConfig
from megapipe.config.rules.check import check
from megapipe.config.training import OptimizerConfig, TrainingConfig
from megapipe.data.skipped import SkippedSamples
from megapipe.errors import CheckpointError, ConfigError
from megapipe.extras.convert.families import check_expressed
from megapipe.extras.convert.megatron_optimizer import OptimizerState
from megapipe.extras.convert.settings import Fixed, Key, Rule, Settings
from megapipe.extras.convert.snapshot import LazyTensor, Snapshot, fresh_state

# args that change what the model computes and that megapipe lacks, with the value that has no effect
UNSUPPORTED: dict[str, Any] = {
    "num_experts": None,
    "multi_latent_attention": False,
    "rotary_interleaved": False,
    "apply_residual_connection_post_layernorm": False,
    "mtp_num_layers": None,
    "quick_geglu": False,
    "qk_l2_norm": False,
    "attention_output_gate": False,
    "heterogeneous_layers_config_path": None,
    "hybrid_override_pattern": None,
    "hybrid_layer_pattern": None,
    "experimental_attention_variant": None,
    "no_rope_freq": None,
    "window_attn_skip_freq": None,
    "apply_query_key_layer_scaling": False,
    "normalize_attention_scores": True,
    "use_legacy_models": False,
}


@dataclass(frozen=True)
class Activation:
    """swiglu, squared_relu, openai_gelu; otherwise GELU, in its tanh form if it is fused with the bias."""

    keys: tuple[str, ...] = ("swiglu", "squared_relu", "openai_gelu", "bias_gelu_fusion")

    def read(self, theirs: Settings) -> dict[str, Any]:
        words = {
            "swiglu": "swiglu",
            "squared_relu": "squared_relu",
            "openai_gelu": "gelu_tanh",
            "bias_gelu_fusion": "gelu_tanh",
        }
        return {"activation": next((ours for key, ours in words.items() if theirs.get(key)), "gelu")}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        name = model.activation
        return {
            "swiglu": name == "swiglu",
            "squared_relu": name == "squared_relu",
            "openai_gelu": False,
            "bias_gelu_fusion": name == "gelu_tanh",
            "bias_swiglu_fusion": name == "swiglu",
        }


@dataclass(frozen=True)
class QueryGroups:
    """num_query_groups, which has an effect only with group_query_attention."""

    keys: tuple[str, ...] = ("group_query_attention", "num_query_groups")

    def read(self, theirs: Settings) -> dict[str, Any]:
        return {"num_query_groups": theirs["num_query_groups"] if theirs.get("group_query_attention") else None}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        grouped = model.query_groups() != model.num_attention_heads
        return {"group_query_attention": grouped, "num_query_groups": model.query_groups() if grouped else 1}


@dataclass(frozen=True)
class RopeScaling:
    """rotary_seq_len_interpolation_factor (linear) or use_rope_scaling (Llama 3's, with fixed other parameters)."""

    keys: tuple[str, ...] = ("rotary_seq_len_interpolation_factor", "use_rope_scaling", "rope_scaling_factor")

    def read(self, theirs: Settings) -> dict[str, Any]:
        linear, llama3 = theirs.get(self.keys[0]), theirs.get(self.keys[1])
        if linear and llama3:
            raise ConfigError(
                f"{self.keys[0]} and {self.keys[1]} together cannot be expressed: only one scaling at a time is "
                "supported"
            )
        if linear:
            return {"rope_scaling_type": "linear", "rope_scaling_factor": float(linear)}
        if llama3:
            return {"rope_scaling_type": "llama3", "rope_scaling_factor": float(theirs.get(self.keys[2]) or 8.0)}
        return {}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        factor = model.rope_scaling_factor
        return {
            self.keys[0]: factor if model.rope_scaling_type == "linear" else None,
            self.keys[1]: model.rope_scaling_type == "llama3",
            self.keys[2]: factor,
        }


@dataclass(frozen=True)
class Window:
    """window_size as (tokens before, 0): one less than our window, which counts the token itself."""

    keys: tuple[str, ...] = ("window_size",)

    def read(self, theirs: Settings) -> dict[str, Any]:
        window = theirs.get("window_size")
        if window is None or tuple(window) in ((-1, 0), (-1, -1)):  # -1: unlimited; the causal mask hides later tokens
            return {"window_size": None}
        left, right = window
        if right != 0:
            raise ConfigError(
                f"window_size {tuple(window)} cannot be expressed: tokens do not attend to later ones here"
            )
        return {"window_size": int(left) + 1}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        return {"window_size": None if model.window_size is None else (model.window_size - 1, 0)}


@dataclass(frozen=True)
class Epsilon:
    """norm_epsilon, called layernorm_epsilon in older versions."""

    keys: tuple[str, ...] = ("norm_epsilon", "layernorm_epsilon")

    def read(self, theirs: Settings) -> dict[str, Any]:
        return {"norm_epsilon": next((theirs[key] for key in self.keys if theirs.get(key) is not None), 1e-5)}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        return dict.fromkeys(self.keys, model.norm_epsilon)


SAME_NAME = {  # args with the name and meaning of our field, with their defaults
    "kv_channels": lambda theirs: theirs["hidden_size"] // theirs["num_attention_heads"],
    "position_embedding_type": "learned_absolute",
    "rotary_base": 10000.0,
    "rotary_percent": 1.0,
    "normalization": "LayerNorm",
    "add_bias_linear": True,
    "add_qkv_bias": False,
    "untie_embeddings_and_output_weights": False,
    "qk_layernorm": False,
    "hidden_dropout": 0.1,
    "attention_dropout": 0.1,
    "init_method_std": 0.02,
    "make_vocab_size_divisible_by": 128,
}
DERIVED = {"kv_channels": ModelConfig.head_size, "ffn_hidden_size": ModelConfig.feed_forward_size}
MODEL_RULES: tuple[Rule, ...] = (
    *(
        Key(name, name)
        for name in ("num_layers", "hidden_size", "num_attention_heads", "seq_length", "max_position_embeddings")
    ),
    Key("ffn_hidden_size", "ffn_hidden_size", derived=ModelConfig.feed_forward_size),
    *(Key(name, name, default, derived=DERIVED.get(name)) for name, default in SAME_NAME.items()),
    Key("apply_layernorm_1p", "layernorm_zero_centered_gamma", False),
    Activation(),
    QueryGroups(),
    RopeScaling(),
    Window(),
    Epsilon(),
    *(Fixed(name, value, "megapipe has no counterpart") for name, value in UNSUPPORTED.items()),
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
    fields: dict[str, Any] = {}
    for rule in MODEL_RULES:
        fields |= rule.read(args)
    padded = args["padded_vocab_size"]
    true = vocab_size if vocab_size is not None else _vocab_size(args)
    if true > padded:
        raise ConfigError(f"a vocabulary of {true} tokens does not fit into padded_vocab_size {padded}")
    model = ModelConfig(**fields, vocab_size=true)
    dtype = "bf16" if args.get("bf16") else "fp16" if args.get("fp16") else "fp32"
    optimizer = OptimizerConfig(**_given(args, OPTIMIZER))
    config = Config(
        model, training=TrainingConfig(**_given(args, TRAINING)), optimizer=optimizer, precision=PrecisionConfig(dtype)
    )
    check(config)
    return config


def _vocab_size(args: Settings) -> int:
    size = args.get("vocab_size")
    if size is None:
        raise ConfigError(
            f"the checkpoint only has padded_vocab_size {args['padded_vocab_size']}: give the true size (the "
            f"tokenizer's) with --vocab-size, or --vocab-size {args['padded_vocab_size']} if there is no padding"
        )
    return int(size) + (args.get("tokenizer_type") == "NullTokenizer")  # adds an eod token


def _given(args: Settings, names: str) -> dict[str, Any]:
    return {name: args[name] for name in names.split() if args.get(name) is not None}


def run_snapshot(
    config: Config,
    tensors: Mapping[str, LazyTensor],
    args: Settings,
    content: Mapping[str, Any],
    optimizer: OptimizerState | None,
) -> Snapshot:
    """Return the Snapshot of a run, or without optimizer state that of a model at step 0.

    tensors: under our names. content: of a checkpoint file, for everything other than tensors.
    """
    state = fresh_state(config.precision.dtype)
    if optimizer is not None:
        step = int(content.get("iteration", args.get("iteration", 0)))
        samples = int(args.get("consumed_train_samples") or 0)
        state["training"] = {
            "step": step,
            "consumed_samples": samples,
            "consumed_tokens": samples * config.model.seq_length,
            "skipped_steps": max(0, step - optimizer.num_steps),
        }
        scaler = optimizer.scaler
        if scaler and "growth_tracker" in scaler:  # Megatron's dynamic scaler, which counts like ours
            loss_scaler: dict[str, Any] = {
                "scale": float(scaler["scale"]),
                "good_steps": int(scaler["growth_tracker"]),
                "overflows_left": int(scaler["hysteresis_tracker"]),
            }
        else:  # a constant scale has no state
            loss_scaler = {"scale": 1.0, "good_steps": 0, "overflows_left": 1}
        state["optimizer"] = {
            "num_steps": optimizer.num_steps,
            "loss_scaler": loss_scaler,
            "rule": config.optimizer.optimizer,
        }
        state["random"] = {"seed": config.training.seed}
        if content.get("opt_param_scheduler") is not None:
            state["schedules"] = read_schedules(content["opt_param_scheduler"], args)
    return Snapshot(config, tensors, state)


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


def write_args(config: Config, state: Mapping[str, Any], padded_vocab_size: int, tp: int, pp: int) -> dict[str, Any]:
    """Return args of a Megatron run of this configuration. Raises ConfigError naming what they cannot express."""
    model = config.model
    with_positions = dataclasses.replace(
        model, max_position_embeddings=model.max_position_embeddings or model.seq_length
    )
    args: dict[str, Any] = {}
    for rule in MODEL_RULES:
        args |= rule.write(with_positions)
    args |= {"padded_vocab_size": padded_vocab_size, "vocab_size": model.vocab_size}
    check_expressed(model, read_config(args, model.vocab_size).model, "Megatron's args")
    dtype = config.precision.dtype
    args |= {
        "bf16": dtype == "bf16",
        "fp16": dtype == "fp16",
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
    }
    args |= {name: getattr(config.optimizer, name) for name in OPTIMIZER.split()}
    args |= {name: getattr(config.training, name) for name in TRAINING.split()}
    training = state["training"]
    # Megatron has no skipped windows: its count is the place in the data set
    skipped = SkippedSamples.of((state.get("account") or {}).get("skipped_samples", ()))
    consumed = skipped.index(training["consumed_samples"])
    args |= {"iteration": training["step"], "consumed_train_samples": consumed, "consumed_valid_samples": 0}
    args |= {"skipped_train_samples": consumed - training["consumed_samples"]}
    return args | {
        "virtual_pipeline_model_parallel_size": None,
        "use_distributed_optimizer": False,
        "ckpt_format": "torch",
        "use_mcore_models": True,
    }
