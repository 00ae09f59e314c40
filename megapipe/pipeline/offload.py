"""Activations in the host's memory between forward and backward, moved as `schedule.moves` has planned.

`Offload` is one rank's; `RowOffload` is what the engine tells about its actions, `StageOffload` what a stage runs its groups of layers
through. Saved-tensor hooks of autograd hand over what a group keeps: storages, each once, however many operations and views share it.
Parameters, the stage's own input (held for its gradient anyway), what all layers share, and tensors under a size stay where they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from megapipe.gpu.copies import Copies, HostBuffer, HostPool
from megapipe.schedule.action import Action, Op
from megapipe.schedule.moves import Moment, Moves, StageGroups, Unit, moments_of


class Offload:
    """One rank's units on their way. min_elements: smaller tensors stay."""

    def __init__(self, copies: Copies, min_elements: int) -> None:
        self.copies, self.min_elements = copies, min_elements
        self.pool = HostPool(copies.host_memory)
        self._moves = Moves((), frozenset(), {}, {})
        self._next = 0  # moments reached so far
        self._action: Action | None = None  # that computes now
        self._units: dict[Unit, _Carried] = {}  # from their forward until their way back begins
        self._coming: dict[
            Unit, tuple[Any, Any]
        ] = {}  # from then until their backward: their stream, and the event behind the copy

    def begin(self, moves: Moves) -> None:
        """A row begins."""
        self.clear()
        self._moves = moves

    def clear(self) -> None:
        """Forget what is under way (after an error, say). The backwards that it was for are not run."""
        self._next, self._action = 0, None
        if self._units or self._coming:
            self.copies.finish()
        self._units.clear()
        self._coming.clear()

    def act(self, action: Action, first: Moment | None) -> None:
        """A computation begins. first: its first moment, None if it has none."""
        self._action = action
        if first is not None:
            self._reach(first)

    def rest(self) -> None:
        """It is over: what runs until the next one (an evaluation, say) is not of the row."""
        self._action = None

    def run(
        self, stage: int, group: int, fn: Callable[[Tensor], Tensor], hidden: Tensor, stays: Iterable[Tensor]
    ) -> Tensor:
        """fn(hidden), the forward of one group. stays: tensors that are there anyway, such as parameters and masks."""
        if self._action is None or not torch.is_grad_enabled():
            return fn(hidden)
        microbatch = self._action.microbatch
        assert microbatch is not None
        self._reach(Moment(stage, Op.F, microbatch, group))
        unit = Unit(stage, microbatch, group)
        if unit in self._moves.moved:
            carried = self._units[unit] = _Carried(self.copies, self.min_elements, stays)
            with saved_tensors_hooks(carried.pack, _unpack):
                output = fn(hidden)
            carried.leave(self.pool)
        else:
            output = fn(hidden)
        if output.grad_fn is not None:
            output.grad_fn.register_prehook(partial(self._backward, stage, microbatch, group))
        return output

    def _backward(self, stage: int, microbatch: int, group: int, gradients: Any) -> None:
        """Called by autograd as the backward of a group begins."""
        if self._action is None:
            raise RuntimeError(
                f"the backward of stage {stage}, microbatch {microbatch} runs outside the row that its forward was in"
            )
        self._reach(Moment(stage, self._action.op, microbatch, group))

    def _reach(self, moment: Moment) -> None:
        """Do what is planned for this moment; its action and its first group both report it."""
        moments, index = self._moves.moments, self._next
        if index and moments[index - 1] == moment:
            return
        if index == len(moments) or moments[index] != moment:
            expected = moments[index] if index < len(moments) else "nothing more"
            raise RuntimeError(f"activations are moved by a plan in which {expected} comes next, but {moment} came")
        self._next += 1
        for unit in self._moves.released.get(index, ()):
            self._units[unit].release()
        for unit in self._moves.loaded.get(index, ()):
            self._coming[unit] = self._units.pop(unit).come_back(self.pool)
        if moment.op is not Op.F:
            # before any of its memory can be freed, for the copy into it has to be done by then
            arrived = self._coming.pop(Unit(moment.stage, moment.microbatch, moment.group), None)
            if arrived is not None:
                self.copies.wait(*arrived)


class RowOffload:
    """What the engine reports of one row."""

    def __init__(self, offload: Offload, moves: Moves, firsts: dict[Action, Moment]) -> None:
        self._offload, self._moves, self._firsts = offload, moves, firsts

    @classmethod
    def of(cls, offload: Offload, moves: Moves, row: Iterable[Action], stages: Mapping[int, StageGroups]) -> RowOffload:
        """stages: as `plan_moves` took them."""
        return cls(
            offload, moves, {action: moment for action in row for moment in list(moments_of(action, stages))[:1]}
        )

    def begin(self) -> None:
        self._offload.begin(self._moves)

    def act(self, action: Action) -> None:
        """A computation of the row begins."""
        self._offload.act(action, self._firsts.get(action))

    def rest(self) -> None:
        """It is over."""
        self._offload.rest()

    def clear(self) -> None:
        self._offload.clear()


