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
from megapipe.config.layers import LayerConfig, layer_configs
from megapipe.errors import ConfigError
from megapipe.extras.convert.megatron import (
    INPUT_NORM,
    MLP_NORM,
    MOMENTS,
    MegatronGrid,
    with_neighbours,
    write_args,
)
from megapipe.extras.convert.snapshot import DTYPES, EXPERT_BIAS, LazyTensor, Snapshot
from megapipe.sharding.spec import ParamSpec

CHECKPOINT_VERSION = 3.0  # of Megatron's format, since q, k and v are interleaved by query group


def extra_state_modules(layer: LayerConfig, transformer_engine: bool) -> list[str]:
    """Return the modules of a layer that have an extra state, without its experts' linears."""
    names = ["linear_proj"]
    if not layer.multi_latent_attention:
        names.append("linear_qkv")
    else:
        queries = ["linear_q_proj"] if layer.q_lora_rank is None else ["linear_q_down_proj", "linear_q_up_proj"]
        names += [*queries, "linear_kv_down_proj", "linear_kv_up_proj"]
    norms = []
    if transformer_engine:
        names.append("core_attention")
        if layer.qk_layernorm and not layer.multi_latent_attention:
            names += ["q_layernorm", "k_layernorm"]
        norms += [INPUT_NORM] if layer.multi_latent_attention else []
        norms += [MLP_NORM] if layer.num_experts is not None else []
    if layer.num_experts is None:
        block = "mlp."
    else:
        block = "" if layer.moe_shared_expert_intermediate_size is None else "mlp.shared_experts."
    linears = [f"{block}linear_fc1", f"{block}linear_fc2"] if block else []
    return [*(f"self_attention.{name}" for name in names), *(norm[:-1] for norm in norms), *linears]


@dataclass(frozen=True)
class MegatronRun:
    """The parts of a run that both formats hold, in Megatron's terms."""

    model: ResolvedModelConfig  # with its padded vocabulary
    args: Mapping[str, Any]
    snapshot: Snapshot  # with Megatron's order of channels
    weights: Mapping[str, LazyTensor]  # by our names, in the dtype of the run if it continues
    continues: bool  # its optimizer state is written


def prepare(
    snapshot: Snapshot, ckpt_format: str, grid: MegatronGrid, transformer_engine: bool, distributed_optimizer: bool
) -> MegatronRun:
    """Return a run in Megatron's terms. Raises ConfigError naming what does not fit or cannot be expressed."""
    model = resolve_model(dataclasses.replace(snapshot.config.model, padded_vocab_size=None), grid.tp)
    check_grid(model, grid, ckpt_format, transformer_engine)
    if model.multi_latent_attention:
        snapshot = dataclasses.replace(snapshot, tensors=with_neighbours(model, snapshot.tensors, to_theirs=True))
    continues, weights = has_writable_optimizer(snapshot), snapshot.weights
    if continues:  # with fp32 masters the weights have the dtype of the run
        dtype = DTYPES[snapshot.config.precision.dtype]
        weights = {name: t if name.endswith(EXPERT_BIAS) else t.to(dtype) for name, t in weights.items()}
    elif distributed_optimizer:
        raise ConfigError(
            "--use-distributed-optimizer: this checkpoint has no optimizer state that Megatron could continue (Adam's "
            "moments, fp32 masters, one learning rate); leave the flag out to write its weights"
        )
    args = write_args(snapshot.config, snapshot.state, model.padded_vocab_size, grid) | {
        "transformer_impl": "transformer_engine" if transformer_engine else "local",
        "use_distributed_optimizer": distributed_optimizer,
        "ckpt_format": ckpt_format,
        "no_save_optim": not continues,
        "no_save_rng": True,
        "moe_grouped_gemm": transformer_engine and model.num_experts is not None,
    }
    return MegatronRun(model, args, snapshot, weights, continues)


def check_grid(model: ResolvedModelConfig, grid: MegatronGrid, ckpt_format: str, transformer_engine: bool) -> None:
    """Raise ConfigError naming the size of the grid that does not divide the model."""
    flags = {"tp": "--tensor-model-parallel-size", "pp": "--pipeline-model-parallel-size"}
    flags |= {"ep": "--expert-model-parallel-size", "etp": "--expert-tensor-parallel-size"}
    expert = next((layer for layer in layer_configs(model) if layer.num_experts is not None), None)
    rules = [("pp", model.num_layers, "layers of the model"), ("tp", model.num_query_groups, "query groups")]
    if expert is None and (grid.ep > 1 or grid.experts_tp is not None):
        raise ConfigError(f"{flags['ep' if grid.ep > 1 else 'etp']} is for models with experts; leave it out")
    if expert is not None:
        rules += [("ep", expert.num_experts or 1, "experts"), ("etp", expert.expert_ffn_size, "channels of an expert")]
    if expert is not None and ckpt_format == "torch":  # the names of files
        rules.append(("etp", grid.tp, "ranks of tp in format torch; write torch_dist, or use a divisor"))
    if model.multi_latent_attention and not transformer_engine:
        rows = model.kv_lora_rank + model.qk_pos_emb_head_dim
        rules += [
            ("tp", rows, "rows of linear_kv_down_proj"),
            ("tp", model.q_lora_rank or 0, "rows of linear_q_down_proj"),
        ]
    for axis, size, what in rules:
        if size % getattr(grid, axis):
            raise ConfigError(f"{flags[axis]} {getattr(grid, axis)} does not divide the {size} {what}")


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
        and all(
            f"{key}/{name}" in snapshot.tensors for key in MOMENTS for name in weights if not name.endswith(EXPERT_BIAS)
        )
        and all(tensor.dtype == torch.float32 for tensor in weights.values())
    )


def is_decayed(spec: ParamSpec) -> bool:
    """Return True if Megatron decays a parameter: matrices."""
    return len(spec.shape) > 1 and not spec.name.endswith("bias")


def param_groups(snapshot: Snapshot, of_experts: bool = False) -> list[dict[str, Any]]:
    """Return the settings of an optimizer's groups, with weight decay and without, which need not have members.

    of_experts: those of the second optimizer, which a run with several ranks of ep has for its experts.
    """
    state, adam = snapshot.state, snapshot.config.optimizer
    steps, lr, decay = state["optimizer"]["num_steps"], state["schedules"]["lr"], state["schedules"]["weight_decay"]
    kinds = (True,) if of_experts and not snapshot.config.model.add_bias_linear else (True, False)
    return [
        {
            "step": steps, "lr": lr["max_lr"], "max_lr": lr["max_lr"], "min_lr": lr["min_lr"] or 0.0,
            "betas": (adam.adam_beta1, adam.adam_beta2), "eps": adam.adam_eps,
            "weight_decay": decay["start"] if decays else 0.0, "wd_mult": float(decays), "lr_mult": 1.0,
            "is_expert_parallel": of_experts, "is_decoupled_lr": False, "default_config": True,
        }
        for decays in kinds
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
