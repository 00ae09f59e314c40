"""How far grid and oracle may be apart: rounding, and nothing else."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from megapipe.assembly.precision import parameter_dtype
from megapipe.config.config import Config


@dataclass(frozen=True)
class Tolerance:
    """A tensor passes if max|grid - plain| <= tolerance x max|plain|.

    least_share: a gradient smaller than this share of the model's largest is held to that share instead of to itself. Gradients that are
    mathematically zero (a key norm's bias without rotary positions, say) are held to the largest gradient: they are pure rounding.
    """

    gradient: float
    weight: float
    loss: float
    grad_norm: float
    least_share: float = 0.0


FP64 = Tolerance(gradient=1e-10, weight=1e-10, loss=1e-10, grad_norm=1e-10)


@dataclass(frozen=True)
class NativeRoundings:
    """Tolerances as multiples of the dtype's epsilon x sqrt(layers): roundings of a residual stream add up like a random walk.

    The numbers are about four times the largest differences seen over grids, shapes and depths. fp32 has more of them because its sums
    are fp32 too; in half types sums, norms and softmax are fp32, and one rounding of an activation outweighs them all. Gradients that
    cancel (keys see only differences of scores) are small beside the terms they are sums of: hence the least share.
    """

    gradient: float
    weight: float
    loss: float
    grad_norm: float
    least_share: float = 0.1


NATIVE = {
    "fp32": NativeRoundings(gradient=64, weight=16, loss=8, grad_norm=16),
    "bf16": NativeRoundings(gradient=8, weight=3, loss=1, grad_norm=4),
    "fp16": NativeRoundings(gradient=8, weight=3, loss=1, grad_norm=4),
}


def tolerance_of(config: Config) -> Tolerance:
    """For a run in the configuration's dtype. Gradients reduced in bf16 are rounded like bf16 whatever the dtype."""
    dtype = config.precision.dtype
    if dtype == "fp64":
        return FP64
    is_bf16 = config.parallel.grad_reduce_in_bf16 or dtype == "bf16"
    roundings = NATIVE["bf16" if is_bf16 else dtype]
    epsilon = torch.finfo(torch.bfloat16 if is_bf16 else parameter_dtype(dtype)).eps
    unit = epsilon * math.sqrt(config.model.num_layers)
    return Tolerance(
        roundings.gradient * unit,
        roundings.weight * unit,
        roundings.loss * unit,
        roundings.grad_norm * unit,
        roundings.least_share,
    )