class StageOffload:
    """What one stage runs its groups of layers through."""

    def __init__(self, offload: Offload, stage: int) -> None:
        self._offload, self._stage = offload, stage

    def run(self, group: int, fn: Callable[[Tensor], Tensor], hidden: Tensor, stays: Iterable[Tensor]) -> Tensor:
        """fn(hidden), whose activations are moved if that is planned."""
        return self._offload.run(self._stage, group, fn, hidden, stays)


class _Carried:
    """One unit: the storages that it keeps, from its forward until its way back begins."""

    def __init__(self, copies: Copies, min_elements: int, stays: Iterable[Tensor]) -> None:
        self._copies, self._min_elements = copies, min_elements
        self._stream = copies.current_stream()
        self._stay = {_address(tensor) for tensor in stays}
        self._parts: dict[int, _Part] = {}  # by address: the storages live, so that no address comes twice
        self._buffer: HostBuffer | None = None
        self._written: Any = None

    def pack(self, tensor: Tensor) -> Any:
        if tensor.is_leaf and tensor.requires_grad:  # parameters, and the stage's input
            return tensor
        storage, address = tensor.untyped_storage(), _address(tensor)
        if address in self._stay or storage.nbytes() // tensor.element_size() < self._min_elements:
            return tensor.detach()  # an output of the operation that keeps it would hold its own graph
        part = self._parts.get(address)
        if part is None:
            part = self._parts[address] = _Part(tensor)
        return _View(part, tensor)

    def leave(self, pool: HostPool) -> None:
        """The forward is launched: copy to the host what it made, as it is when it is done."""
        self._stay = set()
        buffer = self._buffer = pool.take(sum(part.num_bytes for part in self._parts.values()))

        def copy() -> None:
            for device, host in self._beside(buffer):
                host.copy_(device, non_blocking=True)

        self._written = self._copies.to_host(self._stream, buffer, copy)

    def release(self) -> None:
        """The device memory is free once the copy is done: the stream it belongs to waits for that before it is used again."""
        self._copies.wait(self._stream, self._written)
        for part in self._parts.values():
            part.bytes = None

    def come_back(self, pool: HostPool) -> tuple[Any, Any]:
        """Start the way back; what autograd has saved holds the storages from now on. Returns (its stream, the event behind the copy)."""
        assert self._buffer is not None
        with self._copies.on(self._stream):
            for part in self._parts.values():
                part.make_room()
        buffer = self._buffer

        def copy() -> None:
            for device, host in self._beside(buffer):
                device.copy_(host, non_blocking=True)

        arrived = self._copies.to_device(self._stream, buffer, copy)
        pool.release(buffer)
        return self._stream, arrived

    def _beside(self, buffer: HostBuffer) -> Iterator[tuple[Tensor, Tensor]]:
        """Stretches of the device's bytes, each with its place in the host's."""
        pieces = iter(buffer.pieces)
        room = next(pieces, torch.empty(0))
        for part in self._parts.values():
            left = part.used()
            while left.numel():
                if not room.numel():
                    room = next(pieces)
                count = min(left.numel(), room.numel())
                yield left[:count], room[:count]
                left, room = left[count:], room[count:]


class _Part:
    """One storage on its way. bytes: all of it, as uint8, while it is on the device."""

    def __init__(self, tensor: Tensor) -> None:
        self.num_bytes = tensor.untyped_storage().nbytes()
        self._device = tensor.device
        self.bytes: Tensor | None = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        self.bytes.set_(tensor.untyped_storage(), 0, (self.num_bytes,), (1,))

    def make_room(self) -> None:
        self.bytes = torch.empty(self.num_bytes, dtype=torch.uint8, device=self._device)

    def used(self) -> Tensor:
        """The bytes. Raises RuntimeError while they are in the host's memory alone."""
        if self.bytes is None:
            raise RuntimeError(
                "activations are asked for that are in the host's memory: a backward came before its moment in the plan"
            )
        return self.bytes


class _View:
    """A saved tensor: a view of a part. Holds the part's device memory as long as autograd holds it."""

    __slots__ = ("_dtype", "_layout", "_part")

    def __init__(self, part: _Part, tensor: Tensor) -> None:
        self._part, self._dtype = part, tensor.dtype
        self._layout = tensor.size(), tensor.stride(), tensor.storage_offset()

    def tensor(self) -> Tensor:
        return self._part.used().view(self._dtype).as_strided(*self._layout)


def _unpack(packed: Any) -> Tensor:
    return packed.tensor() if isinstance(packed, _View) else packed


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata  # type: ignore[no-any-return]  # on the meta device all data lie at 0
