"""The metrics of a step or an evaluation, and their writers: console, metrics.jsonl, TensorBoard, Weights & Biases;
`Observer`: what the caller of `pretrain` can follow of a run, and ask of it, used by the Python API's Trainer.

Keys of the JSON form are stable: scripts read them.
"""

from __future__ import annotations

import errno
import json
import math
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar

import torch

from megapipe.config.config import Config
from megapipe.config.files import LOGGERS
from megapipe.errors import ConfigError
from megapipe.formatting import clock_text
from megapipe.gpu.kernels import Kernels
from megapipe.monitor.heartbeat import RankPace
from megapipe.plan.run_plan import RunPlan
from megapipe.profile.profile import Profile

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)  # a disk that may have room again is no wrong flag
WANDB_TIMEOUT_SECONDS = 20.0  # an unreachable server otherwise blocks for 100 s
TRAIN_SCALARS = (
    "loss lr grad_norm weight_decay loss_scale skipped_steps consumed_samples consumed_tokens global_batch_size "
    "params_norm num_zeros"
).split()
# of a row in metrics.jsonl, only with experts
OF_EXPERTS = ("expert_imbalance", "dropped_share", "router_losses", "expert_load", "router_losses_by_layer")
NONZERO_SCALARS = ("spike_rollbacks", "skipped_samples", "discarded_tokens")  # left out while they are 0
SPEED_SCALARS = ("step_seconds", "tokens_per_second", "tflops", "mfu", "bubble")


@dataclass(frozen=True)
class StepMetrics:
    """Everything logged about one step; rates are averages over the steps since the last line."""

    kind: ClassVar[str] = "step"
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
    tflops: float | None = None  # model TFLOP/s per rank, causal attention counted half
    mfu: float | None = None  # share of the device's peak, None if that is unknown
    bubble: float | None = None  # measured idle share of the pipeline
    predicted_bubble: float | None = None
    bubble_note: str = ""  # why it is not measured
    memory_bytes: int | None = None  # the largest over all ranks
    params_norm: float | None = None
    num_zeros: int | None = None
    norm_before: float | None = None  # of the update before, by which this one was clipped (--clip-grad-delay)
    spike_rollbacks: int = 0  # how often the run went back to a checkpoint
    skipped_samples: int = 0  # samples before this position that are left out
    discarded_tokens: int = 0  # trained on, then taken back
    mtp_losses: tuple[float, ...] = ()  # of each module of multi-token prediction, without its factor
    # of experts, None without them; by layer and expert only with --moe-per-layer-logging
    expert_imbalance: float | None = None  # largest load over the mean, in the worst layer
    dropped_share: float | None = None  # of the rows for experts, None without a capacity
    router_losses: dict[str, float] = field(default_factory=dict)  # with their coefficients, the mean over layers
    expert_load: dict[str, list[float]] = field(default_factory=dict)  # by layer, relative to the mean
    router_losses_by_layer: dict[str, dict[str, float]] = field(default_factory=dict)
    phases: dict[str, float] = field(default_factory=dict)

    def scalars(self) -> dict[str, float]:
        """Return the numbers under the names that TensorBoard and wandb show."""
        named = {f"train/{name}": getattr(self, name) for name in TRAIN_SCALARS}
        named |= {f"train/{name}": getattr(self, name) or None for name in NONZERO_SCALARS}
        named |= {f"speed/{name}": getattr(self, name) for name in SPEED_SCALARS}
        named |= {f"train/mtp_{number}_loss": loss for number, loss in enumerate(self.mtp_losses, 1)}
        named |= {"memory/bytes": self.memory_bytes}
        named |= {"moe/imbalance": self.expert_imbalance, "moe/dropped_share": self.dropped_share}
        named |= {f"moe/{name}": loss for name, loss in self.router_losses.items()}
        named |= {f"moe/imbalance_layer_{layer}": max(load) for layer, load in self.expert_load.items()}
        for name, by_layer in self.router_losses_by_layer.items():
            named |= {f"moe/{name}_layer_{layer}": loss for layer, loss in by_layer.items()}
        named |= {f"seconds/{name}": seconds for name, seconds in self.phases.items()}
        return {name: float(value) for name, value in named.items() if value is not None}

    def line(self) -> str:
        """Return the line for the console."""
        parts = [
            f"step {self.step:>{len(str(self.train_iters))}}/{self.train_iters}",
            f"loss {self.loss:.4f}",
            *_mtp_text(self.mtp_losses),
            f"lr {self.lr:.3e}",
            f"grad norm {self.grad_norm:.3f}",
            *([] if self.norm_before is None else [f"clipped by the last one's {self.norm_before:.3f}"]),
            f"{self.tokens_per_second:,.0f} tokens/s",
        ]
        planned = "" if self.predicted_bubble is None else f" (plan {self.predicted_bubble:.1%})"
        for value, text in (
            (self.tflops, "{:.1f} TFLOP/s"),
            (self.mfu, "MFU {:.1%}"),
            (self.bubble, "bubble {:.1%}" + planned),
            (self.loss_scale if self.loss_scale != 1.0 else None, "loss scale {:g}"),
            (self.skipped_steps or None, "skipped {}"),
            (self.spike_rollbacks or None, "spike rollbacks {}"),
            (self.params_norm, "params norm {:.3f}"),
            (self.num_zeros, "zeros {:,}"),
            (self.expert_imbalance, "expert imbalance {:.2f}"),
            (self.dropped_share, "dropped {:.1%}"),
            *((loss, name.replace("_", " ") + " {:.3g}") for name, loss in self.router_losses.items()),
        ):
            if value is not None:
                parts.append(text.format(value))
        text = " | ".join([*parts, f"{clock_text(self.seconds_left)} left"])
        if self.phases:
            text += "\n    " + "  ".join(f"{name} {seconds * 1e3:.1f} ms" for name, seconds in self.phases.items())
        return text


