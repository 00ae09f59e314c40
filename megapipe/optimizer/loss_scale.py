"""The loss scale of fp16: the backward starts from loss x scale, so that small gradients do not vanish.

Micikevicius et al. 2018, arXiv:1710.03740.
"""

from __future__ import annotations

from megapipe.config.model import PrecisionConfig


class LossScaler:
    """Constant or dynamic loss scale.

    window: None keeps the scale constant. Otherwise `hysteresis` overflows since the scale last grew halve it, and so
    does every further one, never below `minimum`; `window` steps in a row without overflow double it.
    """

    def __init__(self, initial: float, *, window: int | None = None, hysteresis: int = 1, minimum: float = 1.0) -> None:
        self.scale = initial
        self._window = window
        self._hysteresis = hysteresis
        self._minimum = minimum
        self._good_steps = 0
        self._overflows_left = hysteresis

    @classmethod
    def of(cls, precision: PrecisionConfig) -> LossScaler:
        """Return a scaler of 1 unless the dtype is fp16; for fp16, --loss-scale if set, else a dynamic scale."""
        if precision.dtype != "fp16":
            return cls(1.0)
        if precision.loss_scale is not None:
            return cls(precision.loss_scale)
        window, hysteresis, minimum = precision.loss_scale_window, precision.hysteresis, precision.min_loss_scale
        return cls(precision.initial_loss_scale, window=window, hysteresis=hysteresis, minimum=minimum)

    @property
    def is_dynamic(self) -> bool:
        """True if the scale adapts: overflows are then part of finding it; with a constant scale they are an error."""
        return self._window is not None

    def update(self, overflow: bool) -> None:
        """Add one step. overflow: a gradient on some rank was infinite or NaN, so that the step was skipped."""
        if not self.is_dynamic:
            return
        if overflow:
            self._good_steps = 0
            self._overflows_left -= 1
            if self._overflows_left <= 0:
                self.scale = max(self.scale / 2, self._minimum)
            return
        self._good_steps += 1
        if self._good_steps == self._window:
            self._good_steps = 0
            self._overflows_left = self._hysteresis
            self.scale *= 2

    def state(self) -> dict[str, float | int]:
        """Return plain values for a checkpoint."""
        return {"scale": self.scale, "good_steps": self._good_steps, "overflows_left": self._overflows_left}

    def load_state(self, state: dict[str, float | int]) -> None:
        """Restore the state of a checkpoint; a constant scale keeps the value of the configuration."""
        if self.is_dynamic:
            self.scale = float(state["scale"])
            self._good_steps = int(state["good_steps"])
            self._overflows_left = int(state["overflows_left"])
