"""The loss over held-out batches: the same stages and the same engine, forwards only."""

from __future__ import annotations

import time
from collections.abc import Callable

from megapipe.assembly.datasets import RunData
from megapipe.assembly.microbatches import read_microbatches
from megapipe.assembly.training_runtime import TrainingRuntime
from megapipe.train.journal import Journal
from megapipe.train.metrics import EvaluationMetrics
from megapipe.train.step import TrainStep


class Evaluation:
    """--eval-iters global batches of a held-out split.

    stop_signal: asked before every batch on all ranks; returns the signal that cuts the evaluation short, or None.
    """

    def __init__(
        self,
        runtime: TrainingRuntime,
        data: RunData,
        step: TrainStep,
        journal: Journal,
        stop_signal: Callable[[], str | None],
    ) -> None:
        self._runtime, self._data, self._step, self._journal = runtime, data, step, journal
        self._stop_signal = stop_signal

    def run(self, split: str, after_step: int) -> str | None:
        """Evaluate on 'validation' or 'test' and report it.

        Returns the signal that cut it short; then nothing is reported.
        """
        plan, loader = self._runtime.plan, self._data.valid if split == "validation" else self._data.test
        training = plan.config.training
        if loader is None or not training.eval_iters:
            return None
        samples = training.global_batch_size
        assert samples is not None
        first = 0
        if split == "validation" and training.eval_interval:
            # every validation of a run sees other samples, as in Megatron
            first = max(0, after_step - 1) // training.eval_interval * training.eval_iters * samples
        started = time.perf_counter()
        count = samples // plan.batch.samples_per_microbatch
        weighted = weights = tokens = 0.0
        with self._runtime.heartbeat.phase(split):
            for i in range(training.eval_iters):
                signal = self._stop_signal()
                if signal is not None:
                    return signal
                batch = read_microbatches(self._runtime, loader, first + i * samples, count, None)
                result = self._step.evaluate(batch)
                # the mean of the batches' losses, or of all their tokens
                weight = result.num_tokens if training.calculate_per_token_loss else 1.0
                weighted += result.loss * weight
                weights += weight
                tokens += result.num_tokens
        loss, seconds = weighted / max(weights, 1.0), time.perf_counter() - started
        self._journal.evaluation(EvaluationMetrics(split, after_step, loss, round(tokens), seconds))
        return None
