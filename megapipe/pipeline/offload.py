"""Activation offloading to host memory between forward and backward, as planned by `schedule.lifetimes`.

The engine reports the actions of a row to the rank's `Offload`, and stages run their groups of layers through it.
Autograd's saved-tensor hooks deliver what a group keeps: each storage once, however many operations and views share it.
Parameters, the stage's own input (kept for its gradient anyway), tensors shared by all layers and small tensors stay on
the device.
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
from megapipe.schedule.action import Action, Op
from megapipe.schedule.lifetimes import NO_MOVES, Moment, Moves, Unit


class Offload:
    """The offloaded units of one rank. min_elements: smaller tensors stay on the device."""

    def __init__(self, copies: Copies, min_elements: int) -> None:
        self.copies, self.min_elements = copies, min_elements
        self.pool = HostPool(copies.host_memory)
        self._moves = NO_MOVES
        self._next = 0  # moments reached so far
        self._action: Action | None = None  # the one that computes now
        self._units: dict[Unit, _Carried] = {}  # from their forward until their copy back starts
        # from then until their backward: their stream, and the event after the copy
        self._coming: dict[Unit, tuple[Any, Any]] = {}

    def begin(self, moves: Moves) -> None:
        """Begin a row."""
        self.clear()
        self._moves = moves

    def clear(self) -> None:
        """Discard all units, for example after an error; their backwards must not run."""
        self._next, self._action = 0, None
        if self._units or self._coming:
            self.copies.finish()
        self._units.clear()
        self._coming.clear()

    @contextmanager
    def computing(self, action: Action) -> Iterator[None]:
        """Run a computation of the row in the block."""
        self._action = action
        if action in self._moves.firsts:
            self._reach(self._moves.firsts[action])
        yield
        self._action = None  # forwards before the next one (an evaluation, for example) are not part of the row

    def run(
        self, stage: int, group: int, fn: Callable[[Tensor], Tensor], hidden: Tensor, stays: Iterable[Tensor]
    ) -> Tensor:
        """Return fn(hidden), the forward of one group. stays: tensors kept on the device anyway: parameters, masks."""
        if self._action is None or not torch.is_grad_enabled():
            return fn(hidden)
        microbatch = self._action.microbatch
        assert microbatch is not None
        self._reach(Moment(stage, Op.F, microbatch, group))
        unit = Unit(stage, microbatch, group)
        if unit in self._moves.moved:
            carried = self._units[unit] = _Carried(self.copies, self.min_elements, stays)
            with saved_tensors_hooks(
                carried.pack, lambda packed: packed.tensor() if isinstance(packed, _View) else packed
            ):
                output = fn(hidden)
            carried.leave(self.pool)
        else:
            output = fn(hidden)
        if output.grad_fn is not None:
            output.grad_fn.register_prehook(partial(self._backward, stage, microbatch, group))
        return output

    def _backward(self, stage: int, microbatch: int, group: int, gradients: Any) -> None:
        """Begin the backward of a group; called by autograd."""
        if self._action is None:
            raise RuntimeError(
                f"the backward of stage {stage}, microbatch {microbatch} runs outside the row that its forward was in"
            )
        self._reach(Moment(stage, self._action.op, microbatch, group))

    def _reach(self, moment: Moment) -> None:
        """Run the copies planned for this moment, which both its action and its first group report."""
        moments, index = self._moves.moments, self._next
        if index and moments[index - 1] == moment:
            return
        if index == len(moments) or moments[index] != moment:
            expected = moments[index] if index < len(moments) else "nothing more"
            raise RuntimeError(f"the offload plan expects {expected} next, but {moment} was reached")
        self._next += 1
        for unit in self._moves.released.get(index, ()):
            self._units[unit].release()
        for unit in self._moves.loaded.get(index, ()):
            self._coming[unit] = self._units.pop(unit).come_back(self.pool)
        if moment.op is not Op.F:
            # before any of its memory can be freed: the copy into it must be complete
            arrived = self._coming.pop(Unit(moment.stage, moment.microbatch, moment.group), None)
            if arrived is not None:
                self.copies.wait(*arrived)


class _Carried:
    """One unit: the storages that it keeps, from its forward until its copy back starts."""

    def __init__(self, copies: Copies, min_elements: int, stays: Iterable[Tensor]) -> None:
        self._copies, self._min_elements = copies, min_elements
        self._stream = copies.current_stream()
        self._stay = {_address(tensor) for tensor in stays}
        self._parts: dict[int, _Part] = {}  # by address, which is unique while the storages live
        self._buffer: HostBuffer | None = None
        self._written: Any = None

    def pack(self, tensor: Tensor) -> Any:
        if tensor.is_leaf and tensor.requires_grad:  # trained parameters, and the stage's input
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
                "a backward runs before its moment in the offload plan: its activations are still in host memory"
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
