"""Phase timers: level 0 times the step, level 1 its phases. On a GPU each reading waits for the device, so level 1 costs overlap."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

STEP_LEVEL, PHASE_LEVEL, ACTION_LEVEL = 0, 1, 2


class Timers:
    """Seconds by phase since the last `take`, in order of first use."""

    def __init__(self, level: int, device: torch.device) -> None:
        self.level = level
        self._device = device
        self._seconds: dict[str, float] = {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase of the step; costs nothing below level 1."""
        if self.level < PHASE_LEVEL:
            yield
            return
        start = self._now()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + self._now() - start

    def take(self) -> dict[str, float]:
        """What was measured, and start anew."""
        taken, self._seconds = self._seconds, {}
        return taken

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()
