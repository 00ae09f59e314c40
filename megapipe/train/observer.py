"""`Observer`: what the caller of `pretrain` can follow of a run, and ask of it; used by the Python API's Trainer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megapipe.train.metrics import EvaluationMetrics


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

    def on_start(self, step: int) -> None:
        """Called before the first step. step: the last one made before, 0 for a new run."""

    def on_step_end(self, summary: StepSummary) -> None:
        """Called after every step whose loss is finite."""

    def on_evaluation(self, metrics: EvaluationMetrics) -> None:
        """Called after every evaluation."""

    def on_save(self, folder: Path) -> None:
        """Called when a checkpoint is complete, with --async-save some steps after its own."""

    def on_end(self, result: TrainingResult) -> None:
        """Called at the end of a run that no error has ended."""
