"""`Schedules`: learning rates and weight decay over the consumed samples, and which settings hold after resuming."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from megapipe.config.config import Config
from megapipe.config.training import OptimizerConfig
from megapipe.errors import CheckpointError, ConfigError
from megapipe.optimizer.schedule import (
    LrSchedule,
    WeightDecaySchedule,
    decoupled_lr_schedule,
    lr_schedule,
    weight_decay_schedule,
)
from megapipe.train.step import Rates

FLAGS = {
    "lr.max_lr": "--lr",
    "lr.min_lr": "--min-lr",
    "lr.init_lr": "--lr-warmup-init",
    "lr.style": "--lr-decay-style",
    "lr.warmup_samples": "--lr-warmup-iters, -samples or -fraction",
    "lr.decay_samples": "--lr-decay-iters or -samples (by default the length of the training)",
    "lr.wsd_style": "--lr-wsd-decay-style",
    "lr.wsd_samples": "--lr-wsd-decay-iters or -samples",
    "decoupled_lr.max_lr": "--decoupled-lr",
    "decoupled_lr.min_lr": "--decoupled-min-lr",
    "weight_decay.start": "--start-weight-decay or --weight-decay",
    "weight_decay.end": "--end-weight-decay or --weight-decay",
    "weight_decay.style": "--weight-decay-incr-style",
    "weight_decay.ramp_samples": "--train-iters or --train-samples",
}
UNUSED: dict[str, dict[str, tuple[str, ...]]] = {  # settings that a style does not use
    "lr": {"constant": ("decay_samples", "wsd_style", "wsd_samples", "min_lr"), "WSD": ()},
    "weight_decay": {"constant": ("ramp_samples",)},
}
UNUSED_OTHERWISE = {"lr": ("wsd_style", "wsd_samples"), "weight_decay": ()}


@dataclass(frozen=True)
class Schedules:
    """Rates over the run. lr: for all parameters but embedding and output layer, which use decoupled_lr."""

    lr: LrSchedule
    decoupled_lr: LrSchedule
    weight_decay: WeightDecaySchedule

    @classmethod
    def of(cls, config: Config) -> Schedules:
        """Return the schedules of a resolved configuration. Raises ConfigError."""
        optimizer, training = config.optimizer, config.training
        return cls(
            lr_schedule(optimizer, training),
            decoupled_lr_schedule(optimizer, training),
            weight_decay_schedule(optimizer, training),
        )

    def rates(self, consumed_samples: int) -> Rates:
        """Return the rates of the step that starts after consumed_samples."""
        return Rates(
            self.lr(consumed_samples), self.weight_decay(consumed_samples), self.decoupled_lr(consumed_samples)
        )

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Schedules:
        return cls(
            LrSchedule(**values["lr"]),
            LrSchedule(**values["decoupled_lr"]),
            WeightDecaySchedule(**values["weight_decay"]),
        )


def schedules_to_resume(own: Schedules, saved: Schedules, optimizer: OptimizerConfig, where: str) -> Schedules:
    """Choose by Megatron's rule: one of two flags says whose settings hold; without either they must agree.

    Raises ConfigError if both flags are given, CheckpointError with every setting that differs if neither is.
    """
    if optimizer.override_opt_param_scheduler and optimizer.use_checkpoint_opt_param_scheduler:
        raise ConfigError(
            "--override-opt-param-scheduler and --use-checkpoint-opt-param-scheduler contradict each other: give one"
        )
    if optimizer.override_opt_param_scheduler:
        return own
    if optimizer.use_checkpoint_opt_param_scheduler:
        return saved
    lines = [f"  {FLAGS[key]}: {here} here, {there} in the checkpoint" for key, here, there in _differences(own, saved)]
    if lines:
        raise CheckpointError(
            f"the schedules differ from those that {where} was trained with:\n"
            + "\n".join(lines)
            + "\nSet them alike, or give --override-opt-param-scheduler to use those given here or "
            "--use-checkpoint-opt-param-scheduler with the checkpoint's"
        )
    return saved


def _differences(own: Schedules, saved: Schedules) -> list[tuple[str, Any, Any]]:
    """Return the settings that differ and are used: (key of FLAGS, here, in the checkpoint)."""
    here, there = own.to_dict(), saved.to_dict()
    found = []
    for part, settings in here.items():
        rule = part.removeprefix("decoupled_")
        unused = UNUSED[rule].get(settings["style"], UNUSED_OTHERWISE[rule])
        for name, value in settings.items():
            key = f"{part}.{name}"
            if key in FLAGS and name not in unused and value != there[part][name]:
                found.append((key, value, there[part][name]))
    return found
