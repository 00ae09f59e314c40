"""`Stopwatch`: what one call of a kernel takes on this rank's device."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import median

import torch

from megapipe.gpu.device_clock import DeviceClock, device_clock

WARM_UPS = {"cpu": 1, "cuda": 3}
FEWEST, MOST = 3, 25  # repeats
SHORTEST_SECONDS = 1e-3  # of a repeat: shorter calls are made several times, for clocks and launches have a grain
FEWEST_CALLS = FEWEST + 2  # at least so many times the time of one call is spent on a CPU: warm-up, first look, repeats


class Stopwatch:
    """Medians of repeats after warm-ups, by the device's own clock (events in the stream on a GPU, where it has not run so far)."""

    def __init__(self, device: torch.device, clock: DeviceClock | None = None) -> None:
        self.device, self._clock = device, clock or device_clock(device)

    def seconds(self, call: Callable[[], object], budget_seconds: float) -> float:
        """Of one call. budget_seconds: for the repeats, of which there are 3 to 25."""
        for _ in range(WARM_UPS[self.device.type]):
            call()
        once = max(self._repeat(call, 1), 1e-9)
        calls = max(1, math.ceil(SHORTEST_SECONDS / once))
        repeats = max(FEWEST, min(MOST, int(budget_seconds / (once * calls))))
        return median(self._repeat(call, calls) for _ in range(repeats))

    def _repeat(self, call: Callable[[], object], calls: int) -> float:
        """Seconds of one of so many calls one after the other."""
        began = self._clock.mark()
        for _ in range(calls):
            call()
        return self._clock.seconds(began, self._clock.mark()) / calls
