"""`GridMasks`: the dropout masks of one microbatch as the whole tensors that the reference asks for."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megapipe.config.config import Config
from megapipe.tensor_parallel.random import DropoutKey, keyed_mask


@dataclass(frozen=True)
class GridMasks:
    """The reference's `DropoutMasks`, put together from the slices that the tp ranks of a grid draw.

    Probabilities of attention are cut by heads; hidden states by the sequence under sequence parallelism, else all tp ranks share one
    stream. The grid draws hidden states as [s, b, h], the reference wants [b, s, h].
    """

    config: Config  # resolved
    key: DropoutKey
    dtype: torch.dtype = torch.float64
    device: torch.device | str = "cpu"

    def __call__(self, layer: int, site: str, shape: tuple[int, ...]) -> Tensor:
        """shape: [b, heads, s, s] for attention_probs, else [b, s, h]. Returns the mask divided by 1 - p."""
        model, tp = self.config.model, self.config.parallel.tensor_model_parallel_size
        if site == "attention_probs":
            rate, (batch, heads, *square) = model.attention_dropout, shape
            local: tuple[int, ...] = (batch, heads // tp, *square)
            return self._scaled(
                torch.cat([self._kept(local, rate, layer, site, rank) for rank in range(tp)], dim=1), rate
            )
        rate, (batch, seq, hidden) = model.hidden_dropout, shape
        if self.config.parallel.sequence_parallel and tp > 1:
            local = (seq // tp, batch, hidden)
            kept = torch.cat([self._kept(local, rate, layer, site, rank) for rank in range(tp)])
        else:
            kept = self._kept((seq, batch, hidden), rate, layer, site, None)
        return self._scaled(kept.transpose(0, 1), rate)

    def _kept(self, shape: tuple[int, ...], rate: float, layer: int, site: str, tp_rank: int | None) -> Tensor:
        return keyed_mask(shape, rate, self.key, layer, site, tp_rank, self.device)

    def _scaled(self, kept: Tensor, rate: float) -> Tensor:
        return kept.to(self.dtype) / (1.0 - rate)
