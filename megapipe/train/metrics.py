"""What a step reports, and how it reads on the console. Keys of the JSON form are stable: scripts read them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class StepMetrics:
    """Everything logged about one step (averages over the steps since the last line where a rate is meant).

    tflops: model TFLOP/s per rank, causal attention counted half; mfu: share of the device's peak, None where the peak is not known.
    rolled_back_steps: updates of this run taken back by --optimizer-post-validation, None without it.
    spike_rollbacks, skipped_samples, discarded_tokens: how often the run went back to a checkpoint, samples before this position that
    are left out, tokens that were trained on in vain. bubble: measured idle share of the pipeline; bubble_note: why there is none.
    memory_bytes: the largest over all ranks.
    """

    step: int
    train_iters: int
    consumed_samples: int
    consumed_tokens: int
    global_batch_size: int
    loss: float
    lr: float
    grad_norm: float
    weight_decay: float
    loss_scale: float
    skipped_steps: int
    step_seconds: float
    tokens_per_second: float
    seconds_left: float
    tflops: float | None = None
    mfu: float | None = None
    bubble: float | None = None
    predicted_bubble: float | None = None
    bubble_note: str = ""
    memory_bytes: int | None = None
    params_norm: float | None = None
    num_zeros: int | None = None
    rolled_back_steps: int | None = None
    spike_rollbacks: int = 0
    skipped_samples: int = 0
    discarded_tokens: int = 0
    phases: dict[str, float] = field(default_factory=dict)

    def scalars(self) -> dict[str, float]:
        """Numbers only, under the names that TensorBoard and wandb show."""
        named: dict[str, Any] = {
            "train/loss": self.loss,
            "train/lr": self.lr,
            "train/grad_norm": self.grad_norm,
            "train/weight_decay": self.weight_decay,
            "train/loss_scale": self.loss_scale,
            "train/skipped_steps": self.skipped_steps,
            "train/consumed_samples": self.consumed_samples,
            "train/consumed_tokens": self.consumed_tokens,
            "train/global_batch_size": self.global_batch_size,
            "train/rolled_back_steps": self.rolled_back_steps,
            "train/spike_rollbacks": self.spike_rollbacks or None,
            "train/skipped_samples": self.skipped_samples or None,
            "train/discarded_tokens": self.discarded_tokens or None,
            "train/params_norm": self.params_norm,
            "train/num_zeros": self.num_zeros,
            "speed/step_seconds": self.step_seconds,
            "speed/tokens_per_second": self.tokens_per_second,
            "speed/tflops": self.tflops,
            "speed/mfu": self.mfu,
            "speed/bubble": self.bubble,
            "memory/bytes": self.memory_bytes,
            **{f"seconds/{name}": seconds for name, seconds in self.phases.items()},
        }
        return {name: float(value) for name, value in named.items() if value is not None}

    def line(self) -> str:
        """One line for a person."""
        parts = [
            f"step {self.step:>{len(str(self.train_iters))}}/{self.train_iters}",
            f"loss {self.loss:.4f}",
            f"lr {self.lr:.3e}",
            f"grad norm {self.grad_norm:.3f}",
            f"{self.tokens_per_second:,.0f} tokens/s",
        ]
        if self.tflops is not None:
            parts.append(f"{self.tflops:.1f} TFLOP/s")
        if self.mfu is not None:
            parts.append(f"MFU {self.mfu:.1%}")
        if self.bubble is not None:
            parts.append(f"bubble {self.bubble:.1%} (plan {self.predicted_bubble:.1%})")
        if self.loss_scale != 1.0:
            parts.append(f"loss scale {self.loss_scale:g}")
        if self.skipped_steps:
            parts.append(f"skipped {self.skipped_steps}")
        if self.rolled_back_steps:
            parts.append(f"rolled back {self.rolled_back_steps}")
        if self.spike_rollbacks:
            parts.append(f"went back {self.spike_rollbacks}")
        if self.params_norm is not None:
            parts.append(f"params norm {self.params_norm:.3f}")
        if self.num_zeros is not None:
            parts.append(f"zeros {self.num_zeros:,}")
        parts.append(f"{clock(self.seconds_left)} left")
        text = " | ".join(parts)
        if self.phases:
            text += "\n    " + "  ".join(f"{name} {seconds * 1e3:.1f} ms" for name, seconds in self.phases.items())
        return text


@dataclass(frozen=True)
class EvaluationMetrics:
    """The loss on held-out data. split: 'validation' or 'test'."""

    split: str
    step: int
    loss: float
    num_tokens: int
    seconds: float

    def scalars(self) -> dict[str, float]:
        return {f"{self.split}/loss": self.loss}


def clock(seconds: float) -> str:
    """1:02:03, or 2:03 below an hour."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def human_bytes(count: float) -> str:
    """1.5 GiB."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 1024 or unit == "TiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    raise AssertionError
