"""Common parts of writing Megatron's two checkpoint formats: args, the optimizer's groups, the schedules."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megapipe.config.config import ResolvedModelConfig, resolve_model
from megapipe.config.layers import layer_configs
from megapipe.errors import ConfigError
from megapipe.extras.convert.megatron import MOMENTS, write_args
from megapipe.extras.convert.snapshot import DTYPES, LazyTensor, Snapshot
from megapipe.sharding.spec import ParamSpec

CHECKPOINT_VERSION = 3.0  # of Megatron's format, since q, k and v are interleaved by query group
# modules of a layer that have an extra state, the first with Transformer Engine alone
EXTRA_STATE_MODULES = (
    "self_attention.core_attention",
    "self_attention.linear_qkv",
    "self_attention.linear_proj",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
)


@dataclass(frozen=True)
class MegatronRun:
    """The parts of a run that both formats hold, in Megatron's terms."""

    model: ResolvedModelConfig  # with its padded vocabulary
    args: Mapping[str, Any]
    weights: Mapping[str, LazyTensor]  # by our names, in the dtype of the run if it continues
    continues: bool  # its optimizer state is written


def prepare(
    snapshot: Snapshot, ckpt_format: str, tp: int, pp: int, transformer_engine: bool, distributed_optimizer: bool
) -> MegatronRun:
    """Return a run in Megatron's terms. Raises ConfigError naming what does not fit or cannot be expressed."""
    model = resolve_model(dataclasses.replace(snapshot.config.model, padded_vocab_size=None), tp)
    if model.num_layers % pp:
        rule = f"does not divide the {model.num_layers} layers of the model"
        raise ConfigError(f"--pipeline-model-parallel-size {pp} {rule}")
    refused = {
        "experts": any(layer.num_experts is not None for layer in layer_configs(model)),
        "--softmax-type learnable": model.softmax_type == "learnable",
    }
    for name, is_there in refused.items():
        if is_there:
            raise ConfigError(f"models with {name} cannot be written for Megatron yet, only read; use another format")
    if model.num_query_groups % tp:
        rule = f"does not divide {model.num_query_groups} query groups, as Megatron requires"
        raise ConfigError(f"--tensor-model-parallel-size {tp} {rule}")
    continues, weights = has_writable_optimizer(snapshot), snapshot.weights
    if continues:  # with fp32 masters the weights have the dtype of the run
        weights = {name: tensor.to(DTYPES[snapshot.config.precision.dtype]) for name, tensor in weights.items()}
    elif distributed_optimizer:
        raise ConfigError(
            "--use-distributed-optimizer: this checkpoint has no optimizer state that Megatron could continue (Adam's "
            "moments, fp32 masters, one learning rate); leave the flag out to write its weights"
        )
    args = write_args(snapshot.config, snapshot.state, model.padded_vocab_size, tp, pp) | {
        "transformer_impl": "transformer_engine" if transformer_engine else "local",
        "use_distributed_optimizer": distributed_optimizer,
        "ckpt_format": ckpt_format,
        "no_save_optim": not continues,
        "no_save_rng": True,
    }
    return MegatronRun(model, args, weights, continues)


def common_content(snapshot: Snapshot, run: MegatronRun) -> dict[str, Any]:
    """Return the entries of a checkpoint that are neither the model's nor the optimizer's."""
    content: dict[str, Any] = {
        "args": argparse.Namespace(**run.args),
        "checkpoint_version": CHECKPOINT_VERSION,
        "iteration": snapshot.step,
    }
    if run.continues:
        content |= {"opt_param_scheduler": _scheduler(snapshot), "num_floating_point_operations_so_far": 0}
    return content


def has_writable_optimizer(snapshot: Snapshot) -> bool:
    """Return True for a run with Adam's state, fp32 masters and one learning rate, which Megatron can continue."""
    state, weights = snapshot.state, snapshot.weights
    return (
        (state.get("optimizer") or {}).get("rule") == "adam"
        and state.get("schedules") is not None
        and snapshot.config.optimizer.decoupled_lr is None
        and all(f"{key}/{name}" in snapshot.tensors for key in MOMENTS for name in weights)
        and all(tensor.dtype == torch.float32 for tensor in weights.values())
    )


def is_decayed(spec: ParamSpec) -> bool:
    """Return True if Megatron decays a parameter: matrices."""
    return len(spec.shape) > 1 and not spec.name.endswith("bias")


def param_groups(snapshot: Snapshot) -> list[dict[str, Any]]:
    """Return the settings of the optimizer's groups, with weight decay and without, which need not have members."""
    state, adam = snapshot.state, snapshot.config.optimizer
    steps, lr, decay = state["optimizer"]["num_steps"], state["schedules"]["lr"], state["schedules"]["weight_decay"]
    return [
        {
            "step": steps, "lr": lr["max_lr"], "max_lr": lr["max_lr"], "min_lr": lr["min_lr"] or 0.0,
            "betas": (adam.adam_beta1, adam.adam_beta2), "eps": adam.adam_eps,
            "weight_decay": decay["start"] if decays else 0.0, "wd_mult": float(decays), "lr_mult": 1.0,
            "is_expert_parallel": False, "is_decoupled_lr": False, "default_config": True,
        }
        for decays in (True, False)
    ]  # fmt: skip


def optimizer_content(snapshot: Snapshot, inner: dict[str, Any]) -> dict[str, Any]:
    """Return the state of an optimizer around another one, with the loss scale of an fp16 run. inner: its state."""
    content = {"optimizer": inner}
    if snapshot.config.precision.dtype == "fp16":
        scaler = snapshot.state["optimizer"]["loss_scaler"]
        content["grad_scaler"] = {
            "scale": torch.tensor([scaler["scale"]]),
            "growth_tracker": scaler["good_steps"],
            "hysteresis_tracker": scaler["overflows_left"],
        }
    return content


def _scheduler(snapshot: Snapshot) -> dict[str, Any]:
    state = snapshot.state
    lr, decay = state["schedules"]["lr"], state["schedules"]["weight_decay"]
    return {
        "max_lr": lr["max_lr"], "min_lr": lr["min_lr"], "lr_decay_style": lr["style"],
        "lr_warmup_steps": lr["warmup_samples"], "lr_decay_steps": lr["decay_samples"],
        "num_steps": state["training"]["consumed_samples"], "start_wd": decay["start"], "end_wd": decay["end"],
        "wd_incr_style": decay["style"], "wd_incr_steps": decay["ramp_samples"],
    }  # fmt: skip


def with_padding(whole: Tensor, num_rows: int) -> Tensor:
    """Return a tensor with at least so many rows, the added ones zero, as a padded vocabulary has."""
    if whole.shape[0] >= num_rows:
        return whole
    return torch.cat([whole, whole.new_zeros(num_rows - whole.shape[0], *whole.shape[1:])])
