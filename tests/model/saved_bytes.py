"""What a forward keeps for its backward, counted: the bytes of distinct storages that autograd saves, without parameters and inputs.

with SavedBytes(stage, microbatch_tensors) as saved:
    loss = stage(microbatch)
saved.total
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn


class SavedBytes:
    """Counts through saved-tensor hooks. A storage that several operations save, or save as views, counts once, in full.

    excluded: tensors that are there anyway: the microbatch, masks and tables made once.
    """

    def __init__(self, module: nn.Module, excluded: Iterable[Tensor] = ()) -> None:
        self._excluded = {_storage(tensor) for tensor in (*module.parameters(), *excluded)}
        self._sizes: dict[int, int] = {}
        self._shapes: dict[int, tuple[tuple[int, ...], torch.dtype]] = {}
        self._alive: list[Tensor] = []  # so that no address is used twice
        self._hooks: Any = None

    def __enter__(self) -> SavedBytes:
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)
        self._hooks.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._hooks.__exit__(*exception)

    def _pack(self, tensor: Tensor) -> Tensor:
        address = _storage(tensor)
        if address not in self._excluded and tensor.device.type != "meta":
            self._sizes[address] = tensor.untyped_storage().nbytes()
            self._shapes.setdefault(address, (tuple(tensor.shape), tensor.dtype))
            self._alive.append(tensor.detach())
        return tensor

    @property
    def total(self) -> int:
        return sum(self._sizes.values())

    @property
    def storages(self) -> list[str]:
        """One line a storage, largest first, for messages."""
        order = sorted(self._sizes, key=lambda address: -self._sizes[address])
        return [
            f"{self._sizes[a]:>8} bytes, first saved as {list(self._shapes[a][0])} {self._shapes[a][1]}" for a in order
        ]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
