"""Rotary positions (Su et al. 2021, arXiv:2104.09864): frequencies and their scalings, tables, the half rotation.

Channel c of a head is paired with c + r / 2, r the number of rotated channels. Tables are at least fp32 and made once a stage (again only
for a longer sequence, another device or dtype). Nothing is kept for the backward: it is the rotation by the opposite angle.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from megapipe.config.model import ModelConfig
from megapipe.errors import ConfigError


class Rotary:
    """cos and sin of one model configuration."""

    def __init__(self, config: ModelConfig) -> None:
        assert config.kv_channels is not None
        self.config = config
        self.channels = int(config.kv_channels * config.rotary_percent)
        if self.channels % 2 or not self.channels:
            raise ConfigError(
                f"--rotary-percent {config.rotary_percent} of --kv-channels {config.kv_channels} is {self.channels} channels; "
                "rotary positions turn pairs of channels: choose a percentage that gives an even number above 0"
            )
        self._tables: dict[
            tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]
        ] = {}  # for the longest sequence so far

    def tables(self, seq: int, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin, [s, 1, 1, 1, r / 2], of the positions 0 .. s - 1; dtype: at least fp32."""
        key = (device, dtype)
        if key not in self._tables or self._tables[key][0].shape[0] < seq:
            self._tables[key] = self._at(torch.arange(seq, device=device)[:, None], dtype)
        cos, sin = self._tables[key]
        return cos[:seq], sin[:seq]

    def tables_at(self, position_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """position_ids: [b, s]. cos and sin, [s, b, 1, 1, r / 2]."""
        return self._at(position_ids.t(), dtype)

    def _at(self, positions_sb: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        frequencies = inverse_frequencies(self.config, self.channels, dtype, positions_sb.device)
        angles = (positions_sb[..., None].to(dtype) * frequencies)[:, :, None, None]
        amplitude = yarn_amplitude(self.config) if self.config.rope_scaling_type == "yarn" else 1.0
        return angles.cos() * amplitude, angles.sin() * amplitude


def rotate_(x: Tensor, cos: Tensor, sin: Tensor, groups: int, heads: int, head_dim: int) -> Tensor:
    """Rotate, in place, the first `heads` of each group's heads.

    x: contiguous, viewed as [s, b, groups, heads or more, head_dim]; its first r channels are turned, the others stay. The values of x
    must be needed by nobody else: it is the output of a linear or of a norm.
    """
    return _Rotate.apply(x, cos, sin, (groups, heads, head_dim))


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, layout: tuple[int, int, int]) -> Tensor:
        ctx.tables, ctx.layout = (cos, sin), layout  # constants shared by all layers, not activations
        ctx.mark_dirty(x)
        _turn(x, cos, sin, layout)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        cos, sin = ctx.tables
        grad = grad.clone(
            memory_format=torch.contiguous_format
        )  # not ours to change: hooks and other consumers may hold it
        _turn(grad, cos, -sin, ctx.layout)
        return grad, None, None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor, layout: tuple[int, int, int]) -> None:
    groups, heads, head_dim = layout
    half = cos.shape[-1]
    turned = x.view(*x.shape[:2], groups, -1, head_dim)[:, :, :, :heads]
    first, second = turned[..., :half], turned[..., half : 2 * half]
    if x.dtype == cos.dtype:
        across = first * sin
        first.mul_(cos).addcmul_(second, sin, value=-1)
        second.mul_(cos).add_(across)
    else:  # products in the tables' dtype, rounded once
        a, b = first.to(cos.dtype), second.to(cos.dtype)
        first.copy_(a * cos - b * sin)
        second.copy_(b * cos + a * sin)


def inverse_frequencies(config: ModelConfig, channels: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Radians a position for each pair of channels, [r / 2], after the configured scaling."""
    even = torch.arange(0, channels, 2, dtype=dtype, device=device)
    frequencies = config.rotary_base ** (-even / channels)
    return _SCALINGS[config.rope_scaling_type](config, channels, frequencies)


def _unscaled(config: ModelConfig, channels: int, frequencies: Tensor) -> Tensor:
    return frequencies


def _linear(config: ModelConfig, channels: int, frequencies: Tensor) -> Tensor:
    """Position interpolation (Chen et al. 2023, arXiv:2306.15595)."""
    return frequencies / config.rope_scaling_factor


def _llama3(config: ModelConfig, channels: int, frequencies: Tensor) -> Tensor:
    """Llama 3.1: waves longer than original / low_freq_factor are stretched, those shorter than original / high_freq_factor stay."""
    turns = config.rope_original_max_position_embeddings * frequencies / (2 * math.pi)  # within the original context
    low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return torch.lerp(frequencies / config.rope_scaling_factor, frequencies, kept)


def _yarn(config: ModelConfig, channels: int, frequencies: Tensor) -> Tensor:
    """NTK-by-parts of YaRN (Peng et al. 2023, arXiv:2309.00071): a linear ramp over the pairs from beta_fast to beta_slow turns."""

    def pair_with(turns: float) -> float:
        original = config.rope_original_max_position_embeddings
        return channels * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(config.rotary_base))

    first = max(math.floor(pair_with(config.yarn_beta_fast)), 0)
    last = min(math.ceil(pair_with(config.yarn_beta_slow)), channels - 1)
    pairs = torch.arange(channels // 2, dtype=frequencies.dtype, device=frequencies.device)
    stretched = ((pairs - first) / max(last - first, 0.001)).clamp(
        0.0, 1.0
    )  # 0.001: the width public code gives an empty ramp
    return torch.lerp(frequencies, frequencies / config.rope_scaling_factor, stretched)


def yarn_amplitude(config: ModelConfig) -> float:
    """What YaRN multiplies cos and sin by (both of q and of k, so logits by its square): the quotient of two terms 0.1 m ln(factor) + 1."""

    def term(mscale: float) -> float:
        return 0.1 * mscale * math.log(config.rope_scaling_factor) + 1.0 if config.rope_scaling_factor > 1.0 else 1.0

    if config.yarn_mscale and config.yarn_mscale_all_dim:
        return term(config.yarn_mscale) / term(config.yarn_mscale_all_dim)
    return term(1.0)


_SCALINGS = {"none": _unscaled, "linear": _linear, "llama3": _llama3, "yarn": _yarn}
