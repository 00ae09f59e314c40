"""`GarbageCollection`: Python's garbage collection at fixed steps (`--manual-gc`), used by `Training`.

A rank that collects while the others compute makes all of them wait in the next collective, each time another one. With
collections at the same steps on all ranks they wait once.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from megapipe.config.config import ResolvedTrainingConfig


class GarbageCollection:
    """Within the context Python's own collector is off, if `--manual-gc` is given; otherwise nothing is changed."""

    def __init__(self, training: ResolvedTrainingConfig) -> None:
        self._training = training
        self._was_enabled = False

    def __enter__(self) -> None:
        self._was_enabled = gc.isenabled()
        if self._training.manual_gc:
            gc.disable()
            gc.collect()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._training.manual_gc and self._was_enabled:
            gc.enable()

    def after_step(self, step: int) -> None:
        """Collect if the interval divides the step."""
        interval = self._training.manual_gc_interval
        if self._training.manual_gc and interval and step % interval == 0:
            gc.collect()

    @contextmanager
    def around_evaluation(self) -> Iterator[None]:
        """Collect before and after the evaluation inside, unless `--no-manual-gc-eval` is given."""
        collects = self._training.manual_gc and self._training.manual_gc_eval
        if collects:
            gc.collect()
        yield
        if collects:
            gc.collect()
