"""Messages between stages in 8 bits (--pipeline-message-dtype fp8): float8_e4m3fn with one scale for each row.

A row is the last dim of a tensor: the hidden states, or the gradients, of one token. Its scale is the smallest power of
two with which its largest element does not exceed 448, sent as one byte, so that scaling is exact and rounding is the
only error:

    |received - sent| <= max(2^-4 |sent|, 2^-10 scale),  scale <= max(largest / 224, 2^-126)

Three bits of mantissa serve gradients better than the two of e5m2: within one token they span less than the 17 powers
of two of e4m3 (`tests/comm/test_message_fp8.py` compares). A row with an infinite or NaN element arrives without a
finite one, so that losses and gradient norms stay non-finite.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

MANTISSA_BITS = 23  # of fp32
# 448 = 1.75 * 2^8, the largest number of e4m3fn
LARGEST_EXPONENT, LARGEST_MANTISSA = 8, 0x600000
LEAST_SCALE, MOST_SCALE, NON_FINITE = 1, 253, 255  # biased exponents of scales, as in fp32


def encoded_bytes(shape: tuple[int, ...]) -> int:
    """Return the bytes that a tensor of this shape takes: one for each element, one for each row."""
    return math.prod(shape) + math.prod(shape[:-1])


def encode(x: Tensor) -> Tensor:
    """Return the payload [elements + rows], uint8. x: at least one dim, a floating-point dtype of at most 32 bits."""
    rows = x.reshape(-1, x.shape[-1])
    bits = torch.linalg.vector_norm(rows, ord=math.inf, dim=-1).float().view(torch.int32)
    exponent = (bits >> MANTISSA_BITS) & 0xFF
    scale = exponent - LARGEST_EXPONENT + ((bits & (1 << MANTISSA_BITS) - 1) > LARGEST_MANTISSA)
    scale = torch.where(exponent == 0xFF, NON_FINITE, scale.clamp(LEAST_SCALE, MOST_SCALE))
    inverse = _power_of_two(2 * 127 - scale.clamp(max=MOST_SCALE))
    scaled = (rows.to(_exact(x.dtype)) * inverse.to(_exact(x.dtype)).unsqueeze(-1)).to(torch.float8_e4m3fn)
    return torch.cat([scaled.view(torch.uint8).flatten(), scale.to(torch.uint8)])


def decode(payload: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return the tensor of this shape and dtype that `encode` was given, rounded."""
    num_elements, exact = math.prod(shape), _exact(dtype)
    scale = _power_of_two(payload[num_elements:].to(torch.int32)).to(exact).unsqueeze(-1)
    values = payload[:num_elements].view(torch.float8_e4m3fn).view(-1, shape[-1]).to(exact)
    return values.mul_(scale).to(dtype).view(shape)


def _exact(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to scale in: fp16 has too few exponents."""
    return torch.float32 if dtype is torch.float16 else dtype


def _power_of_two(biased_exponent: Tensor) -> Tensor:
    """Return 2^(biased_exponent - 127) in fp32, infinity for 255, from the bits: exp2 may round."""
    return (biased_exponent.to(torch.int32) << MANTISSA_BITS).view(torch.float32)
