"""Inputs and outputs of a stage besides the hidden states: `Microbatch`, `StageLoss`, and `KVCache` for generation."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megapipe.gpu.packed_attention import DocumentBorders
from megapipe.tensor_parallel.random import DropoutKey


@dataclass(frozen=True)
class Microbatch:
    """One microbatch of one data-parallel rank, the same on all its tp and pp ranks. Tensors are [b, s], s the tokens
    of this cp rank (`sharding.sequence`). Other shapes: those in borders and in the cache.
    """

    tokens: Tensor  # int64
    labels: Tensor | None = None  # int64, the token after each; None for inference
    loss_mask: Tensor | None = None  # weight of each token's loss; None: all 1
    position_ids: Tensor | None = None  # None: those in the sequence, 0 .. s - 1 with one cp rank
    # tokens with equal ids see each other, [b, s cp], of the whole sequence on every cp rank; None: one document, or
    # `borders`
    document_ids: Tensor | None = None
    dropout_key: DropoutKey | None = None  # None: no dropout (evaluation, inference)
    cache: KVCache | None = None  # generation: tokens continue the cached ones, and position_ids are required
    loss_tokens: Tensor | None = None  # sum of the loss mask over all cp ranks, []; None: over this one's
    borders: DocumentBorders | None = None  # of documents, for kernels that need no mask
    # for each module of multi-token prediction its tokens, labels, loss mask and loss tokens; () without their losses
    ahead: tuple[Microbatch, ...] = ()


@dataclass(frozen=True)
class StageLoss:
    """The output of the last stage: sums over the microbatch, scalars in at least fp32, for any kind of average."""

    loss_sum: Tensor  # sum of loss * loss_mask over the tokens, the same on all tp ranks
    num_tokens: Tensor  # sum of loss_mask over the whole sequences, those of all cp ranks
    ahead: tuple[StageLoss, ...] = ()  # of the modules of multi-token prediction


class KVCache:
    """Keys and values of all layers on this rank, for `capacity` positions of a batch that grows token by token.

    starts: [b], the position at which each sequence begins: sequences of unequal lengths are aligned at their ends,
    and positions before a start are invisible padding. None: all begin at 0. `length` positions are filled; `advance`
    adds those of a forward through all layers. Memory: 2 x capacity x b x heads x head_dim elements per layer, with
    the key/value heads of this rank.
    """

    def __init__(self, capacity: int, starts: Tensor | None = None) -> None:
        self.capacity = capacity
        self.starts = starts
        self.length = 0
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append keys and values [s, b, ...] of the newest positions; return views of all, [length + s, b, ...].

        Raises ValueError beyond the capacity.
        """
        stop = self.length + k.shape[0]
        if stop > self.capacity:
            raise ValueError(f"{stop} positions do not fit into a cache of {self.capacity}")
        if layer not in self._layers:
            self._layers[layer] = (k.new_empty(self.capacity, *k.shape[1:]), v.new_empty(self.capacity, *v.shape[1:]))
        keys, values = self._layers[layer]
        keys[self.length : stop] = k
        values[self.length : stop] = v
        return keys[:stop], values[:stop]

    def advance(self, num_positions: int) -> None:
        """Count the newest positions as filled, once all layers of all stages on this rank have them."""
        self.length += num_positions

    def visible(self, num_queries: int, window: int | None, device: torch.device) -> Tensor | None:
        """Return the keys that new positions see, [1 or b, 1, queries, length + queries]; None for plain causality."""
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
