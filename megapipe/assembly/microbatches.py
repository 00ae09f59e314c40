"""One step's microbatches on this rank: read when the engine first asks for them, with their dropout keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import overload

import numpy as np
import torch
from torch import Tensor

from megapipe.data.batch import Batch
from megapipe.gpu.packed_attention import DocumentBorders
from megapipe.model.microbatch import Microbatch
from megapipe.sharding.sequence import WHOLE_SEQUENCE, SequencePart
from megapipe.tensor_parallel.random import DropoutKey


@dataclass(frozen=True)
class Keys:
    """The source of a step's dropout streams; microbatch k of dp rank d is number k x dp + d of the global batch."""

    seed: int
    step: int
    dp_rank: int
    dp: int

    def of(self, k: int) -> DropoutKey:
        return DropoutKey(self.seed, self.step, k * self.dp + self.dp_rank)


class Microbatches(Sequence[Microbatch]):
    """A rank's microbatches of a global batch, shared by all of its stages.

    read: microbatch number -> Batch of whole sequences. keys: None for evaluation, without dropout. part: what this cp
    rank holds of each sequence. packs: documents have borders instead of ids (`InferenceRuntime.packs_documents`).
    num_ahead: modules of multi-token prediction on this rank.
    """

    def __init__(
        self,
        count: int,
        read: Callable[[int], Batch],
        keys: Keys | None,
        device: torch.device,
        part: SequencePart = WHOLE_SEQUENCE,
        packs: bool = False,
        num_ahead: int = 0,
    ) -> None:
        self._count, self._read, self._keys, self._device = count, read, keys, device
        self._part, self._packs, self._num_ahead = part, packs, num_ahead
        self._made: dict[int, Microbatch] = {}
        self.sample_ids: dict[int, tuple[int, ...]] = {}

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Microbatch: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Microbatch]: ...
    def __getitem__(self, index: int | slice) -> Microbatch | Sequence[Microbatch]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._count))]
        if index not in self._made:
            whole = self._read(index)
            batches = [whole, *(whole.ahead(count) for count in range(1, self._num_ahead + 1))]
            if self._part.ranks > 1:
                held = self._part.positions(whole.tokens.shape[1])
                batches = [batch.part(held) for batch in batches]
            self.sample_ids[index] = whole.sample_ids
            key = None if self._keys is None else replace(self._keys.of(index), part=self._part)
            self._made[index] = to_microbatch(batches[0], self._device, key, self._packs, batches[1:])
        return self._made[index]


def to_microbatch(
    batch: Batch,
    device: torch.device,
    key: DropoutKey | None,
    packs: bool = False,
    ahead: Sequence[Batch] = (),
) -> Microbatch:
    """Move the arrays of a batch to the device. A mask of ones and positions 0 .. s-1 stay implicit.

    packs: for kernels that take the borders of documents; else they get ids, for a mask. ahead: what the modules of
    multi-token prediction take in (`Batch.ahead`).
    """

    def tensor(array: np.ndarray) -> Tensor:
        made = torch.from_numpy(array)
        return made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made.to(device)

    def predicted(batch: Batch) -> Microbatch:
        count, mask, padding = batch.loss_tokens, batch.loss_mask, batch.padding
        return Microbatch(
            tokens=tensor(batch.tokens),
            labels=tensor(batch.labels),
            loss_mask=None if mask is None else tensor(mask),
            loss_tokens=None if count is None else torch.full((), count, dtype=torch.float64, device=device),
            padding=None if padding is None or not padding.any() else tensor(padding),
        )

    ids = batch.document_ids
    return replace(
        predicted(batch),
        position_ids=None if batch.position_ids is None else tensor(batch.position_ids),
        document_ids=None if ids is None or packs else tensor(ids),
        dropout_key=key,
        borders=DocumentBorders.of(ids, tensor) if ids is not None and packs else None,
        ahead=tuple(map(predicted, ahead)),
    )
