"""The metrics of a step or an evaluation, and the writers that take them: console, metrics.jsonl, TensorBoard, Weights
& Biases.

Keys of the JSON form are stable: scripts read them.
"""

from __future__ import annotations

import json
import math
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

from megapipe.errors import ConfigError
from megapipe.formatting import clock_text

WANDB_TIMEOUT_SECONDS = 20.0  # an unreachable server otherwise blocks for 100 s


@dataclass(frozen=True)
class StepMetrics:
    """Everything logged about one step; rates are averages over the steps since the last line.

    tflops: model TFLOP/s per rank, causal attention counted half; mfu: share of the device's peak, None if the peak is
    unknown. rolled_back_steps: updates of this run taken back by --optimizer-post-validation, None without it.
    spike_rollbacks: how often the run went back to a checkpoint. skipped_samples: samples before this position that are
    left out. discarded_tokens: trained on, then taken back. bubble: measured idle share of the pipeline; bubble_note:
    why it is not measured. memory_bytes: the largest over all ranks.
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
        """Return the numbers under the names that TensorBoard and wandb show."""
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
        """Return the line for the console."""
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
            parts.append(f"spike rollbacks {self.spike_rollbacks}")
        if self.params_norm is not None:
            parts.append(f"params norm {self.params_norm:.3f}")
        if self.num_zeros is not None:
            parts.append(f"zeros {self.num_zeros:,}")
        parts.append(f"{clock_text(self.seconds_left)} left")
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


class Writer(Protocol):
    """A destination of metrics."""

    def step(self, metrics: StepMetrics) -> None: ...
    def evaluation(self, metrics: EvaluationMetrics) -> None: ...
    def close(self) -> None: ...


class Console:
    """One line per report, to standard output."""

    def step(self, metrics: StepMetrics) -> None:
        print(metrics.line(), flush=True)

    def evaluation(self, metrics: EvaluationMetrics) -> None:
        perplexity = math.exp(min(metrics.loss, 50.0))
        print(
            f"{metrics.split} loss after step {metrics.step}: {metrics.loss:.4f} nats a token "
            f"(perplexity {perplexity:.2f}) over {metrics.num_tokens:,} tokens in {metrics.seconds:.1f} s",
            flush=True,
        )

    def close(self) -> None:
        sys.stdout.flush()


class JsonLines:
    """One JSON object per line; a resumed run appends."""

    def __init__(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"metrics cannot be written to {path}: {error.strerror}; choose another --metrics-file or --save"
            ) from error

    def step(self, metrics: StepMetrics) -> None:
        self._write({"kind": "step", **asdict(metrics)})

    def evaluation(self, metrics: EvaluationMetrics) -> None:
        self._write({"kind": "evaluation", **asdict(metrics)})

    def close(self) -> None:
        self._file.close()

    def _write(self, record: dict[str, Any]) -> None:
        # JSON has neither NaN nor infinity: they are written as null
        clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()}
        self._file.write(json.dumps(clean | {"time": time.time()}, allow_nan=False) + "\n")
        self._file.flush()


class _Scalars:
    """A writer of named scalars."""

    def step(self, metrics: StepMetrics) -> None:
        self._write(metrics.scalars(), metrics.step)

    def evaluation(self, metrics: EvaluationMetrics) -> None:
        self._write(metrics.scalars(), metrics.step)

    def _write(self, scalars: dict[str, float], step: int) -> None:
        raise NotImplementedError


class TensorBoard(_Scalars):
    """A torch SummaryWriter; imported only when asked for."""

    def __init__(self, directory: str) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ConfigError(
                f"--tensorboard-dir {directory} needs the package tensorboard: pip install 'megapipe[tensorboard]'"
            ) from error
        try:
            self._writer: Any = SummaryWriter(directory)
        except OSError as error:
            raise ConfigError(
                f"--tensorboard-dir {directory} cannot be written to: {error.strerror}; choose another one"
            ) from error

    def close(self) -> None:
        self._writer.close()

    def _write(self, scalars: dict[str, float], step: int) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)


class WeightsAndBiases(_Scalars):
    """A wandb run; offline if its server does not answer, and never the reason that training stops."""

    def __init__(self, project: str, name: str | None, directory: str | None, configuration: dict[str, Any]) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ConfigError(
                f"--wandb-project {project} needs the package wandb: pip install 'megapipe[wandb]'"
            ) from error
        self._wandb: Any = wandb
        self._run = self._start({"project": project, "name": name, "dir": directory, "config": configuration})

    def close(self) -> None:
        if self._run is not None:
            _call_with_timeout(WANDB_TIMEOUT_SECONDS, self._run.finish)

    def _start(self, arguments: dict[str, Any]) -> Any:
        for mode in (None, "offline"):
            try:
                settings = self._wandb.Settings(init_timeout=WANDB_TIMEOUT_SECONDS, silent=True)
                return self._wandb.init(**arguments, mode=mode, settings=settings)
            except Exception as error:
                after = (
                    "continuing offline (wandb sync uploads later)" if mode is None else "training continues without it"
                )
                first_line = (str(error).splitlines() or [""])[0]
                print(f"wandb did not start: {type(error).__name__}: {first_line}; {after}", file=sys.stderr)
        return None

    def _write(self, scalars: dict[str, float], step: int) -> None:
        if self._run is not None:
            self._run.log(scalars, step=step)


def _call_with_timeout(seconds: float, call: Callable[[], Any]) -> None:
    """Run a call that may hang or fail in a thread, and leave that thread behind after `seconds`."""

    def guarded() -> None:
        try:
            call()
        except Exception as error:
            print(f"wandb did not finish: {type(error).__name__}: {error}", file=sys.stderr)

    thread = threading.Thread(target=guarded, daemon=True)
    thread.start()
    thread.join(seconds)
