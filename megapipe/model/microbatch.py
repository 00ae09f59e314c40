"""Inputs and outputs of a stage besides the hidden states: `Microbatch`, `StageLoss`, and `KVCache` for generation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import overload

import torch
from torch import Tensor

from megapipe.gpu.packed_attention import DocumentBorders
from megapipe.sharding.sequence import SequencePart, SequenceSlice
from megapipe.tensor_parallel.gemms import at_least_fp32
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
    loss_tokens: Tensor | None = None  # sum of the loss mask over all cp ranks or slices, []; None: over these tokens
    borders: DocumentBorders | None = None  # of documents, for kernels that need no mask
    slice: MicrobatchSlice | None = None  # --pipe-sp-splits: tokens are those of one slice of each sequence
    # for each module of multi-token prediction its tokens, labels, loss mask, loss tokens and padding; () without their
    # losses
    ahead: tuple[Microbatch, ...] = ()
    # bool [b, s cp], of the whole sequence on every cp rank: positions without a token; None: every position has one
    padding: Tensor | None = None

    def place(self, part: SequencePart) -> SequenceSlice:
        """Return the slice of the sequence of which these tokens are a cp rank's part; the whole without slices."""
        return SequenceSlice((self.tokens.shape[1] * part.ranks,)) if self.slice is None else self.slice.place


@dataclass(frozen=True)
class StageLoss:
    """The output of the last stage: sums over the microbatch, scalars in at least fp32, for any kind of average."""

    loss_sum: Tensor  # sum of loss * loss_mask over the tokens, the same on all tp ranks
    num_tokens: Tensor  # sum of loss_mask over the whole sequences, those of all cp ranks
    ahead: tuple[StageLoss, ...] = ()  # of the modules of multi-token prediction


@dataclass(frozen=True)
class MicrobatchSlice:
    """The place of a slice in its microbatch, and what it shares with the other slices."""

    place: SequenceSlice
    keys: SliceKeys


class SliceKeys:
    """Keys and values of all slices of one microbatch on this rank, and their gradients, by layer (Seq1F1B, Sun et al.
    2024, arXiv:2406.03488).

    A slice writes its own in its forward and reads those of the slices before it. In the backward, which runs from the
    last slice to the first, each adds to the gradients of all that it has read: those of its own are whole before its
    backward. A layer's are freed with the backward of the first slice or, without gradients, with the forward of the
    last. Keys and values are side by side: s x b x heads x channels of both elements per layer, with the key/value
    heads and positions of this rank, and as many in at least fp32 during the backwards.
    """

    def __init__(self, trains: bool) -> None:
        self._trains = trains
        self._keys: dict[int, Tensor] = {}
        self._gradients: dict[int, Tensor] = {}

    def write(self, layer: int, k: Tensor, v: Tensor, place: SequenceSlice) -> Tensor:
        """Keep keys and values [length, b, ...] of a slice; return all so far, [stop, b, ..., channels of both].

        A recompute writes them again, with the same values. Lengths are those on this rank.
        """
        ranks, width = place.length // k.shape[0], k.shape[-1]
        if layer not in self._keys:
            self._keys[layer] = k.new_empty(place.seq // ranks, *k.shape[1:-1], width + v.shape[-1])
        own = self._keys[layer][place.start // ranks : place.stop // ranks]
        own[..., :width] = k
        own[..., width:] = v
        keys = self._keys[layer][: place.stop // ranks]
        if place.stop == place.seq and not self._trains:
            del self._keys[layer]
        return keys

    def of(self, layer: int, place: SequenceSlice, length: int) -> Tensor:
        """Return keys and values up to the end of a slice. length: its tokens on this rank."""
        return self._keys[layer][: place.stop * length // place.length]

    def gradients(self, layer: int, keys: Tensor) -> Tensor:
        """Return the sums of the gradients of the first keys and values, in at least fp32."""
        if layer not in self._gradients:
            whole = self._keys[layer]
            self._gradients[layer] = torch.zeros_like(whole, dtype=at_least_fp32(whole.dtype))
        return self._gradients[layer][: len(keys)]

    def with_gradients(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return all keys and values, and their gradients, which are made if they are not there."""
        return list(self._keys.values()), [self.gradients(layer, keys) for layer, keys in self._keys.items()]

    def free(self, layer: int) -> None:
        """Free a layer's, after the backward of the first slice."""
        del self._keys[layer], self._gradients[layer]


class SlicedMicrobatches(Sequence[Microbatch]):
    """The slices of all microbatches in the order of their numbers in a schedule: slice j of microbatch i is number
    i x slices + j.

    trains: a backward follows.
    """

    def __init__(self, whole: Sequence[Microbatch], slices: Sequence[SequenceSlice], trains: bool) -> None:
        self._whole, self._slices = whole, slices
        self._keys = [SliceKeys(trains) for _ in range(len(whole))]  # reads none of them yet
        self._made: dict[int, Microbatch] = {}

    def __len__(self) -> int:
        return len(self._whole) * len(self._slices)

    @overload
    def __getitem__(self, index: int) -> Microbatch: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Microbatch]: ...
    def __getitem__(self, index: int | slice) -> Microbatch | Sequence[Microbatch]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if index not in self._made:
            self._made[index] = self._slice(*divmod(index, len(self._slices)))
        return self._made[index]

    def _slice(self, number: int, part: int) -> Microbatch:
        return _cut(self._whole[number], MicrobatchSlice(self._slices[part], self._keys[number]))


def _cut(whole: Microbatch, own: MicrobatchSlice) -> Microbatch:
    """Return a slice of a microbatch; what belongs to whole sequences stays."""
    place, local = own.place, whole.tokens.shape[1]
    held = slice(place.start * local // place.seq, place.stop * local // place.seq)

    def of(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor[:, held]

    tokens = whole.loss_tokens
    if tokens is None:
        mask, wide = whole.loss_mask, torch.float64
        tokens = torch.tensor(whole.tokens.numel(), dtype=wide) if mask is None else mask.sum(dtype=wide)
    return replace(
        whole,
        tokens=whole.tokens[:, held],
        labels=of(whole.labels),
        loss_mask=of(whole.loss_mask),
        position_ids=of(whole.position_ids),
        loss_tokens=tokens,
        slice=own,
        ahead=tuple(_cut(each, own) for each in whole.ahead),
    )


class KVCache:
    """Keys and values of all layers on this rank, for `capacity` positions of a batch that grows token by token.

    starts: [b], the position at which each sequence begins: sequences of unequal lengths are aligned at their ends,
    and positions before a start are padding that others do not see. None: all begin at 0. `length` positions are
    filled; `advance` adds those of a forward through all layers. Memory: 2 x capacity x b x heads x head_dim elements
    per layer, with the key/value heads of this rank.
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
