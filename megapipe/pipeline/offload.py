"""Activation offloading to host memory between forward and backward, by the actions OFFLOAD and RELOAD of a row.

A stage whose activations are offloaded runs its layers through the rank's `Offload`. Autograd's saved-tensor hooks
deliver what they keep: each storage once, however many operations and views share it. Parameters, tensors shared by all
layers and small tensors stay on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from megapipe.gpu.streams import Copies, HostBuffer, HostPool
from megapipe.pipeline.engine import Around, Before, Context
from megapipe.schedule.action import Action, Op

Key = tuple[int, int | None]  # (stage, microbatch)


class Offload:
    """The offloaded activations of one rank. min_elements: smaller tensors stay on the device."""

    def __init__(self, copies: Copies, min_elements: int) -> None:
        self.copies, self.min_elements = copies, min_elements
        self.pool = HostPool(copies.host_memory)
        self._computed: Key | None = None  # whose forward runs now, if its activations will be offloaded
        self._carried: dict[Key, _Carried] = {}  # from their forward until their copy back starts
        # from then until their backward: their stream, and the event after the copy
        self._coming: dict[Key, tuple[Any, Any]] = {}

    def clear(self) -> None:
        """Discard everything, for example after an error; the backwards of what is there must not run."""
        self._computed = None
        if self._carried or self._coming:
            self.copies.finish()
        self._carried.clear()
        self._coming.clear()

    def around(self, row: Iterable[Action]) -> Around:
        """Return what is opened around the forwards and backwards of a row whose activations it offloads."""
        moved = {(stage, microbatch) for stage, op, microbatch in row if op is Op.OFFLOAD}

        def context(action: Action) -> Context | None:
            stage, op, microbatch = action
            if op not in (Op.F, Op.RECOMPUTE, Op.B, Op.I) or (stage, microbatch) not in moved:
                return None
            if op is Op.F:
                return partial(self._computing, (stage, microbatch))
            return partial(Before, partial(self._arrive, (stage, microbatch)))

        return Around(context, self.clear, self.clear)

    @contextmanager
    def _computing(self, key: Key) -> Iterator[None]:
        """Run a forward whose activations will be offloaded in the block."""
        self._computed = key
        yield
        self._computed = None  # other forwards (those of an evaluation, for example) keep nothing

    def run(self, fn: Callable[[Tensor], Tensor], hidden: Tensor, stays: Iterable[Tensor]) -> Tensor:
        """Return fn(hidden), the forward of a stage's layers. stays: tensors kept on the device anyway."""
        if self._computed is None:
            return fn(hidden)
        carried = self._carried[self._computed] = _Carried(self.copies, self.min_elements, stays)
        with saved_tensors_hooks(carried.pack, lambda packed: packed.tensor() if isinstance(packed, _View) else packed):
            output = fn(hidden)
        carried.leave(self.pool)
        return output

    def release(self, action: Action) -> None:
        """Free the device memory of what an OFFLOAD names."""
        self._carried[action.stage, action.microbatch].release()

    def load(self, action: Action) -> None:
        """Start the copy back of what a RELOAD names."""
        key = action.stage, action.microbatch
        self._coming[key] = self._carried.pop(key).come_back(self.pool)

    def _arrive(self, key: Key) -> None:
        """Wait for a copy back, before any of its memory can be freed; a backward after a RECOMPUTE need not."""
        if key in self._coming:
            self.copies.wait(*self._coming.pop(key))


class _Carried:
    """The storages that a stage keeps for one microbatch, from the forward until their copy back starts."""

    def __init__(self, copies: Copies, min_elements: int, stays: Iterable[Tensor]) -> None:
        self._copies, self._min_elements = copies, min_elements
        self._stream = copies.current_stream()
        self._stay = {_address(tensor) for tensor in stays}
        self._parts: dict[int, _Part] = {}  # by address, which is unique while the storages live
        self._buffer: HostBuffer | None = None
        self._written: Any = None

    def pack(self, tensor: Tensor) -> Any:
        if tensor.is_leaf and tensor.requires_grad:  # trained parameters
            return tensor
        storage, address = tensor.untyped_storage(), _address(tensor)
        if address in self._stay or storage.nbytes() // tensor.element_size() < self._min_elements:
            return tensor.detach()  # an output saved by its own operation would keep its graph alive
        part = self._parts.get(address)
        if part is None:
            part = self._parts[address] = _Part(tensor)
        return _View(part, tensor.dtype, (tensor.size(), tensor.stride(), tensor.storage_offset()))

    def leave(self, pool: HostPool) -> None:
        """Copy the storages to the host once the forward, which has been launched, is done."""
        self._stay = set()
        buffer = self._buffer = pool.take(sum(part.num_bytes for part in self._parts.values()))

        def copy() -> None:
            for device, host in self._pieces(buffer):
                host.copy_(device, non_blocking=True)

        self._written = self._copies.to_host(self._stream, buffer, copy)

    def release(self) -> None:
        """Free the device memory; its stream waits for the copy before the memory is reused."""
        self._copies.wait(self._stream, self._written)
        for part in self._parts.values():
            part.bytes = None

    def come_back(self, pool: HostPool) -> tuple[Any, Any]:
        """Start the copy back into storages that autograd keeps; return its stream and the event after it."""
        assert self._buffer is not None
        buffer = self._buffer
        with self._copies.on(self._stream):
            for part in self._parts.values():
                part.bytes = torch.empty(part.num_bytes, dtype=torch.uint8, device=part.device)

        def copy() -> None:
            for device, host in self._pieces(buffer):
                device.copy_(host, non_blocking=True)

        arrived = self._copies.to_device(self._stream, buffer, copy)
        pool.release(buffer)
        return self._stream, arrived

    def _pieces(self, buffer: HostBuffer) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield pieces of the device's bytes, each with its place in the host buffer."""
        pieces = iter(buffer.pieces)
        space = next(pieces, torch.empty(0))
        for part in self._parts.values():
            left = part.used()
            while left.numel():
                if not space.numel():
                    space = next(pieces)
                count = min(left.numel(), space.numel())
                yield left[:count], space[:count]
                left, space = left[count:], space[count:]


class _Part:
    """One offloaded storage. bytes: its contents as uint8 while it is on the device."""

    def __init__(self, tensor: Tensor) -> None:
        self.num_bytes = tensor.untyped_storage().nbytes()
        self.device = tensor.device
        self.bytes: Tensor | None = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        self.bytes.set_(tensor.untyped_storage(), 0, (self.num_bytes,), (1,))

    def used(self) -> Tensor:
        """Return the bytes. Raises RuntimeError while they are only in host memory."""
        if self.bytes is None:
            raise RuntimeError(
                "a backward runs before the RELOAD of its stage and microbatch: its activations are in host memory"
            )
        return self.bytes


class _View(NamedTuple):
    """A saved tensor: a view of a part, whose device memory it keeps as long as autograd keeps the view."""

    part: _Part
    dtype: torch.dtype
    layout: tuple[Any, ...]  # size, stride, offset

    def tensor(self) -> Tensor:
        return self.part.used().view(self.dtype).as_strided(*self.layout)


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata  # type: ignore[no-any-return]  # not data_ptr, which is 0 on the meta device
