"""Learning rate and weight decay as pure functions of the samples (sequences) consumed before a step.

Shapes and increments are Megatron's, so that its curves are reproduced. Counting samples makes them independent of the
batch size and its ramp-up.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from megapipe.config.training import OptimizerConfig, TrainingConfig
from megapipe.errors import ConfigError


def _half_cosine(ratio: float) -> float:
    return 0.5 * (math.cos(math.pi * ratio) + 1.0)


# remaining share of (lr - min_lr) after `ratio` of the decay
DECAY_SHAPES: dict[str, Callable[[float], float]] = {"linear": lambda ratio: 1.0 - ratio, "cosine": _half_cosine}

# the same for the last phase of warm-up, stable, decay (WSD, Hu et al. 2024, arXiv:2404.06395)
WSD_SHAPES: dict[str, Callable[[float], float]] = {
    **DECAY_SHAPES,
    "exponential": lambda ratio: 2.0 * 0.5**ratio - 1.0,
    "minus_sqrt": lambda ratio: 1.0 - math.sqrt(ratio),
}

# share of the way from the first to the last weight decay
WEIGHT_DECAY_SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda ratio: ratio,
    "cosine": lambda ratio: _half_cosine(1.0 - ratio),
}


@dataclass(frozen=True)
class Rates:
    """Rates of one step. decoupled_lr: of embedding and output layer; None for lr. weight_decay: of matrices."""

    lr: float
    weight_decay: float
    decoupled_lr: float | None = None

    def of(self, decays: bool, is_decoupled: bool) -> tuple[float, float]:
        """Return learning rate and weight decay of parameters: whether they decay and have the decoupled rate."""
        lr = self.decoupled_lr if is_decoupled and self.decoupled_lr is not None else self.lr
        return lr, self.weight_decay if decays else 0.0


@dataclass(frozen=True)
class LrSchedule:
    """Learning rate: linear warm-up from init_lr to max_lr, then a decay to min_lr at decay_samples.

    style: 'constant', 'linear', 'cosine', 'inverse-square-root' or 'WSD'. Lengths are in samples; the warm-up is part
    of the decay length.
    """

    max_lr: float
    min_lr: float = 0.0
    init_lr: float = 0.0
    style: str = "linear"
    warmup_samples: float = 0.0
    decay_samples: int = 1
    wsd_style: str = "exponential"
    wsd_samples: int = 0

    def __post_init__(self) -> None:
        for flag, lr in (("--min-lr", self.min_lr), ("--lr-warmup-init", self.init_lr)):
            if lr > self.max_lr:
                raise ConfigError(f"{flag} {lr} is above --lr {self.max_lr}")
        if self.warmup_samples >= self.decay_samples:
            raise ConfigError(
                f"the warm-up of {self.warmup_samples:g} samples is not shorter than the decay length of "
                f"{self.decay_samples}; shorten --lr-warmup-iters / -samples / -fraction or lengthen "
                "--lr-decay-iters / -samples"
            )
        if self.style == "WSD" and not 0 < self.wsd_samples <= self.decay_samples:
            raise ConfigError(
                f"WSD's last phase of {self.wsd_samples} samples must be positive and at most the decay length of "
                f"{self.decay_samples}; set --lr-wsd-decay-iters or --lr-wsd-decay-samples"
            )

    def __call__(self, consumed_samples: int) -> float:
        """Return the learning rate of the step that starts after consumed_samples."""
        if self.warmup_samples > 0 and consumed_samples <= self.warmup_samples:
            return self.init_lr + (self.max_lr - self.init_lr) * consumed_samples / self.warmup_samples
        if self.style == "constant":
            return self.max_lr
        if consumed_samples > self.decay_samples:
            return self.min_lr
        if self.style == "inverse-square-root":
            lr = self.max_lr * math.sqrt(max(self.warmup_samples, 1)) / math.sqrt(max(consumed_samples, 1))
            return max(self.min_lr, lr)
        if self.style == "WSD":
            into_last_phase = consumed_samples - (self.decay_samples - self.wsd_samples)
            share = WSD_SHAPES[self.wsd_style](into_last_phase / self.wsd_samples) if into_last_phase > 0 else 1.0
        else:
            ratio = (consumed_samples - self.warmup_samples) / (self.decay_samples - self.warmup_samples)
            share = DECAY_SHAPES[self.style](ratio)
        return self.min_lr + share * (self.max_lr - self.min_lr)


@dataclass(frozen=True)
class WeightDecaySchedule:
    """Weight decay over consumed samples: constant, or a 'linear' or 'cosine' ramp from `start` to `end`."""

    start: float
    end: float
    style: str = "constant"
    ramp_samples: int = 1

    def __post_init__(self) -> None:
        if self.style == "constant" and self.start != self.end:
            raise ConfigError(
                f"--start-weight-decay {self.start} and --end-weight-decay {self.end} differ, but "
                "--weight-decay-incr-style is constant; use linear or cosine"
            )

    def __call__(self, consumed_samples: int) -> float:
        """Return the weight decay of the step that starts after consumed_samples."""
        if self.style == "constant" or consumed_samples > self.ramp_samples:
            return self.end
        share = WEIGHT_DECAY_SHAPES[self.style](consumed_samples / self.ramp_samples)
        return self.start + share * (self.end - self.start)


def lr_schedule(optimizer: OptimizerConfig, training: TrainingConfig, decoupled: bool = False) -> LrSchedule:
    """Return the learning rate. decoupled: of embedding and output layer, which use --decoupled-lr if it is set.

    Raises ConfigError if --lr is not set, or for rates and lengths that contradict each other.
    """
    if optimizer.lr is None:
        raise ConfigError("--lr is not set")
    max_lr, min_lr = optimizer.lr, optimizer.min_lr
    if decoupled:
        max_lr = max_lr if optimizer.decoupled_lr is None else optimizer.decoupled_lr
        min_lr = min_lr if optimizer.decoupled_min_lr is None else optimizer.decoupled_min_lr
    batch = _batch(training)
    if optimizer.lr_decay_samples:
        decay = optimizer.lr_decay_samples
    elif optimizer.lr_decay_iters:
        decay = optimizer.lr_decay_iters * batch
    else:
        decay = _training_samples(training)
    if optimizer.lr_warmup_fraction is not None:
        warmup = optimizer.lr_warmup_fraction * decay
    else:
        warmup = float(optimizer.lr_warmup_samples or optimizer.lr_warmup_iters * batch)
    wsd = optimizer.lr_wsd_decay_samples or (optimizer.lr_wsd_decay_iters or 0) * batch
    init, style, wsd_style = optimizer.lr_warmup_init, optimizer.lr_decay_style, optimizer.lr_wsd_decay_style
    return LrSchedule(max_lr, min_lr, init, style, warmup, decay, wsd_style, wsd)


def weight_decay_schedule(optimizer: OptimizerConfig, training: TrainingConfig) -> WeightDecaySchedule:
    """Return the weight decay of matrices; its ramp lasts the whole training."""
    start = optimizer.weight_decay if optimizer.start_weight_decay is None else optimizer.start_weight_decay
    end = optimizer.weight_decay if optimizer.end_weight_decay is None else optimizer.end_weight_decay
    return WeightDecaySchedule(start, end, optimizer.weight_decay_incr_style, _training_samples(training))


def _training_samples(training: TrainingConfig) -> int:
    if training.train_samples:
        return training.train_samples
    if not training.train_iters:
        raise ConfigError("neither --train-iters nor --train-samples is set, so the length of the schedules is unknown")
    return training.train_iters * _batch(training)


def _batch(training: TrainingConfig) -> int:
    if training.global_batch_size is None:
        raise ValueError("global_batch_size is not set: call resolve on the training configuration first")
    return training.global_batch_size
