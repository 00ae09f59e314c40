"""apex's functional norms: statistics in fp32."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def fused_layer_norm_affine(input: Tensor, weight: Tensor, bias: Tensor, shape: torch.Size, eps: float) -> Tensor:
    wide = torch.promote_types(input.dtype, torch.float32)
    return F.layer_norm(input.to(wide), tuple(shape), weight.to(wide), bias.to(wide), eps).to(input.dtype)


def fused_rms_norm_affine(input: Tensor, weight: Tensor, shape: torch.Size, eps: float) -> Tensor:
    wide = torch.promote_types(input.dtype, torch.float32)
    return F.rms_norm(input.to(wide), tuple(shape), weight.to(wide), eps).to(input.dtype)
