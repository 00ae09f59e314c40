"""Rotary positions (Su et al. 2021, arXiv:2104.09864): inverse frequencies, their scalings, cos and sin, the half
rotation.

Channel c is paired with c + rotary_channels / 2 (the "half" layout of GPT-NeoX, Llama and Megatron-LM).
"""

import math

import torch
from torch import Tensor

from megapipe.extras.reference.config import ReferenceConfig


def cos_sin(config: ReferenceConfig, position_ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return cos and sin, each [b, s, rotary_channels], in dtype (at least fp32). position_ids: [b, s] integers."""
    angles = position_ids[..., None].to(dtype) * inverse_frequencies(config, dtype, position_ids.device)
    angles = torch.cat((angles, angles), dim=-1)
    amplitude = yarn_attention_factor(config) if config.rope_scaling_type == "yarn" else 1.0
    return angles.cos() * amplitude, angles.sin() * amplitude


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first rotary_channels of x [b, s, heads, kv_channels]. cos, sin: [b, s, rotary_channels]."""
    rotated, passed = x[..., : cos.shape[-1]].to(cos.dtype), x[..., cos.shape[-1] :]
    first, second = rotated.chunk(2, dim=-1)
    rotated = rotated * cos[:, :, None] + torch.cat((-second, first), dim=-1) * sin[:, :, None]
    return torch.cat((rotated.to(x.dtype), passed), dim=-1)


def inverse_frequencies(config: ReferenceConfig, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return radians per position for each pair of channels, [rotary_channels / 2], after the configured scaling."""
    channels = torch.arange(0, config.rotary_channels, 2, dtype=dtype, device=device)
    frequencies = 1.0 / config.rotary_base ** (channels / config.rotary_channels)
    scale = {"none": _unscaled, "linear": _linear, "llama3": _llama3, "yarn": _yarn}[config.rope_scaling_type]
    return scale(config, frequencies)


def _unscaled(config: ReferenceConfig, frequencies: Tensor) -> Tensor:
    return frequencies


def _linear(config: ReferenceConfig, frequencies: Tensor) -> Tensor:
    """Position interpolation (Chen et al. 2023, arXiv:2306.15595)."""
    return frequencies / config.rope_scaling_factor


def _llama3(config: ReferenceConfig, frequencies: Tensor) -> Tensor:
    """Llama 3.1: slow wavelengths above original / low_factor, keep those below original / high_factor, blend in
    between.
    """
    low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
    # full turns within the original context
    turns = config.rope_original_max_position_embeddings * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return kept * frequencies + (1.0 - kept) * frequencies / config.rope_scaling_factor


def _yarn(config: ReferenceConfig, frequencies: Tensor) -> Tensor:
    """YaRN's NTK-by-parts (Peng et al. 2023, arXiv:2309.00071): a ramp over the channel pairs between beta_fast and
    beta_slow turns.
    """
    first = max(math.floor(_yarn_pair_with_turns(config, config.yarn_beta_fast)), 0)
    last = min(math.ceil(_yarn_pair_with_turns(config, config.yarn_beta_slow)), config.rotary_channels - 1)
    width = (last - first) or 1  # pairs are integers: an empty ramp is a step for any width up to 1
    pairs = torch.arange(config.rotary_channels // 2, dtype=frequencies.dtype, device=frequencies.device)
    slowed = ((pairs - first) / width).clamp(0.0, 1.0)
    return (1.0 - slowed) * frequencies + slowed * frequencies / config.rope_scaling_factor


def _yarn_pair_with_turns(config: ReferenceConfig, turns: float) -> float:
    """Return the index (a real number) of the channel pair that makes `turns` turns in the original context."""
    wavelength = config.rope_original_max_position_embeddings / turns
    return config.rotary_channels * math.log(wavelength / (2 * math.pi)) / (2 * math.log(config.rotary_base))


def yarn_attention_factor(config: ReferenceConfig) -> float:
    """Return YaRN's factor of cos and sin: 0.1 ln(factor) + 1, or the quotient of two such terms if both mscales are
    set.
    """

    def term(mscale: float) -> float:
        return 0.1 * mscale * math.log(config.rope_scaling_factor) + 1.0 if config.rope_scaling_factor > 1.0 else 1.0

    if config.yarn_mscale and config.yarn_mscale_all_dim:
        return term(config.yarn_mscale) / term(config.yarn_mscale_all_dim)
    return term(1.0)
