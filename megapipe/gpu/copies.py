"""Copies between a device and its host: on streams of their own where the device is a GPU, at once where it is a CPU. Used by `offload`.

It has not run on a GPU so far.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from megapipe.schedule.moves import host_pieces

Copy = Callable[[], None]


@dataclass
class HostBuffer:
    """Bytes in the host's memory, in pieces of uint8. read: the event behind the last copy out of it."""

    pieces: tuple[Tensor, ...]
    read: Any = None

    @property
    def num_bytes(self) -> int:
        return sum(piece.numel() for piece in self.pieces)


class Copies(Protocol):
    """Where copies run. Streams and events are opaque to the caller."""

    def here(self) -> Any:
        """The stream that computes now."""

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """What is allocated inside belongs to this stream, whichever computes now."""

    def to_host(self, stream: Any, buffer: HostBuffer, copy: Copy) -> Any:
        """Copy what `stream` has made so far; returns the event behind the copy."""

    def to_device(self, stream: Any, buffer: HostBuffer, copy: Copy) -> Any:
        """Copy into memory of `stream`, which has waited for the copy to the host; returns the event behind the copy."""

    def wait(self, stream: Any, event: Any) -> None:
        """What `stream` does from now on comes after the event. The host does not wait."""

    def finish(self) -> None:
        """Return when all copies are done: memory may be freed that they were reading or writing."""

    def host_memory(self, num_bytes: int) -> Tensor:
        """uint8, uninitialised."""


class StreamCopies:
    """A GPU's: one stream for each direction, so that both ways of the link are used.

    Memory is never marked with record_stream. What is copied out is held until the stream that made it waits for the copy; what comes in is
    allocated on the stream that will use it, and the copy waits for that stream, since the allocator may hand out what its last kernels
    still read.
    """

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device, self._cuda = device, cuda
        self._out, self._in = cuda.Stream(device), cuda.Stream(device)

    def here(self) -> Any:
        return self._cuda.current_stream(self._device)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return self._cuda.stream(stream)  # type: ignore[no-any-return]

    def to_host(self, stream: Any, buffer: HostBuffer, copy: Copy) -> Any:
        self._out.wait_stream(stream)
        if buffer.read is not None:
            self._out.wait_event(buffer.read)
            buffer.read = None
        return self._copied(self._out, copy)

    def to_device(self, stream: Any, buffer: HostBuffer, copy: Copy) -> Any:
        self._in.wait_stream(stream)
        buffer.read = self._copied(self._in, copy)
        return buffer.read

    def wait(self, stream: Any, event: Any) -> None:
        stream.wait_event(event)

    def finish(self) -> None:
        self._out.synchronize()
        self._in.synchronize()

    def host_memory(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def _copied(self, stream: Any, copy: Copy) -> Any:
        with self._cuda.stream(stream):
            copy()
        return stream.record_event()


class DirectCopies:
    """A CPU's, whose host memory is memory like any other; device meta: nothing is copied, for tensors without values."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def here(self) -> Any:
        return None

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return nullcontext()

    def to_host(self, stream: Any, buffer: HostBuffer, copy: Copy) -> Any:
        copy()

    def to_device(self, stream: Any, buffer: HostBuffer, copy: Copy) -> Any:
        copy()

    def wait(self, stream: Any, event: Any) -> None:
        """Copies are done when they return."""

    def finish(self) -> None:
        """As above."""

    def host_memory(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)


def copies_for(device: torch.device) -> Copies:
    return StreamCopies(device) if device.type == "cuda" else DirectCopies(device)


class HostPool:
    """Host buffers that are used again: a step's come in few sizes, and pinning memory stops the device."""

    def __init__(self, allocate: Callable[[int], Tensor]) -> None:
        self.allocate = allocate
        self._free: defaultdict[int, list[HostBuffer]] = defaultdict(list)
        self.num_bytes = 0  # in all, used or not

    def take(self, num_bytes: int) -> HostBuffer:
        """A buffer of that size or a little more."""
        sizes = host_pieces(num_bytes)
        free = self._free[sum(sizes)]
        if free:
            return free.pop()
        self.num_bytes += sum(sizes)
        return HostBuffer(tuple(self.allocate(size) for size in sizes))

    def give_back(self, buffer: HostBuffer) -> None:
        """Copies out of it may still be under way: the next one into it waits for them."""
        self._free[buffer.num_bytes].append(buffer)
