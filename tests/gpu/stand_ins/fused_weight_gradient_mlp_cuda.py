"""apex's extension that accumulates weight gradients inside their GEMM."""

from __future__ import annotations

import torch


def wgrad_gemm_accum_fp32(input: torch.Tensor, d_output: torch.Tensor, d_weight: torch.Tensor) -> None:
    assert d_weight.dtype == torch.float32
    assert input.dtype == d_output.dtype
    assert input.is_contiguous()
    assert d_output.is_contiguous()
    d_weight.add_(d_output.float().t() @ input.float())
