"""Copies between device and host memory, for offloading: on separate streams on a GPU, synchronous on a CPU.

Not yet run on a GPU.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from megapipe.schedule.lifetimes import host_pieces

Copy = Callable[[], None]


@dataclass
class HostBuffer:
    """Host memory in uint8 pieces. read: the event after the last copy out of it."""

    pieces: tuple[Tensor, ...]
    read: Any = None

    @property
    def num_bytes(self) -> int:
        return sum(piece.numel() for piece in self.pieces)


class Copies(Protocol):
    """Runs copies. Streams and events are opaque to the caller."""

    def current_stream(self) -> Any:
        """Return the current compute stream."""

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Allocate inside the block on this stream, whichever is current."""

    def to_host(self, stream: Any, buffer: HostBuffer, copy: Copy) -> Any:
        """Copy results of `stream` so far; return the event after the copy."""

    def to_device(self, stream: Any, buffer: HostBuffer, copy: Copy) -> Any:
        """Copy into memory of `stream`, which has waited for the copy to the host; return the event after the copy."""

    def wait(self, stream: Any, event: Any) -> None:
        """Make later work of `stream` wait for the event. The host does not wait."""

    def finish(self) -> None:
        """Wait for all copies, so that the memory they read or write can be freed."""

    def host_memory(self, num_bytes: int) -> Tensor:
        """Allocate uninitialised uint8 host memory."""


class StreamCopies:
    """Copies on a GPU: one stream per direction, so that both directions of the link are used.

    Memory is never marked with record_stream. A tensor copied out is held until the stream that produced it waits for
    the copy. A tensor copied in is allocated on the stream that will use it, and the copy waits for that stream,
    since the allocator may reuse memory that the stream's last kernels still read.
    """

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self._device, self._cuda = device, cuda
        self._out, self._in = cuda.Stream(device), cuda.Stream(device)

    def current_stream(self) -> Any:
        return self._cuda.current_stream(self._device)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return self._cuda.stream(stream)  # type: ignore[no-any-return]

    def to_host(self, stream: Any, buffer: HostBuffer, copy: Copy) -> Any:
        self._out.wait_stream(stream)
        if buffer.read is not None:
            self._out.wait_event(buffer.read)
            buffer.read = None
        return self._run(self._out, copy)

    def to_device(self, stream: Any, buffer: HostBuffer, copy: Copy) -> Any:
        self._in.wait_stream(stream)
        buffer.read = self._run(self._in, copy)
        return buffer.read

    def wait(self, stream: Any, event: Any) -> None:
        stream.wait_event(event)

    def finish(self) -> None:
        self._out.synchronize()
        self._in.synchronize()

    def host_memory(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def _run(self, stream: Any, copy: Copy) -> Any:
        with self._cuda.stream(stream):
            copy()
        return stream.record_event()


class DirectCopies:
    """Synchronous copies on a CPU; on the meta device nothing is copied."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def current_stream(self) -> Any:
        return None

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return nullcontext()

    def to_host(self, stream: Any, buffer: HostBuffer, copy: Copy) -> Any:
        copy()

    def to_device(self, stream: Any, buffer: HostBuffer, copy: Copy) -> Any:
        copy()

    def wait(self, stream: Any, event: Any) -> None:
        """Do nothing: copies are complete when they return."""

    def finish(self) -> None:
        """Do nothing, as in `wait`."""

    def host_memory(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)


def copies_for(device: torch.device) -> Copies:
    """Return the copies of a device."""
    return StreamCopies(device) if device.type == "cuda" else DirectCopies(device)


class HostPool:
    """Reusable host buffers: a step needs few sizes, and pinning memory blocks the device."""

    def __init__(self, allocate: Callable[[int], Tensor]) -> None:
        self.allocate = allocate
        self._free: defaultdict[int, list[HostBuffer]] = defaultdict(list)
        self.num_bytes = 0  # total, in use or free

    def take(self, num_bytes: int) -> HostBuffer:
        """Return a buffer of at least this size, rounded up a little."""
        sizes = host_pieces(num_bytes)
        free = self._free[sum(sizes)]
        if free:
            return free.pop()
        self.num_bytes += sum(sizes)
        return HostBuffer(tuple(self.allocate(size) for size in sizes))

    def release(self, buffer: HostBuffer) -> None:
        """Return a buffer to the pool. Copies out of it may be unfinished: the next copy into it waits for them."""
        self._free[buffer.num_bytes].append(buffer)
