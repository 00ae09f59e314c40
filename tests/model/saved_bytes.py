"""Bytes of activations that a forward keeps for its backward.

Distinct storages saved by autograd are counted, without parameters and inputs::

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
    """A counter of saved bytes that uses saved-tensor hooks.

    A storage that several operations save, or save as views, counts once and in full.

    excluded: tensors that exist anyway: the microbatch, and masks and tables computed once.
    """

    def __init__(self, module: nn.Module, excluded: Iterable[Tensor] = ()) -> None:
        self._excluded = {_storage(tensor) for tensor in (*module.parameters(), *excluded)}
        self._sizes: dict[int, int] = {}
        self._shapes: dict[int, tuple[tuple[int, ...], torch.dtype]] = {}
        self._alive: list[Tensor] = []  # prevents reuse of an address
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
        """One line per storage for messages, largest first."""
        order = sorted(self._sizes, key=lambda address: -self._sizes[address])
        return [
            f"{self._sizes[a]:>8} bytes, first saved as {list(self._shapes[a][0])} {self._shapes[a][1]}" for a in order
        ]


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
