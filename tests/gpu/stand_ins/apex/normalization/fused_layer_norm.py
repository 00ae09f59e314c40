"""apex's functional norms: statistics in fp32."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def fused_layer_norm_affine(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    normalized_shape: torch.Size,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> torch.Tensor:
    wide = torch.promote_types(input.dtype, torch.float32)
    return F.layer_norm(input.to(wide), tuple(normalized_shape), weight.to(wide), bias.to(wide), eps).to(input.dtype)


def fused_rms_norm_affine(
    input: torch.Tensor,
    weight: torch.Tensor,
    normalized_shape: torch.Size,
    eps: float = 1e-6,
    memory_efficient: bool = False,
) -> torch.Tensor:
    wide = torch.promote_types(input.dtype, torch.float32)
    return F.rms_norm(input.to(wide), tuple(normalized_shape), weight.to(wide), eps).to(input.dtype)
