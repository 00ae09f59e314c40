"""What an attention kernel is asked for, and how megapipe's heads are laid out for kernels that share keys between query heads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

# (q [s, b, g, n, d], k [s, b, g, 1, d], v [s, b, g, 1, d]) -> [s, b, g n d], causal
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class AttentionShape:
    """Of one rank: queries n for each of its key/value heads. window: tokens a token sees, itself included; None: all before it."""

    layer: int
    queries: int
    head_dim: int
    scale: float
    window: int | None
    cap: float | None
    deterministic: bool


def folded(x: Tensor) -> Tensor:
    """[s, b, g, n, d] -> [s, b g, n, d], a view: key/value heads become part of the batch, each with its own n query heads."""
    return x.flatten(1, 2)
