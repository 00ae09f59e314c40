"""Rotary positions (Su et al. 2021, arXiv:2104.09864): frequencies, scalings, cos and sin tables, the half rotation.

Channel c of a head is paired with c + r / 2, where r is the number of rotated channels. Tables are in at least fp32.
The backward is the rotation by the opposite angle and needs nothing saved.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from megapipe.config.config import ResolvedModelConfig
from megapipe.errors import ConfigError


class Rotary:
    """The cos and sin tables of one model, kept for the longest sequence so far (per device and dtype)."""

    def __init__(self, config: ResolvedModelConfig) -> None:
        self.config = config
        self.channels = int(config.kv_channels * config.rotary_percent)
        if self.channels % 2 or not self.channels:
            raise ConfigError(
                f"--rotary-percent {config.rotary_percent} of --kv-channels {config.kv_channels} is {self.channels} "
                "channels; rotary positions rotate pairs of channels: choose a percentage that gives an even number "
                "above 0"
            )
        self._tables: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}

    def tables(self, seq: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cos and sin, [s, 1, 1, 1, r / 2], of the positions 0 .. s - 1. dtype: at least fp32."""
        key = (device, dtype)
        if key not in self._tables or self._tables[key][0].shape[0] < seq:
            self._tables[key] = self._at(torch.arange(seq, device=device)[:, None], dtype)
        cos, sin = self._tables[key]
        return cos[:seq], sin[:seq]

    def tables_at(self, position_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cos and sin, [s, b, 1, 1, r / 2], of position_ids [b, s]."""
        return self._at(position_ids.t(), dtype)

    def _at(self, positions_sb: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        frequencies = inverse_frequencies(self.config, self.channels, dtype, positions_sb.device)
        angles = (positions_sb[..., None].to(dtype) * frequencies)[:, :, None, None]
        amplitude = yarn_amplitude(self.config) if self.config.rope_scaling_type == "yarn" else 1.0
        return angles.cos() * amplitude, angles.sin() * amplitude


def rotate_(x: Tensor, cos: Tensor, sin: Tensor, groups: int, heads: int, head_dim: int) -> Tensor:
    """Rotate, in place, the first `heads` of each group's heads.

    x: contiguous, viewed as [s, b, groups, heads or more, head_dim]; its first r channels are rotated, the others
    stay. No other operation may need the values of x: it is the output of a linear or of a norm.
    """
    return _Rotate.apply(x, cos, sin, (groups, heads, head_dim))


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, layout: tuple[int, int, int]) -> Tensor:
        ctx.tables, ctx.layout = (cos, sin), layout  # constants shared by all layers, not activations
        ctx.mark_dirty(x)
        _rotate_in_place(x, cos, sin, layout)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        cos, sin = ctx.tables
        # a copy, since hooks and other consumers may hold the gradient
        grad = grad.clone(memory_format=torch.contiguous_format)
        _rotate_in_place(grad, cos, -sin, ctx.layout)
        return grad, None, None, None


def _rotate_in_place(x: Tensor, cos: Tensor, sin: Tensor, layout: tuple[int, int, int]) -> None:
    groups, heads, head_dim = layout
    half = cos.shape[-1]
    rotated = x.view(*x.shape[:2], groups, -1, head_dim)[:, :, :, :heads]
    first, second = rotated[..., :half], rotated[..., half : 2 * half]
    if x.dtype == cos.dtype:
        across = first * sin
        first.mul_(cos).addcmul_(second, sin, value=-1)
        second.mul_(cos).add_(across)
    else:  # products in the tables' dtype, rounded once
        a, b = first.to(cos.dtype), second.to(cos.dtype)
        first.copy_(a * cos - b * sin)
        second.copy_(b * cos + a * sin)


def inverse_frequencies(config: ResolvedModelConfig, channels: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return radians per position for each pair of channels, [r / 2], after the configured scaling."""
    even = torch.arange(0, channels, 2, dtype=dtype, device=device)
    frequencies = config.rotary_base ** (-even / channels)
    return _SCALINGS[config.rope_scaling_type](config, channels, frequencies)


def _unscaled(config: ResolvedModelConfig, channels: int, frequencies: Tensor) -> Tensor:
    return frequencies


def _linear(config: ResolvedModelConfig, channels: int, frequencies: Tensor) -> Tensor:
    """Position interpolation (Chen et al. 2023, arXiv:2306.15595)."""
    return frequencies / config.rope_scaling_factor


def _llama3(config: ResolvedModelConfig, channels: int, frequencies: Tensor) -> Tensor:
    """Llama 3.1: stretch wavelengths above original / low_freq_factor, keep those below original / high_freq_factor."""
    turns = config.rope_original_max_position_embeddings * frequencies / (2 * math.pi)  # within the original context
    low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return torch.lerp(frequencies / config.rope_scaling_factor, frequencies, kept)


def _yarn(config: ResolvedModelConfig, channels: int, frequencies: Tensor) -> Tensor:
    """NTK-by-parts of YaRN (Peng et al. 2023, arXiv:2309.00071): a ramp from beta_fast to beta_slow turns."""

    def pair_with(turns: float) -> float:
        original = config.rope_original_max_position_embeddings
        return channels * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(config.rotary_base))

    first = max(math.floor(pair_with(config.yarn_beta_fast)), 0)
    last = min(math.ceil(pair_with(config.yarn_beta_slow)), channels - 1)
    pairs = torch.arange(channels // 2, dtype=frequencies.dtype, device=frequencies.device)
    # 0.001: the width that public implementations give an empty ramp
    stretched = ((pairs - first) / max(last - first, 0.001)).clamp(0.0, 1.0)
    return torch.lerp(frequencies, frequencies / config.rope_scaling_factor, stretched)


def yarn_amplitude(config: ResolvedModelConfig) -> float:
    """Return YaRN's factor of cos and sin, a quotient of terms 0.1 m ln(factor) + 1; logits get its square."""

    def term(mscale: float) -> float:
        return 0.1 * mscale * math.log(config.rope_scaling_factor) + 1.0 if config.rope_scaling_factor > 1.0 else 1.0

    if config.yarn_mscale and config.yarn_mscale_all_dim:
        return term(config.yarn_mscale) / term(config.yarn_mscale_all_dim)
    return term(1.0)


_SCALINGS = {"none": _unscaled, "linear": _linear, "llama3": _llama3, "yarn": _yarn}
