"""The loss over held-out batches: the same stages and the same engine, forwards only."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence

from megapipe.assembly.training_runtime import TrainingRuntime
from megapipe.data.loader import Loader
from megapipe.model.microbatch import Microbatch
from megapipe.monitor.heartbeat import Heartbeat
from megapipe.train.agreement import Agreement
from megapipe.train.metrics import EvaluationMetrics
from megapipe.train.reading import Reader
from megapipe.train.step import TrainStep
from megapipe.train.writers import Writers


def evaluate(step: TrainStep, batches: Iterable[Sequence[Microbatch]], per_token: bool) -> tuple[float, int]:
    """(loss, tokens) over global batches: the mean of their losses, or with per_token over all their tokens. The same on every rank."""
    weighted = weights = tokens = 0.0
    for batch in batches:
        result = step.evaluate(batch)
        weight = result.num_tokens if per_token else 1.0
        weighted += result.loss * weight
        weights += weight
        tokens += result.num_tokens
    return weighted / max(weights, 1.0), round(tokens)


class Evaluation:
    """--eval-iters global batches of a held-out split; a signal that comes meanwhile cuts it short."""

    def __init__(
        self,
        runtime: TrainingRuntime,
        step: TrainStep,
        reader: Reader,
        agreement: Agreement,
        writers: Writers,
        heartbeat: Heartbeat,
    ) -> None:
        self._training, self._batch = runtime.plan.config.training, runtime.plan.batch
        self._step, self._reader, self._agreement, self._writers, self._heartbeat = (
            step,
            reader,
            agreement,
            writers,
            heartbeat,
        )

    def run(self, split: str, loader: Loader | None, after_step: int) -> str | None:
        """Evaluate and record it. Returns the signal that cut it short, of which nothing is recorded then. loader: None for no data."""
        if loader is None or not self._training.eval_iters:
            return None
        assert self._training.global_batch_size is not None
        samples = self._training.global_batch_size
        interval = self._training.eval_interval
        earlier = max(0, after_step - 1) // interval if interval and split == "validation" else 0
        first = (
            earlier * self._training.eval_iters * samples
        )  # every validation of a run sees other samples, as in Megatron
        started = time.perf_counter()
        count = samples // self._batch.samples_per_microbatch
        asked = None

        def batches() -> Iterator[Sequence[Microbatch]]:
            nonlocal asked
            for i in range(self._training.eval_iters):
                asked = self._agreement.signal()
                if asked is not None:
                    return
                yield self._reader.microbatches(loader, first + i * samples, count, None)

        with self._heartbeat.phase(split):
            loss, tokens = evaluate(self._step, batches(), self._training.calculate_per_token_loss)
        if asked is None:
            self._writers.evaluation(EvaluationMetrics(split, after_step, loss, tokens, time.perf_counter() - started))
        return asked
