"""`EvaluationClock`: how far an evaluation is, and how long those take that a run still has before it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from megapipe.config.training import TrainingConfig
from megapipe.formatting import clock_text

FORWARD_SHARE = 1 / 3  # of a step's time, of which the backward takes two thirds: until one evaluation is measured
REPORT_SECONDS = 10.0  # between two lines on the progress of an evaluation


class EvaluationClock:
    """The evaluations of a run. splits: the parts that have data, 'validation' and 'test'. report: prints a line.

    The test part is evaluated once, after the last step, and the validation part also every --eval-interval steps.
    """

    def __init__(self, training: TrainingConfig, splits: tuple[str, ...], report: Callable[[str], None]) -> None:
        self._training, self._report = training, report
        self._splits = splits if training.eval_iters else ()
        self._seconds: dict[str, float] = {}  # of the last evaluation of each part

    def batches(self, split: str, after_step: int, now: Callable[[], float] = time.perf_counter) -> Iterator[int]:
        """Yield the index of each batch of an evaluation, and report how far it is every ten seconds."""
        count, began = self._training.eval_iters, now()
        reported = began
        for index in range(count):
            yield index
            moment = now()
            if moment - reported >= REPORT_SECONDS and index + 1 < count:
                reported = moment
                left = clock_text((moment - began) / (index + 1) * (count - index - 1))
                self._report(f"{split} after step {after_step}: batch {index + 1} of {count} | {left} left")
        self._seconds[split] = now() - began

    def seconds_left(self, step: int, step_seconds: float) -> float:
        """Return the seconds of all evaluations after a step, of which none has run yet. step_seconds: of one step."""
        training, total = self._training, 0.0
        for split in self._splits:
            num_left = 1
            if split == "validation" and training.eval_interval and training.train_iters:
                # the one at the end comes after the last step in any case
                num_left += (training.train_iters - 1) // training.eval_interval - (step - 1) // training.eval_interval
            expected = training.eval_iters * step_seconds * FORWARD_SHARE
            total += num_left * self._seconds.get(split, expected)
        return total
