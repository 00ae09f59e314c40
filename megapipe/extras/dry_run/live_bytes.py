"""`LiveBytes`: the bytes of all live storages that operations have created, and their peak."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class LiveBytes(TorchDispatchMode):
    """A dispatch mode that counts each storage among the results of operations, from its first appearance until freed.

    Views share storages. Memory that a kernel allocates and frees within one operation is not seen. Works for real
    tensors and on the meta device. The sum is split by labels: a storage gets the current `label`, or the one that
    `name` gives it later.
    """

    def __init__(self, label: str = "other") -> None:
        super().__init__()
        self.label = label
        self.now = 0
        self.peak = 0
        self.by_label: Counter[str] = Counter()
        self.at_peak: Mapping[str, int] = {}
        self.at_new_peak: Callable[[], None] = lambda: None
        self._is_paused = False
        self._live: dict[int, tuple[weakref.ref[torch.UntypedStorage], int, str]] = {}

    def name(self, tensors: Iterable[Tensor], label: str) -> None:
        """Count the storages of these tensors under `label`, also those not seen so far."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key = storage._cdata
            self._see(tensor)
            reference, size, old = self._live[key]
            self.by_label[old] -= size
            self.by_label[label] += size
            self._live[key] = reference, size, label

    def outside(self, make: Callable[[int], Tensor], num_bytes: int) -> Tensor:
        """Return make(num_bytes) without counting its memory, which is not the device's."""
        self._is_paused = True
        try:
            tensor = make(num_bytes)
        finally:
            self._is_paused = False
        self._keep(tensor.untyped_storage(), 0, "outside")
        return tensor

    def begin(self) -> None:
        """Restart the peak from the current bytes."""
        self.peak = 0
        self._rise()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self._see(result)
        elif isinstance(result, tuple | list):
            for each in result:
                if isinstance(each, Tensor):
                    self._see(each)
        return result

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live or self._is_paused:
            return
        size = storage.nbytes()
        self._keep(storage, size, self.label)
        self.by_label[self.label] += size
        self.now += size
        if self.now > self.peak:
            self._rise()

    def _keep(self, storage: torch.UntypedStorage, size: int, label: str) -> None:
        key = storage._cdata
        self._live[key] = weakref.ref(storage, lambda _: self._freed(key)), size, label

    def _rise(self) -> None:
        self.peak, self.at_peak = self.now, dict(self.by_label)
        self.at_new_peak()

    def _freed(self, key: int) -> None:
        _, size, label = self._live.pop(key)
        self.by_label[label] -= size
        self.now -= size
