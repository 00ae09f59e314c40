"""A checksum of tensors' bits, on their own device: what `copies` compares instead of the tensors."""

from __future__ import annotations

import math

import torch
from torch import Tensor

LANES = 2048  # words summed side by side before the lanes are weighed
WORD_BYTES = 8
FACTOR = 0x9E3779B97F4A7C15 - (
    1 << 64
)  # odd; 2^64 over the golden ratio, which spreads the weights of neighbouring lanes


def checksum(values: Tensor) -> Tensor:
    """The bits of a contiguous tensor of any dtype as one number: int64 [], on its device. Reads the tensor once.

    The tensor is read as 64-bit words, word i in lane i mod LANES; the sum modulo 2^64 of all words, each times its lane's odd weight.
    A change of any one bit changes the sum, for no power of two times an odd number is 0 modulo 2^64. -0.0 is not 0.0, and NaN equals
    itself if its bits do.
    """
    words = _words(values)
    whole = words.numel() // LANES * LANES
    weights = _weights(values.device)
    total = (words[:whole].view(-1, LANES).sum(0) * weights).sum() if whole else words.new_zeros(())
    rest = words[whole:]
    return total + (rest * weights[: rest.numel()]).sum()


def raw_bytes(values: Tensor) -> Tensor:
    """The same memory as uint8 [bytes]."""
    return values.detach().reshape(-1).view(torch.uint8)


def _words(values: Tensor) -> Tensor:
    """int64 [ceil(bytes / 8)]: the same memory where it can be read in words, else a copy, filled up with zeros."""
    raw = raw_bytes(values)
    if raw.numel() % WORD_BYTES or raw.storage_offset() % WORD_BYTES:
        padded = raw.new_zeros(math.ceil(raw.numel() / WORD_BYTES) * WORD_BYTES)
        padded[: raw.numel()] = raw
        raw = padded
    return raw.view(torch.int64)


def _weights(device: torch.device) -> Tensor:
    return (torch.arange(LANES, dtype=torch.int64, device=device) * 2 + 1) * FACTOR
