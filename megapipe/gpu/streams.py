"""CUDA streams besides the current one. Not yet run on a GPU.

`StageStreams`: one per stage of a rank, so that the halves of an overlapped pair (DualPipe) run at once.
`StreamCopies`: copies between device and host memory, for offloading; `DirectCopies`: the same on a CPU.
`HostCopy`: a few numbers on their way from the device to the host.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megapipe.comm.collectives import Work
from megapipe.schedule.lifetimes import host_pieces


class StageStreams:
    """Runs each stage on its own stream, and messages, reductions and the optimizer on the current stream.

    autograd runs a backward on the stream of its forward, so a pair, a forward of one stage and a backward of the
    other, uses two streams. Outside a pair, every computation waits for the current stream, which then waits for it.
    In a pair both halves wait for what preceded the pair, not for each other, and the current stream waits for both.
    With tp > 1 each half has its own communicator: in one, NCCL would run the collectives of both in order.
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


Copy = Callable[[], None]


@dataclass
class HostBuffer:
    """Host memory in uint8 pieces. read: the event after the last copy out of it."""

    pieces: tuple[Tensor, ...]
    read: Any = None

    @property
    def num_bytes(self) -> int:
        return sum(piece.numel() for piece in self.pieces)


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
        """Return the compute stream; streams and events are opaque to the caller."""
        return self._cuda.current_stream(self._device)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Allocate inside the block on this stream, whichever is current."""
        return self._cuda.stream(stream)  # type: ignore[no-any-return]

    def to_host(self, stream: Any, buffer: HostBuffer, copy: Copy) -> Any:
        """Copy results of `stream` so far; return the event after the copy."""
        self._out.wait_stream(stream)
        if buffer.read is not None:
            self._out.wait_event(buffer.read)
            buffer.read = None
        return self._run(self._out, copy)

    def to_device(self, stream: Any, buffer: HostBuffer, copy: Copy) -> Any:
        """Copy into memory of `stream`, which has waited for the copy to the host; return the event after the copy."""
        self._in.wait_stream(stream)
        buffer.read = self._run(self._in, copy)
        return buffer.read

    def wait(self, stream: Any, event: Any) -> None:
        """Make later work of `stream` wait for the event. The host does not wait."""
        stream.wait_event(event)

    def finish(self) -> None:
        """Wait for all copies, so that the memory they read or write can be freed."""
        self._out.synchronize()
        self._in.synchronize()

    def host_memory(self, num_bytes: int) -> Tensor:
        """Allocate uninitialised uint8 host memory."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def _run(self, stream: Any, copy: Copy) -> Any:
        with self._cuda.stream(stream):
            copy()
        return stream.record_event()


class DirectCopies:
    """The same on a CPU, synchronous; on the meta device nothing is copied."""

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


Copies = StreamCopies | DirectCopies


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
