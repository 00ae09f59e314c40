"""`Staging`: memory of the CPU that tensors are copied into, so that a save can go on while training changes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megapipe.checkpoint.tensor_box import TensorBox

ALIGNMENT = 64


class Staging:
    """One buffer, reused by every save: as large as the largest of them, pinned if tensors come from a GPU."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    @property
    def num_bytes(self) -> int:
        return self._memory.numel()

    def reserve(self, tensors: Sequence[TensorBox]) -> None:
        """Take the memory that copies of these will need, at a moment when nobody waits for a step."""
        _, total = _places(tensors)
        if self._memory.numel() < total:
            on_gpu = any(tensor.values.device.type == "cuda" for tensor in tensors)
            self._memory = torch.empty(0, dtype=torch.uint8)  # the old one goes before the new one comes
            self._memory = torch.zeros(
                total, dtype=torch.uint8, pin_memory=on_gpu
            )  # zeros: pages that are there, not promised

    def copy(self, tensors: Sequence[TensorBox]) -> Callable[[], Sequence[TensorBox]]:
        """Copies of these boxes, to be asked for by who reads them. Tensors may be changed at once.

        From a GPU the copies are only queued on the current stream, ahead of what changes the tensors; asking waits for them.
        """
        self.reserve(tensors)
        starts, _ = _places(tensors)
        device = tensors[0].values.device if tensors else torch.device("cpu")
        staged = [self._one(tensor, start) for tensor, start in zip(tensors, starts, strict=True)]
        if device.type != "cuda":
            return lambda: staged
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))

        def wait() -> Sequence[TensorBox]:
            event.synchronize()
            return staged

        return wait

    def _one(self, tensor: TensorBox, start: int) -> TensorBox:
        values: Tensor = self._memory[start : start + _num_bytes(tensor)].view(tensor.values.dtype)
        values.copy_(tensor.values.reshape(-1), non_blocking=True)
        return TensorBox(tensor.name, tensor.shape, tensor.box, values)


def _places(tensors: Sequence[TensorBox]) -> tuple[list[int], int]:
    """Where each tensor starts, and the bytes of all."""
    starts, position = [], 0
    for tensor in tensors:
        starts.append(position)
        position += -(-_num_bytes(tensor) // ALIGNMENT) * ALIGNMENT
    return starts, position


def _num_bytes(tensor: TensorBox) -> int:
    return tensor.values.numel() * tensor.values.dtype.itemsize
