"""gloo with GPU tensors: what is sent and received are copies in host memory.

Lets ranks share a GPU, which NCCL refuses; slow and exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megapipe.comm.fake_backend import FakeHandle


def needs_host_copies(handle: Any, tensor: Tensor) -> bool:
    """Return True if the group's backend cannot send this tensor from its device."""
    return tensor.is_cuda and not isinstance(handle, FakeHandle) and dist.get_backend(handle) == "gloo"


class HostCopies:
    """An operation in flight on host copies of its tensors; used like torch's handle. `wait` copies back what the
    operation writes.

    tensors: of the operation. writes: how many of them, from the first, it writes. launch: starts the operation on
    tensors of the same shapes and returns torch's handle.
    """

    def __init__(self, tensors: Sequence[Tensor], writes: int, launch: Callable[..., Any]) -> None:
        copies = [tensor.cpu() if tensor.is_cuda else tensor.clone() for tensor in tensors]
        self._written = list(zip(tensors, copies, strict=True))[:writes]
        self._copies = copies  # gloo needs them until the operation is complete
        self._handle = launch(*copies)

    def is_completed(self) -> bool:
        return bool(self._handle.is_completed())

    def wait(self) -> None:
        """Return when the operation is complete; the current stream then copies its results to the GPU."""
        self._handle.wait()
        for tensor, copy in self._written:
            tensor.copy_(copy)
        self._copies = []
