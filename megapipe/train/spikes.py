"""`SpikeWatch`: is the loss or the gradient norm far above what it was? Pure numbers, the same on all ranks."""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import Any

from megapipe.config.training import TrainingConfig

SCALE = 1.4826  # a normal distribution's standard deviation over its median absolute deviation
LEAST_DEVIATION = (
    0.003  # of a logarithm: 0.3 % of the value; what is steadier than that does not make a spike of nothing
)
LEAST_SHARE = 0.5  # of the window, before anything is judged


class SpikeWatch:
    """A step spikes if loss or gradient norm lies more than --spike-threshold robust deviations (median absolute deviations, scaled to a
    standard deviation) above the median of the last --spike-window steps, all in logarithms; steps that spike do not enter the window.

    `see` returns why, once --spike-steps steps in a row have spiked.
    """

    def __init__(self, training: TrainingConfig) -> None:
        self._threshold, self._patience = training.spike_threshold, training.spike_steps
        self._seen: dict[str, deque[float]] = {
            name: deque(maxlen=training.spike_window) for name in ("loss", "gradient norm")
        }
        self._least = max(4, round(LEAST_SHARE * training.spike_window))
        self.num_spiking = 0  # steps in a row, the last one included

    def see(self, loss: float, grad_norm: float) -> str:
        """Take note of a step; '' while all is well, else what is wrong. A value that is no number, or 0, is not looked at."""
        values = {
            name: math.log(value)
            for name, value in (("loss", loss), ("gradient norm", grad_norm))
            if math.isfinite(value) and value > 0
        }
        why = [text for name, value in values.items() if (text := self._above(name, value))]
        if not why:
            self.num_spiking = 0
            for name, value in values.items():
                self._seen[name].append(value)
            return ""
        self.num_spiking += 1
        return " and ".join(why) if self.num_spiking >= self._patience else ""

    def _above(self, name: str, value: float) -> str:
        seen = self._seen[name]
        if len(seen) < self._least:
            return ""
        median = statistics.median(seen)
        deviation = max(LEAST_DEVIATION, SCALE * statistics.median(abs(other - median) for other in seen))
        if value <= median + self._threshold * deviation:
            return ""
        above = (value - median) / deviation
        return f"{name} {math.exp(value):.4g}, {above:.1f} deviations above the median {math.exp(median):.4g} of {len(seen)} steps"

    def state(self) -> dict[str, Any]:
        """Plain values, for the checkpoint."""
        return {"seen": {name: list(values) for name, values in self._seen.items()}, "num_spiking": self.num_spiking}

    def load_state(self, state: dict[str, Any] | None) -> None:
        """None: of a checkpoint that was saved without a watch; begin anew."""
        for name, values in self._seen.items():
            values.clear()
            values.extend(state["seen"][name] if state else ())
        self.num_spiking = int(state["num_spiking"]) if state else 0
