"""Evaluations report how far they are, and count into the time that a run has left."""

from __future__ import annotations

import dataclasses
from itertools import count

import pytest

from megapipe.config.training import TrainingConfig
from megapipe.train.loop import EvaluationClock

TRAINING = TrainingConfig(micro_batch_size=1, train_iters=100, eval_interval=30, eval_iters=6)


def test_a_long_evaluation_reports_every_ten_seconds_and_a_short_one_never() -> None:
    lines: list[str] = []
    clock = EvaluationClock(TRAINING, ("validation",), lines.append)
    moments = count(0.0, 4.0)  # 4 s a batch
    assert list(clock.batches("validation", 30, lambda: next(moments))) == list(range(6))
    assert lines == ["validation after step 30: batch 3 of 6 | 0:12 left"]
    moments = count(0.0, 0.5)
    list(clock.batches("validation", 60, lambda: next(moments)))
    assert len(lines) == 1


@pytest.mark.parametrize(
    ("step", "validations"), [(1, 4), (29, 4), (30, 4), (31, 3), (89, 2), (90, 2), (91, 1), (100, 1)]
)
def test_the_evaluations_that_are_left_are_counted(step: int, validations: int) -> None:
    clock = EvaluationClock(TRAINING, ("validation", "test"), print)
    moments = count(0.0, 1.0)
    list(clock.batches("validation", 0, lambda: next(moments)))  # takes 8 s: the begin, six batches, and the end
    # the test part is not measured yet: six batches at a third of a step's 3 s
    assert clock.seconds_left(step, 3.0) == pytest.approx(validations * 8.0 + 6.0)


def test_without_evaluations_there_is_no_time_for_them() -> None:
    none = dataclasses.replace(TRAINING, eval_iters=0)
    assert EvaluationClock(none, ("validation", "test"), print).seconds_left(1, 3.0) == 0.0
    only_last = dataclasses.replace(TRAINING, eval_interval=None)
    assert EvaluationClock(only_last, ("validation",), print).seconds_left(1, 3.0) == pytest.approx(6.0)
    assert EvaluationClock(TRAINING, (), print).seconds_left(1, 3.0) == 0.0
