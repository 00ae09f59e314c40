"""`KVCache`: keys and values of a batch of sequences that grow token by token. Filled by `attention`, owned by inference/."""

from __future__ import annotations

import torch
from torch import Tensor


class KVCache:
    """Keys and values of all layers on this rank, for `capacity` positions of a batch.

    starts: [b], the position at which each sequence begins: sequences of unequal lengths are aligned at their ends, and what stands before
    a start is padding that nobody sees. None: all begin at 0. `length` positions are filled; `advance` counts a forward that went through
    all layers. Memory: 2 x capacity x b x heads x head_dim elements a layer, heads being the key/value heads of this rank.
    """

    def __init__(self, capacity: int, starts: Tensor | None = None) -> None:
        self.capacity = capacity
        self.starts = starts
        self.length = 0
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append the keys and values [s, b, ...] of the newest positions; returns those of all, [length + s, b, ...], views.

        Raises ValueError beyond the capacity.
        """
        stop = self.length + k.shape[0]
        if stop > self.capacity:
            raise ValueError(f"{stop} positions do not fit into a cache of {self.capacity}")
        if layer not in self._layers:
            self._layers[layer] = (_positions(self.capacity, k), _positions(self.capacity, v))
        keys, values = self._layers[layer]
        keys[self.length : stop] = k
        values[self.length : stop] = v
        return keys[:stop], values[:stop]

    def advance(self, num_positions: int) -> None:
        """All layers of all stages on this rank have the newest positions."""
        self.length += num_positions

    def visible(self, num_queries: int, window: int | None, device: torch.device) -> Tensor | None:
        """[1 or b, 1, num_queries, length + num_queries]: which keys the newest positions see; None where each sees all up to itself."""
        stop = self.length + num_queries
        if self.starts is None and (window is None or window >= stop):
            return None
        keys = torch.arange(stop, device=device)
        queries = torch.arange(self.length, stop, device=device)[:, None]
        seen = keys <= queries
        if window is not None:
            seen &= keys > queries - window
        if self.starts is None:
            return seen[None, None]
        # padding sees itself, so that no row of a softmax is empty
        return (seen & (keys >= self.starts.to(device)[:, None, None]) | (keys == queries))[:, None]


def _positions(capacity: int, like: Tensor) -> Tensor:
    return torch.empty(capacity, *like.shape[1:], dtype=like.dtype, device=like.device)
