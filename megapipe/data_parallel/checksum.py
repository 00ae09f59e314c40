"""A checksum of the bits of a tensor, computed on its device; `copies` compares checksums instead of tensors."""

from __future__ import annotations

import math

import torch
from torch import Tensor

LANES = 2048  # lanes of words; each lane is summed, then the sums are weighted
WORD_BYTES = 8
# odd; 2^64 divided by the golden ratio, as a signed number: spreads the weights of neighbouring lanes
FACTOR = 0x9E3779B97F4A7C15 - (1 << 64)


def checksum(values: Tensor) -> Tensor:
    """Return a checksum of a contiguous tensor of any dtype: int64 [], on its device. Reads the tensor once.

    The tensor is read as 64-bit words, word i in lane i mod LANES; the checksum is the sum modulo 2^64 of all words,
    each times the odd weight of its lane. A change of any single bit changes the sum, because a power of two times an
    odd number is not 0 modulo 2^64. -0.0 differs from 0.0, and a NaN equals a NaN of the same bits.
    """
    words = _words(values)
    whole = words.numel() // LANES * LANES
    weights = _weights(values.device)
    total = (words[:whole].view(-1, LANES).sum(0) * weights).sum() if whole else words.new_zeros(())
    rest = words[whole:]
    return total + (rest * weights[: rest.numel()]).sum()


def raw_bytes(values: Tensor) -> Tensor:
    """Return a view of the same memory as uint8 [bytes]."""
    return values.detach().reshape(-1).view(torch.uint8)


def _words(values: Tensor) -> Tensor:
    """Return int64 [ceil(bytes / 8)]: a view of the memory if it consists of aligned words, else a zero-padded copy."""
    raw = raw_bytes(values)
    if raw.numel() % WORD_BYTES or raw.storage_offset() % WORD_BYTES:
        padded = raw.new_zeros(math.ceil(raw.numel() / WORD_BYTES) * WORD_BYTES)
        padded[: raw.numel()] = raw
        raw = padded
    return raw.view(torch.int64)


def _weights(device: torch.device) -> Tensor:
    return (torch.arange(LANES, dtype=torch.int64, device=device) * 2 + 1) * FACTOR
