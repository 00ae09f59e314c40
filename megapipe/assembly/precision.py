"""The dtypes of a run, from the configuration's name for them."""

from __future__ import annotations

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


def parameter_dtype(name: str) -> torch.dtype:
    """Weights, activations and pipeline messages."""
    return DTYPES[name]


def main_dtype(name: str) -> torch.dtype:
    """Main gradients, master weights and moments: at least fp32."""
    return torch.promote_types(DTYPES[name], torch.float32)
