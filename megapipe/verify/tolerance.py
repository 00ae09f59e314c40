"""How far grid and oracle may be apart: rounding, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass

ZERO_SHARE = 1e-12  # a gradient this much smaller than the largest of the model is mathematically zero: in fp64 it is rounding


@dataclass(frozen=True)
class Tolerance:
    """A tensor passes if max|grid - plain| <= tolerance x max|plain|; gradients that are mathematically zero (a key norm's bias without
    rotary positions, say) are held to the largest gradient of the model instead."""

    gradient: float
    weight: float
    loss: float
    grad_norm: float


FP64 = Tolerance(gradient=1e-10, weight=1e-10, loss=1e-10, grad_norm=1e-10)
