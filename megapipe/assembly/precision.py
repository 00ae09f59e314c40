"""The dtypes of a run, from the configuration's name for them."""

from __future__ import annotations

import torch

from megapipe.dtypes import TENSOR_DTYPES

DTYPES = {dtype.name: getattr(torch, dtype.torch_name) for dtype in TENSOR_DTYPES.values()}


def parameter_dtype(name: str) -> torch.dtype:
    """Weights, activations and pipeline messages."""
    return DTYPES[name]


def main_dtype(name: str) -> torch.dtype:
    """Main gradients, master weights and moments: at least fp32."""
    return torch.promote_types(DTYPES[name], torch.float32)
