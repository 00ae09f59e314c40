"""Where metrics go: console, metrics.jsonl, TensorBoard, Weights & Biases. All of them on one rank, none of them able to stop training."""

from __future__ import annotations

import json
import math
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from megapipe.checkpoint.rollbacks import Rollback
from megapipe.config.config import Config
from megapipe.errors import ConfigError
from megapipe.train.metrics import EvaluationMetrics, StepMetrics
from megapipe.train.run_log import RunLog

WANDB_START_SECONDS = 20.0  # an unreachable server otherwise blocks for 100 s


class Writer(Protocol):
    """A place for metrics."""

    def step(self, metrics: StepMetrics) -> None: ...
    def evaluation(self, metrics: EvaluationMetrics) -> None: ...
    def close(self) -> None: ...


class Console:
    """One line a report, to standard output."""

    def step(self, metrics: StepMetrics) -> None:
        print(metrics.line(), flush=True)

    def evaluation(self, metrics: EvaluationMetrics) -> None:
        perplexity = math.exp(min(metrics.loss, 50.0))
        print(
            f"{metrics.split} loss after step {metrics.step}: {metrics.loss:.4f} nats a token (perplexity {perplexity:.2f}) "
            f"over {metrics.num_tokens:,} tokens in {metrics.seconds:.1f} s",
            flush=True,
        )

    def close(self) -> None:
        sys.stdout.flush()


class JsonLines:
    """One JSON object a line; a resumed run appends."""

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
        # JSON has no NaN: a loss that is none is written as null
        clean = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in record.items()} | {
            "time": time.time()
        }
        self._file.write(json.dumps(clean, allow_nan=False) + "\n")
        self._file.flush()


class TensorBoard:
    """torch's SummaryWriter; imported only when asked for."""

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

    def step(self, metrics: StepMetrics) -> None:
        self._write(metrics.scalars(), metrics.step)

    def evaluation(self, metrics: EvaluationMetrics) -> None:
        self._write(metrics.scalars(), metrics.step)

    def close(self) -> None:
        self._writer.close()

    def _write(self, scalars: dict[str, float], step: int) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)


class WeightsAndBiases:
    """A wandb run; offline where its server does not answer, and never the reason that training stops."""

    def __init__(self, project: str, name: str | None, directory: str | None, configuration: dict[str, Any]) -> None:
        try:
            import wandb
        except ImportError as error:
            raise ConfigError(
                f"--wandb-project {project} needs the package wandb: pip install 'megapipe[wandb]'"
            ) from error
        self._wandb: Any = wandb
        arguments = {"project": project, "name": name, "dir": directory, "config": configuration}
        self._run = self._start(arguments)

    def step(self, metrics: StepMetrics) -> None:
        self._write(metrics.scalars(), metrics.step)

    def evaluation(self, metrics: EvaluationMetrics) -> None:
        self._write(metrics.scalars(), metrics.step)

    def close(self) -> None:
        if self._run is not None:
            _within(WANDB_START_SECONDS, self._run.finish)

    def _start(self, arguments: dict[str, Any]) -> Any:
        for mode in (None, "offline"):
            try:
                settings = self._wandb.Settings(init_timeout=WANDB_START_SECONDS, silent=True)
                return self._wandb.init(**arguments, mode=mode, settings=settings)
            except Exception as error:
                after = "going on offline (wandb sync uploads later)" if mode is None else "training goes on without it"
                print(
                    f"wandb did not start: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}; {after}",
                    file=sys.stderr,
                )
        return None

    def _write(self, scalars: dict[str, float], step: int) -> None:
        if self._run is not None:
            self._run.log(scalars, step=step)


class Writers:
    """All writers of this rank; empty on ranks that do not log. One that fails is left out from then on, and said so once.

    log: the run's record, which gets what is said and which writer failed.
    """

    def __init__(self, writers: Sequence[Writer], log: RunLog | None = None) -> None:
        self._writers = list(writers)
        self._logs_here = bool(writers)
        self._log = log or RunLog(None)

    def step(self, metrics: StepMetrics) -> None:
        self._each(lambda writer: writer.step(metrics))

    def evaluation(self, metrics: EvaluationMetrics) -> None:
        self._each(lambda writer: writer.evaluation(metrics))

    def say(self, text: str) -> None:
        """A line for the person at the console."""
        if self._logs_here:
            print(text, flush=True)
            self._log.note(text)

    def stragglers(self, step: int, told: Sequence[str], slowest: Sequence[Mapping[str, Any]]) -> None:
        """For the run's record."""
        if self._logs_here:
            self._log.stragglers(step, told, slowest)

    def rolled_back(self, rollback: Rollback) -> None:
        """The run went back."""
        if self._logs_here:
            self._log.rolled_back(rollback)
        self.say(
            f"step {rollback.from_step}: {rollback.reason}. Back to step {rollback.to_step}; samples {rollback.first_sample:,} to "
            f"{rollback.past_sample - 1:,} of the training data are skipped (rollback {rollback.number})"
        )

    def close(self) -> None:
        self._each(lambda writer: writer.close())

    def _each(self, call: Callable[[Writer], None]) -> None:
        for writer in tuple(self._writers):
            try:
                call(writer)
            except Exception as error:  # a full disk or a lost server: whatever it is, training is worth more
                self._writers.remove(writer)
                text = f"{type(writer).__name__} stopped: {type(error).__name__}: {error}; training goes on without it"
                print(text, file=sys.stderr)
                self._log.warning(text)


def run_folder(config: Config) -> Path:
    """Where a run writes what no flag names: --save, else beside --metrics-file, else where it was started."""
    if config.checkpoint.save:
        return Path(config.checkpoint.save)
    return Path(config.logging.metrics_file).parent if config.logging.metrics_file else Path()


def recorded_folder(config: Config) -> Path | None:
    """Where the run is recorded: beside its metrics; None for a run that writes none."""
    if config.logging.metrics_file:
        return Path(config.logging.metrics_file).parent
    return Path(config.checkpoint.save) if config.checkpoint.save else None


def build_writers(config: Config, log: RunLog, logs_here: bool) -> Writers:
    """The writers the configuration asks for, on the rank that logs. Raises ConfigError where a package is missing."""
    if not logs_here:
        return Writers((), log)
    logging = config.logging
    writers: list[Writer] = [Console()]
    metrics_file = logging.metrics_file or (
        str(Path(config.checkpoint.save) / "metrics.jsonl") if config.checkpoint.save else None
    )
    if metrics_file:
        writers.append(JsonLines(Path(metrics_file)))
    if logging.tensorboard_dir:
        writers.append(TensorBoard(logging.tensorboard_dir))
    if logging.wandb_project:
        name, directory = logging.wandb_exp_name, logging.wandb_save_dir
        writers.append(WeightsAndBiases(logging.wandb_project, name, directory, asdict(config)))
    return Writers(writers, log)


def _within(seconds: float, call: Callable[[], Any]) -> None:
    """Run something that may hang or fail, in a thread that is left behind if it does."""

    def guarded() -> None:
        try:
            call()
        except Exception as error:
            print(f"wandb did not finish: {type(error).__name__}: {error}", file=sys.stderr)

    thread = threading.Thread(target=guarded, daemon=True)
    thread.start()
    thread.join(seconds)
