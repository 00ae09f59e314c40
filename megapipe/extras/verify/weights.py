"""Initial weights of a verification: every parameter drawn, norms and biases too.

At their usual 1 and 0 a forgotten norm or bias would not be seen.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from megapipe.assembly.inference_runtime import DrawSlice
from megapipe.model.init import draw
from megapipe.sharding.spec import Init, ParamSpec

STANDARD_DEVIATION = 0.2


def drawn_slices(seed: int, dtype: torch.dtype, std: float = STANDARD_DEVIATION) -> DrawSlice:
    """For TrainingRuntime: each rank draws its own slices, through the streams that training draws from. Values are numbers of `dtype`."""

    def slice_of(spec: ParamSpec, tp_rank: int, tp: int) -> Tensor:
        noise = draw(dataclasses.replace(spec, init=Init("normal", std)), tp_rank, tp, seed, torch.float64)
        return (noise + 1.0 if spec.init.kind == "ones" else noise).to(dtype)

    return slice_of


def given_slices(weights: Mapping[str, Tensor]) -> DrawSlice:
    """For TrainingRuntime: slices of whole tensors by name. Vocabulary padding that is missing is zero."""

    def slice_of(spec: ParamSpec, tp_rank: int, tp: int) -> Tensor:
        whole = weights[spec.name]
        if whole.shape[0] < spec.shape[0]:
            whole = torch.cat([whole, whole.new_zeros(spec.shape[0] - whole.shape[0], *whole.shape[1:])])
        dim = spec.slicing.dim or 0
        return torch.cat([whole.narrow(dim, i.start, i.stop - i.start) for i in spec.intervals(tp_rank, tp)], dim)

    return slice_of


def whole_weights(specs: Iterable[ParamSpec], slices: DrawSlice) -> dict[str, Tensor]:
    """The whole tensors that `slices` cuts: what a world of one draws."""
    return {spec.name: slices(spec, 0, 1) for spec in specs}
