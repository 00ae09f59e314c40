"""Shares of the peak that fused attention kernels reach, by kernel, number of keys, head size and direction.

A kernel reaches highest * n / (n + half_at) of the 16-bit peak, n the mean number of keys that a query sees: half a
sequence under a causal mask, whose FLOPs are counted half. The curves are fitted to published benchmarks of kernels,
not to steps of training (tests/plan/attention_benchmarks.csv has the points and sources; a test repeats the fit):

- Hopper, flash2 and flash3: Shah et al. 2024 (arXiv:2407.08608), figures 5 and 6, H100 SXM5. Backwards were measured
  without a mask.
- Ampere: Dao 2023 (arXiv:2307.08691) gives the highest rates, 73 % forward and 63 % backward on A100; that they grow
  with keys as on Hopper is an assumption.
- Hopper and Blackwell, cudnn: NVIDIA/cudnn-frontend, benchmark/sdpa_benchmark_training, cuDNN 9.19 on H200 and 9.22 on
  GB200.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

FUSED_BACKWARD = 2.5  # of a forward's FLOPs: five products for two, since it computes the probabilities again
FULL_HEAD = 128  # channels of a head from which its size no longer matters


class Curve(NamedTuple):
    """The share of the peak by the mean number of keys of a query."""

    highest: float
    half_at: float

    def share(self, keys: float) -> float:
        return self.highest * keys / (keys + self.half_at)


class AttentionRate(NamedTuple):
    """A kernel on one generation of GPUs."""

    forward: Curve
    backward: Curve
    small_heads: float = 1.0  # of that share, with heads of 64 channels

    def share(self, keys: float, head_size: int, is_backward: bool) -> float:
        """Return the share of the peak: between 64 and 128 channels interpolated, below 64 in proportion to them."""
        scale = head_size / 64 * self.small_heads
        if head_size > 64:
            scale = min(1.0, self.small_heads + (1.0 - self.small_heads) * (head_size - 64) / (FULL_HEAD - 64))
        return scale * (self.backward if is_backward else self.forward).share(keys)


Rates = Mapping[str, AttentionRate]  # by kernel
FLASH_2_AMPERE = AttentionRate(Curve(0.73, 201), Curve(0.63, 274), 0.89)
AMPERE: Rates = {"flash2": FLASH_2_AMPERE, "cudnn": FLASH_2_AMPERE}  # torch's choice there is flash attention, too
HOPPER: Rates = {
    "flash2": AttentionRate(Curve(0.354, 201), Curve(0.333, 274), 0.89),
    "flash3": AttentionRate(Curve(0.663, 301), Curve(0.598, 427), 0.79),
    "cudnn": AttentionRate(Curve(0.722, 470), Curve(0.627, 670), 0.76),
}
BLACKWELL: Rates = {"cudnn": AttentionRate(Curve(0.723, 648), Curve(0.521, 451), 0.76)}