@dataclass(frozen=True)
class EvaluationMetrics:
    """The loss on held-out data. split: 'validation' or 'test'."""

    kind: ClassVar[str] = "evaluation"
    split: str
    step: int
    loss: float
    num_tokens: int
    seconds: float
    mtp_losses: tuple[float, ...] = ()  # of each module of multi-token prediction, not part of the loss

    def scalars(self) -> dict[str, float]:
        mtp = {f"{self.split}/mtp_{number}_loss": loss for number, loss in enumerate(self.mtp_losses, 1)}
        return {f"{self.split}/loss": self.loss} | mtp

    def line(self) -> str:
        text = (
            f"{self.split} loss after step {self.step}: {self.loss:.4f} nats a token (perplexity "
            f"{math.exp(min(self.loss, 50.0)):.2f}) over {self.num_tokens:,} tokens in {self.seconds:.1f} s"
        )
        return " | ".join([text, *_mtp_text(self.mtp_losses)])


def _finite(value: Any) -> Any:
    """Return a value with None for each NaN or infinity in it."""
    if isinstance(value, tuple | list):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _mtp_text(losses: tuple[float, ...]) -> list[str]:
    return [f"mtp loss {' '.join(f'{loss:.4f}' for loss in losses)}"] if losses else []


Metrics = StepMetrics | EvaluationMetrics


class Console:
    """One line per report, to standard output."""

    def write(self, metrics: Metrics) -> None:
        print(metrics.line(), flush=True)

    def close(self) -> None:
        sys.stdout.flush()


