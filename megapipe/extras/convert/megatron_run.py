"""A run of Megatron, however its tensors were stored, as a Snapshot that goes on: position, schedules, loss scale, configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megapipe.config.config import Config
from megapipe.extras.convert.megatron_optimizer import OptimizerState
from megapipe.extras.convert.megatron_settings import read_schedules
from megapipe.extras.convert.snapshot import LazyTensor, Snapshot, fresh_state


def run_snapshot(
    config: Config,
    tensors: Mapping[str, LazyTensor],
    args: Mapping[str, Any],
    content: Mapping[str, Any],
    optimizer: OptimizerState | None,
) -> Snapshot:
    """The Snapshot of tensors under our names; without an optimizer, of a model at step 0. content: of a file, for what is no tensor."""
    state = fresh_state(config.precision.dtype)
    if optimizer is not None:
        step, samples = (
            int(content.get("iteration", args.get("iteration", 0))),
            int(args.get("consumed_train_samples") or 0),
        )
        state["training"] = {
            "step": step,
            "consumed_samples": samples,
            "consumed_tokens": samples * config.model.seq_length,
            "skipped_steps": max(0, step - optimizer.num_steps),
        }
        state["optimizer"] = {
            "num_steps": optimizer.num_steps,
            "loss_scaler": _loss_scaler(optimizer.scaler),
            "rule": config.optimizer.optimizer,
        }
        state["random"] = {"seed": config.training.seed}
        if content.get("opt_param_scheduler") is not None:
            state["schedules"] = read_schedules(content["opt_param_scheduler"], args)
    return Snapshot(config, tensors, state)


def _loss_scaler(theirs: Mapping[str, Any] | None) -> dict[str, float | int]:
    """Ours, of Megatron's dynamic scaler, which counts as ours does; a constant scale has no state."""
    if not theirs or "growth_tracker" not in theirs:
        return {"scale": 1.0, "good_steps": 0, "overflows_left": 1}
    return {
        "scale": float(theirs["scale"]),
        "good_steps": int(theirs["growth_tracker"]),
        "overflows_left": int(theirs["hysteresis_tracker"]),
    }
