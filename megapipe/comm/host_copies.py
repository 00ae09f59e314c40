"""gloo with tensors of a GPU: what travels are copies in host memory. For several ranks on one card, which NCCL refuses; slow and exact."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megapipe.comm.fake_backend import FakeHandle


def travels_through_host(handle: Any, tensor: Tensor) -> bool:
    """Whether the group's backend cannot send this tensor from where it lies."""
    return tensor.is_cuda and not isinstance(handle, FakeHandle) and dist.get_backend(handle) == "gloo"


class HostCopies:
    """An operation under way on host copies of tensors; `wait` copies back what it writes. Stands for one of torch's handles.

    tensors: of the operation. writes: how many of them, from the first, it changes. launch: starts it on tensors of the same shapes and
    returns torch's handle.
    """

    def __init__(self, tensors: Sequence[Tensor], writes: int, launch: Callable[..., Any]) -> None:
        copies = [tensor.cpu() if tensor.is_cuda else tensor.clone() for tensor in tensors]
        self._written = list(zip(tensors, copies, strict=True))[:writes]
        self._copies = copies  # gloo needs them until the operation is complete
        self._handle = launch(*copies)

    def is_completed(self) -> bool:
        completed: bool = self._handle.is_completed()
        return completed

    def wait(self) -> None:
        """Return when the operation is complete; what it wrote is then on its way into the tensors, in the current stream's order."""
        self._handle.wait()
        for tensor, copy in self._written:
            tensor.copy_(copy)
        self._copies = []