class JsonLines:
    """One JSON object per line; a resumed run appends. Lines that a full disk refuses are lost, those after are not."""

    def __init__(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._path, self._file = path, path.open("ab", buffering=0)  # no buffer, which would fail again when closed
        except OSError as error:
            way_out = "choose another --metrics-file or --save"
            raise ConfigError(f"metrics cannot be written to {path}: {error.strerror}; {way_out}") from error
        self._is_told = self._is_torn = False  # a torn line is ended by the next one

    def write(self, metrics: Metrics) -> None:
        # JSON has neither NaN nor infinity: they are written as null
        left_out = OF_EXPERTS if getattr(metrics, "expert_imbalance", None) is None else ()
        if not metrics.mtp_losses:
            left_out = (*left_out, "mtp_losses")
        clean = {k: _finite(v) for k, v in asdict(metrics).items() if k not in left_out}
        record = {"kind": metrics.kind, **clean, "time": time.time()}
        rest = b"\n" * self._is_torn + json.dumps(record, allow_nan=False).encode() + b"\n"
        whole = len(rest)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
            self._is_torn = False
        except OSError as error:
            self._is_torn |= len(rest) < whole
            if not self._is_told:
                text = f"{self._path} cannot be written to: {error.strerror}; training continues without these lines"
                print(text, file=sys.stderr)
            self._is_told = True

    def close(self) -> None:
        self._file.close()


def _import(module: str, package: str, flag: str) -> Any:
    """Import a library that is optional. Raises ConfigError without it."""
    try:
        return import_module(module)
    except ImportError as error:
        raise ConfigError(f"{flag} needs the package {package}: pip install 'megapipe[{package}]'") from error


class TensorBoard:
    """A torch SummaryWriter; imported only when asked for."""

    def __init__(self, directory: str) -> None:
        module = _import("torch.utils.tensorboard", "tensorboard", f"--tensorboard-dir {directory}")
        before = threading.excepthook

        def told(arguments: threading.ExceptHookArgs) -> None:
            # its thread keeps an error for the next write, which raises it: no traceback
            if not type(arguments.thread).__module__.startswith("tensorboard."):
                before(arguments)

        threading.excepthook = told
        self._failure: OSError | None = None
        try:
            self._writer: Any = module.SummaryWriter(directory)
        except OSError as error:
            if error.errno not in DISK_FULL:
                text = f"--tensorboard-dir {directory} cannot be written to: {error.strerror}; choose another one"
                raise ConfigError(text) from error
            self._failure = error

    def write(self, metrics: Metrics) -> None:
        if self._failure is not None:
            raise self._failure
        for name, value in metrics.scalars().items():
            self._writer.add_scalar(name, value, metrics.step)

    def close(self) -> None:
        if self._failure is None:
            self._writer.close()


class WeightsAndBiases:
    """A wandb run; offline if its server does not answer, and never the reason that training stops."""

    def __init__(
        self,
        project: str,
        name: str | None,
        directory: str | None,
        configuration: dict[str, Any],
        entity: str | None = None,
    ) -> None:
        wandb = _import("wandb", "wandb", f"--wandb-project {project}")
        arguments = {"project": project, "entity": entity, "name": name, "dir": directory, "config": configuration}
        self._run: Any = None
        offline = "continuing offline (wandb sync uploads later)"
        for mode, failed in ((None, offline), ("offline", "training continues without it")):
            try:
                settings = wandb.Settings(init_timeout=WANDB_TIMEOUT_SECONDS, silent=True)
                self._run = wandb.init(**arguments, mode=mode, settings=settings)
                break
            except Exception as error:
                first_line = (str(error).splitlines() or [""])[0]
                print(f"wandb did not start: {type(error).__name__}: {first_line}; {failed}", file=sys.stderr)

    def write(self, metrics: Metrics) -> None:
        if self._run is not None:
            self._run.log(metrics.scalars(), step=metrics.step)

    def close(self) -> None:
        """Finish in a thread, which is left behind if that hangs."""

        def finish() -> None:
            try:
                self._run.finish()
            except Exception as error:
                print(f"wandb did not finish: {type(error).__name__}: {error}", file=sys.stderr)

        if self._run is not None:
            thread = threading.Thread(target=finish, daemon=True)
            thread.start()
            thread.join(WANDB_TIMEOUT_SECONDS)


class Registered:
    """The logger of an extension. One that cannot be made is left out, like one that fails later."""

    def __init__(self, name: str, config: Config) -> None:
        self.name, self._logger = f"--logger {name}", None
        try:
            self._logger = LOGGERS[name](config)
        except Exception as error:
            print(
                f"{self.name} did not start: {type(error).__name__}: {error}; training continues without it",
                file=sys.stderr,
            )

    def write(self, metrics: Metrics) -> None:
        if self._logger is not None:
            self._logger.log(metrics.step, metrics.scalars())

    def close(self) -> None:
        close = getattr(self._logger, "close", None)
        if close is not None:
            close()


Writer = Console | JsonLines | TensorBoard | WeightsAndBiases | Registered


@dataclass(frozen=True)
class StepSummary:
    """The result of one step, the same on every rank.

    loss: the mean over the global batch, in nats per token. grad_norm: before clipping. is_skipped: the weights were
    left alone, because a gradient overflowed. consumed_*: since the start of the run, this step included.
    """

    step: int
    loss: float
    lr: float
    grad_norm: float
    is_skipped: bool
    consumed_samples: int
    consumed_tokens: int


@dataclass(frozen=True)
class TrainingResult:
    """The end of a run, the same on every rank.

    step: the last one. reason: why the run ended. is_complete: it made all steps that were asked for. loss: of the last
    step, None if none was made. validation_loss, test_loss: of the last evaluation, None without one.
    """

    step: int
    reason: str
    is_complete: bool
    loss: float | None = None
    validation_loss: float | None = None
    test_loss: float | None = None


class Observer:
    """Methods that the training loop calls on every rank, in the same order; these do nothing.

    wants_stop: set to True, on any rank, to end training after the step; ranks agree on it.
    """

    wants_stop = False

    def on_kernels(self, plan: RunPlan, kernels: Kernels, device: torch.device, backend: str) -> Sequence[str]:
        """Called once the ranks have met. Returns lines on which library computes what. backend: of communicators."""
        return ()

    def on_start(self, step: int) -> None:
        """Called before the first step. step: the last one made before, 0 for a new run."""

    def on_step_end(self, summary: StepSummary) -> None:
        """Called after every step whose loss is finite."""

    def on_evaluation(self, metrics: EvaluationMetrics) -> None:
        """Called after every evaluation."""

    def on_profile(self, profile: Profile) -> tuple[str, str]:
        """Called on rank 0 with the steps of --profile-pipeline. Returns a text for the log, and a Chrome trace, which
        is not written if it is empty.
        """
        return "", ""

    def on_paces(
        self, paces: Sequence[RankPace], groups: Mapping[str, Sequence[tuple[int, ...]]], names: Sequence[str]
    ) -> list[str]:
        """Called at log lines with --log-straggler. Returns a sentence on each rank, link or group that is slow.

        paces: by global rank. groups: all groups of more than one rank, by kind. names: of the ranks, with place and
        host.
        """
        return []

    def on_save(self, folder: Path) -> None:
        """Called when a checkpoint is complete, with --async-save some steps after its own."""

    def on_end(self, result: TrainingResult) -> None:
        """Called at the end of a run that no error has ended."""
