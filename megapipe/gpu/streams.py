"""`StageStreams`: on a GPU a stream for each stage of a rank, so that the two halves of an overlapped pair run at one time (DualPipe).

Used by `engine`. It has not run on a GPU so far.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


class StageStreams:
    """Runs the computation of each stage on the stage's own stream, and all else (messages, reductions, optimizer) on the current one.

    autograd runs a backward on the stream of its forward, so a pair, a forward of one stage beside a backward of the other, is two streams.
    Outside a pair every computation waits for the current stream, which then waits for it. In a pair both halves wait for what was there
    before the pair, not for each other, and the current stream for both.
    With tp > 1 each half has a communicator of its own, or NCCL would run the collectives of one after those of the other.
    """

    def __init__(self, stages: Iterable[int], device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device, self._cuda = device, cuda
        self._streams = {stage: cuda.Stream(device) for stage in stages}
        self._halves_left = 0

    def begin_pair(self) -> None:
        """The next two computations are the halves of a pair."""
        self._fork()
        self._halves_left = 2

    @contextmanager
    def computing(self, stage: int) -> Iterator[None]:
        """What is launched inside is a computation of the stage."""
        if self._halves_left == 0:
            self._fork()
        try:
            with self._cuda.stream(self._streams[stage]):
                yield
        except BaseException:
            self._halves_left = 0  # the step is lost: the next one begins outside a pair
            raise
        self._halves_left = max(0, self._halves_left - 1)
        if self._halves_left == 0:
            current = self._cuda.current_stream(self._device)
            for stream in self._streams.values():
                current.wait_stream(stream)

    def of(self, stage: int) -> Any:
        """The stream of the stage's computation."""
        return self._streams[stage]

    def use(self, tensors: Iterable[Tensor | None]) -> None:
        """Called inside `computing` with what another stream made: its memory is not given away before this computation is done."""
        current = self._cuda.current_stream(self._device)
        for tensor in tensors:
            if tensor is not None:
                tensor.record_stream(current)

    def _fork(self) -> None:
        current = self._cuda.current_stream(self._device)
        for stream in self._streams.values():
            stream.wait_stream(current)
