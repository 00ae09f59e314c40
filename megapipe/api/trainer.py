"""`Trainer`: pretraining from Python, with callbacks; the same run as `megapipe pretrain` with the same options."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from megapipe.api.config import Config
from megapipe.comm.bootstrap import disband, is_joined
from megapipe.environment import Environment, read_environment
from megapipe.errors import ConfigError, TrainingError
from megapipe.extras.cli.frame import end_at_once, end_with_launcher, guarded, teller
from megapipe.extras.cli.pretrain import run_job
from megapipe.extras.report.observer import ReportingObserver
from megapipe.monitor.signals import outlive_output
from megapipe.train.metrics import EvaluationMetrics, StepSummary, TrainingResult


class Callback:
    """Methods that a Trainer calls while it trains; a subclass overrides those that it needs.

    All of them are called on every rank, in the same order and with the same values: print or write files only where
    `trainer.rank == 0`. They run in the training loop, which waits for them. An exception ends training with a
    TrainingError, on all ranks.
    """

    def on_start(self, trainer: Trainer, step: int) -> None:
        """Called before the first step. step: the last one of the checkpoint that the run continues, else 0."""

    def on_step_end(self, trainer: Trainer, summary: StepSummary) -> None:
        """Called after every step whose loss is finite; a step is reported again after a rollback."""

    def on_evaluation(self, trainer: Trainer, metrics: EvaluationMetrics) -> None:
        """Called after every evaluation. metrics: split ('validation' or 'test'), step, loss, num_tokens, seconds."""

    def on_save(self, trainer: Trainer, folder: Path) -> None:
        """Called when a checkpoint is complete in its folder, with asynchronous saving some steps after its own."""

    def on_end(self, trainer: Trainer, result: TrainingResult) -> None:
        """Called when training has ended without an error."""


class Trainer:
    """Pretrains a model on the ranks that were started: one, or those of torchrun, srun or `megapipe launch`::

        result = Trainer(Config.from_yaml("configs/quickstart.yaml", train_iters=100)).run()
        print(result.step, result.loss)

    config: a complete job; extensions, data, checkpoints and output are those of its options. callbacks: called in
    their order. rank, world_size: of this process. Raises ConfigError with a line for everything that is missing or
    contradictory, before torch computes anything.
    """

    def __init__(self, config: Config, callbacks: Sequence[Callback] = ()) -> None:
        if not isinstance(config, Config):
            raise ConfigError(f"Trainer needs a megapipe.Config, got {type(config).__name__}")
        for callback in callbacks:
            if not isinstance(callback, Callback):
                raise ConfigError(f"a callback is of type {type(callback).__name__}; derive it from megapipe.Callback")
        self.config = config
        self._environment = read_environment()
        self.rank, self.world_size = self._environment.global_rank, self._environment.world_size
        self._loaded = config.load(is_job=True)
        self._observer = _Callbacks(self, tuple(callbacks))

    def run(self) -> TrainingResult:
        """Train to the end, save and evaluate as configured, and return the result, the same on every rank.

        Called in the main thread, by every rank; signals and output are those of `megapipe pretrain` meanwhile. In one
        process an error is raised: TrainingError, CheckpointError, DataError, ConfigError. With several ranks it is
        printed, and ends this process with the exit code of docs/reliability.md, so that the launcher ends the others.
        """
        self._observer.wants_stop = False
        outlive_output()
        if not self._environment.is_distributed:
            return self._run(self._environment)
        is_owner = not is_joined()
        end_with_launcher(self._environment)
        own = self._environment
        code = guarded(lambda: 0 if self._run(own) else 1, self.rank, self.world_size, tell=teller(own))
        if code:
            end_at_once(code)
        if is_owner:
            disband()
        return self._observer.taken()

    def stop(self) -> None:
        """Ask to end training after this step, or the next where one is under way, with a last save.

        For callbacks, and other threads; enough on one rank. The result is then not complete.
        """
        self._observer.wants_stop = True

    def _run(self, environment: Environment) -> TrainingResult:
        run_job(self._loaded, environment, self._observer)
        return self._observer.taken()


class _Callbacks(ReportingObserver):
    """Calls a Trainer's callbacks."""

    def __init__(self, trainer: Trainer, callbacks: tuple[Callback, ...]) -> None:
        self._trainer, self._callbacks = trainer, callbacks
        self._result: TrainingResult | None = None

    def taken(self) -> TrainingResult:
        assert self._result is not None
        return self._result

    def on_start(self, step: int) -> None:
        self._each("on_start", step)

    def on_step_end(self, summary: StepSummary) -> None:
        self._each("on_step_end", summary)

    def on_evaluation(self, metrics: EvaluationMetrics) -> None:
        self._each("on_evaluation", metrics)

    def on_save(self, folder: Path) -> None:
        self._each("on_save", folder)

    def on_end(self, result: TrainingResult) -> None:
        self._result = result
        self._each("on_end", result)

    def _each(self, name: str, value: Any) -> None:
        for callback in self._callbacks:
            call: Callable[[], None] = partial(getattr(callback, name), self._trainer, value)
            try:
                call()
            except Exception as error:
                if self._trainer.world_size > 1:  # only the message of what follows is printed there
                    traceback.print_exc()
                what = f"the callback {type(callback).__name__}.{name} raised {type(error).__name__}"
                raise TrainingError(f"{what}: {error}") from error
