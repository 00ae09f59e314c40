"""`StageStreams`: one CUDA stream per stage of a rank, so that the halves of an overlapped pair (DualPipe) run at once.

Not yet run on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class StageStreams:
    """Runs each stage on its own stream, and messages, reductions and the optimizer on the current stream.

    autograd runs a backward on the stream of its forward, so a pair, a forward of one stage and a backward of the
    other, uses two streams. Outside a pair, every computation waits for the current stream, which then waits for it.
    In a pair both halves wait for what preceded the pair, not for each other, and the current stream waits for both.
    With tp > 1 each half has its own communicator; otherwise NCCL would run the collectives of one after those of the
    other.
    """

    def __init__(self, stages: Iterable[int], device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device, self._cuda = device, cuda
        self._streams = {stage: cuda.Stream(device) for stage in stages}
        self._halves_left = 0

    def begin_pair(self) -> None:
        """Treat the next two computations as the halves of a pair."""
        self._fork()
        self._halves_left = 2

    @contextmanager
    def computing(self, stage: int) -> Iterator[None]:
        """Launch the work inside the block on the stage's stream."""
        if self._halves_left == 0:
            self._fork()
        try:
            with self._cuda.stream(self._streams[stage]):
                yield
        except BaseException:
            self._halves_left = 0  # the step is lost; the next one starts outside a pair
            raise
        self._halves_left = max(0, self._halves_left - 1)
        if self._halves_left == 0:
            current = self._cuda.current_stream(self._device)
            for stream in self._streams.values():
                current.wait_stream(stream)

    def of(self, stage: int) -> Any:
        """Return the stage's stream."""
        return self._streams[stage]

    def use(self, tensors: Iterable[Tensor | None]) -> None:
        """Keep the memory of another stream's tensors until this computation is done; call inside `computing`."""
        current = self._cuda.current_stream(self._device)
        for tensor in tensors:
            if tensor is not None:
                tensor.record_stream(current)

    def _fork(self) -> None:
        current = self._cuda.current_stream(self._device)
        for stream in self._streams.values():
            stream.wait_stream(current)
