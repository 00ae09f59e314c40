"""`HostCopy`: a few numbers on their way from the device to the host."""

from __future__ import annotations

import torch
from torch import Tensor

from megapipe.comm.collectives import Work


class HostCopy:
    """A copy of a small tensor to pinned host memory, ordered after `works` in the current stream.

    `values` waits for this copy alone, not for what is launched after it. On a CPU there is no copy, and `values` waits
    for the works.
    """

    def __init__(self, tensor: Tensor, *works: Work) -> None:
        self._tensor, self._works, self._event = tensor, works, None
        if tensor.device.type == "cuda":  # not so in a dry run
            for work in works:
                work.wait()
            self._works, self._event = (), torch.cuda.Event()
            self._tensor = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._tensor.copy_(tensor, non_blocking=True)
            self._event.record()

    def values(self) -> list[float]:
        """Return the numbers as soon as they have arrived."""
        for work in self._works:
            work.wait()
        if self._event is not None:
            self._event.synchronize()
        return self._tensor.tolist()  # type: ignore[no-any-return]
