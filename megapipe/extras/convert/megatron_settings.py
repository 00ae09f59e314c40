"""Megatron's args (the Namespace in its checkpoints) <-> our configuration and the plain state of a run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from megapipe.config.config import Config
from megapipe.config.model import ModelConfig
from megapipe.config.optimizer import OptimizerConfig
from megapipe.config.precision import PrecisionConfig
from megapipe.config.rules.check import check
from megapipe.config.training import TrainingConfig
from megapipe.data.skipped import SkippedSamples
from megapipe.errors import CheckpointError, ConfigError
from megapipe.extras.convert.families import NOT_THE_MODEL, meaning
from megapipe.extras.convert.settings import Fixed, Key, Part, Settings

# args that change what the model computes and have no counterpart here, with the value that leaves it alone
PLAIN: dict[str, Any] = {
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


@dataclasses.dataclass(frozen=True)
class Activation:
    """swiglu, squared_relu, openai_gelu; else GELU, in its tanh form where it is fused with the bias."""

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


@dataclasses.dataclass(frozen=True)
class QueryGroups:
    """num_query_groups counts only with group_query_attention."""

    keys: tuple[str, ...] = ("group_query_attention", "num_query_groups")

    def read(self, theirs: Settings) -> dict[str, Any]:
        return {"num_query_groups": theirs["num_query_groups"] if theirs.get("group_query_attention") else None}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        grouped = model.query_groups() != model.num_attention_heads
        return {"group_query_attention": grouped, "num_query_groups": model.query_groups() if grouped else 1}


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Linear by rotary_seq_len_interpolation_factor, Llama 3's by use_rope_scaling, whose other numbers are constants there."""

    keys: tuple[str, ...] = ("rotary_seq_len_interpolation_factor", "use_rope_scaling", "rope_scaling_factor")

    def read(self, theirs: Settings) -> dict[str, Any]:
        linear, llama3 = theirs.get(self.keys[0]), theirs.get(self.keys[1])
        if linear and llama3:
            raise ConfigError(
                f"{self.keys[0]} and {self.keys[1]} together cannot be expressed: one scaling at a time here"
            )
        if linear:
            return {"rope_scaling_type": "linear", "rope_scaling_factor": float(linear)}
        return (
            {"rope_scaling_type": "llama3", "rope_scaling_factor": float(theirs.get(self.keys[2]) or 8.0)}
            if llama3
            else {}
        )

    def write(self, model: ModelConfig) -> dict[str, Any]:
        factor = model.rope_scaling_factor
        return {
            self.keys[0]: factor if model.rope_scaling_type == "linear" else None,
            self.keys[1]: model.rope_scaling_type == "llama3",
            self.keys[2]: factor,
        }


@dataclasses.dataclass(frozen=True)
class Window:
    """(tokens before, 0): one fewer than the window counts."""

    keys: tuple[str, ...] = ("window_size",)

    def read(self, theirs: Settings) -> dict[str, Any]:
        window = theirs.get("window_size")
        if window is None or tuple(window) in ((-1, 0), (-1, -1)):  # -1: no end; the causal mask hides what comes after
            return {"window_size": None}
        left, right = window
        if right != 0:
            raise ConfigError(f"window_size {tuple(window)} cannot be expressed: no token sees those after it here")
        return {"window_size": int(left) + 1}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        return {"window_size": None if model.window_size is None else (model.window_size - 1, 0)}


@dataclasses.dataclass(frozen=True)
class Epsilon:
    """norm_epsilon, in older versions layernorm_epsilon."""

    keys: tuple[str, ...] = ("norm_epsilon", "layernorm_epsilon")

    def read(self, theirs: Settings) -> dict[str, Any]:
        return {"norm_epsilon": next((theirs[key] for key in self.keys if theirs.get(key) is not None), 1e-5)}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        return dict.fromkeys(self.keys, model.norm_epsilon)


SAME_NAME = {  # args with the name and meaning of our field, and what they are where missing
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
MODEL_PARTS: tuple[Part, ...] = (
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
    *(Fixed(name, value, "there is no counterpart here") for name, value in PLAIN.items()),
)
# our fields with args of the same name, taken where they are there
OPTIMIZER = (
    "optimizer lr min_lr lr_decay_style lr_decay_iters lr_decay_samples lr_warmup_fraction lr_warmup_iters lr_warmup_samples "
    "lr_warmup_init lr_wsd_decay_style lr_wsd_decay_iters lr_wsd_decay_samples weight_decay start_weight_decay end_weight_decay "
    "weight_decay_incr_style clip_grad adam_beta1 adam_beta2 adam_eps sgd_momentum decoupled_lr decoupled_min_lr"
)
TRAINING = "micro_batch_size global_batch_size train_iters train_samples seed"


def read_config(args: Settings, vocab_size: int | None) -> Config:
    """Our configuration of a Megatron run. vocab_size: instead of what args say.

    Raises ConfigError naming the argument that cannot be expressed, or if the true vocabulary is not known.
    """
    fields: dict[str, Any] = {}
    for part in MODEL_PARTS:
        fields |= part.read(args)
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
            f"the checkpoint only says padded_vocab_size {args['padded_vocab_size']}: give the true size (the tokenizer's) with "
            f"--vocab-size, or --vocab-size {args['padded_vocab_size']} if nothing is padding"
        )
    return int(size) + (args.get("tokenizer_type") == "NullTokenizer")  # which adds a token for the end of a document


def _given(args: Settings, names: str) -> dict[str, Any]:
    return {name: args[name] for name in names.split() if args.get(name) is not None}


def read_schedules(scheduler: Mapping[str, Any], args: Settings) -> dict[str, Any]:
    """The state of Megatron's OptimizerParamScheduler, whose steps are samples, as our manifest's `schedules`."""

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
    """args of a Megatron run of this configuration. Raises ConfigError naming what Megatron's args cannot express."""
    model = config.model
    args: dict[str, Any] = {}
    for part in MODEL_PARTS:
        args |= part.write(
            dataclasses.replace(model, max_position_embeddings=model.max_position_embeddings or model.seq_length)
        )
    args |= {"padded_vocab_size": padded_vocab_size, "vocab_size": model.vocab_size}
    read, plain = meaning(read_config(args, model.vocab_size).model), meaning(model)
    for name, value in vars(plain).items():
        if name not in NOT_THE_MODEL and getattr(read, name) != value:
            raise ConfigError(
                f"Megatron's args cannot express model.{name} {value} (it would be {getattr(read, name)})"
            )
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
    consumed = SkippedSamples.of((state.get("account") or {}).get("skipped_samples", ())).index(
        training["consumed_samples"]
    )
    args |= {"iteration": training["step"], "consumed_train_samples": consumed, "consumed_valid_samples": 0}
    args |= {"skipped_train_samples": consumed - training["consumed_samples"]}
    return args | {
        "virtual_pipeline_model_parallel_size": None,
        "use_distributed_optimizer": False,
        "ckpt_format": "torch",
        "use_mcore_models": True,
    }
