"""Collectives over a Group. Each returns a `Work`, already complete unless async_op is set. In a group of one they copy
or do nothing.

Tensors are contiguous, and shards follow each other along dim 0 in order of group rank. The shard may be the rank's
slice of the whole, so that flat buffers are gathered and reduced in place. Autograd sees them only in a `WithAdjoint`.

Raises CommunicationError, which names operation and group, if a peer is lost or does not answer (gloo; with NCCL its
watchdog ends the process); ValueError for shapes that do not match, before anything is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from time import perf_counter_ns
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megapipe.comm.groups import FakeHandle, Group, HostCopies, backend_of, communication_error, needs_host_copies
from megapipe.comm.wire import pack, unpack
from megapipe.errors import CommunicationError

LARGE_BYTES = 1 << 20  # of a whole tensor, from which memory counts more than the number of messages
REDUCTIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}

# torch 2.13 renamed these two and warns about the old names; 2.11 knows only the old ones
_all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(eq=False, slots=True)
class Work:
    """An operation in flight; keeps its tensors alive until `wait`, which may be called any number of times.

    On a GPU `wait` makes the current stream wait and returns at once.
    """

    _handle: Any  # None once complete
    _name: str
    _group: Group
    _start_ns: int
    _tensors: tuple[Tensor, ...] = ()
    _number: int = 0  # of the group's collectives, as counted by the heartbeat
    _error: CommunicationError | None = None
    _traced: bool = False

    def __post_init__(self) -> None:
        if self._handle is None or self._group.tracer is None or (self._tensors and self._tensors[0].is_cuda):
            return
        # where the backend reports completion, that moment is recorded, since wait may be called much later
        with suppress(RuntimeError):  # gloo's reduce-scatter: "not implemented"
            self._handle.get_future().add_done_callback(lambda _: self._trace())

    def wait(self) -> None:
        """Return when the result is available. Raises CommunicationError, the same one on every call."""
        if self._error is not None:
            raise self._error
        if self._handle is None:
            return
        heartbeat = self._group.heartbeat
        if heartbeat is not None:
            heartbeat.wait_for_all(self._group.name, self._name, self._number)
        try:
            self._handle.wait()
        except RuntimeError as error:
            self._error = _error(self._name, self._group, self._tensors, self._start_ns, error)
            raise self._error from error
        finally:
            self._handle, self._tensors = None, ()
        if heartbeat is not None:
            heartbeat.end_wait()
        self._trace()

    def record_stream(self, stream: Any) -> None:
        """Let the allocator reuse the tensors' memory only after what `stream` has been given when they are freed.

        Needed where `stream` waits for the operation and the tensors are of another one: `wait` frees them.
        """
        for tensor in self._tensors:
            tensor.record_stream(stream)

    def _trace(self) -> None:
        if self._group.tracer is not None and not self._traced:
            self._traced = True
            self._group.tracer.event(f"{self._group.name} {self._name}", "collective", self._start_ns)


def all_reduce(tensor: Tensor, group: Group, op: str = "sum", async_op: bool = False) -> Work:
    """Replace tensor, of any shape, by the sum, maximum or minimum over the group (op: 'sum', 'max', 'min')."""
    _check_contiguous("all_reduce", group, tensor)
    launch = partial(dist.all_reduce, op=REDUCTIONS[op], group=group.handle, async_op=True)
    return _run("all_reduce", group, (tensor,), async_op, launch)


def all_gather(output: Tensor, tensor: Tensor, group: Group, async_op: bool = False) -> Work:
    """Concatenate the ranks' tensors [n, ...] along dim 0 into output [size x n, ...]."""
    _check_shards("all_gather", group, whole=output, shard=tensor)

    def launch(whole: Tensor, shard: Tensor) -> Any:
        if backend_of(group) != "gloo" or whole.nbytes < LARGE_BYTES:
            return _all_gather_single(whole, shard, group=group.handle, async_op=True)
        # gloo's all-gather receives in another tensor as long as the whole
        parts = whole.chunk(group.size)
        if not _is_in_place(whole, shard, group):
            parts[group.rank].copy_(shard)
        send = partial(dist.broadcast, group=group.handle, async_op=True)
        return _Handles([send(part, group_src=source) for source, part in enumerate(parts)])

    return _run("all_gather", group, (output, tensor), async_op, launch)


def reduce_scatter(output: Tensor, tensor: Tensor, group: Group, async_op: bool = False) -> Work:
    """Sum the ranks' tensors [size x n, ...] and write this rank's slice into output [n, ...].

    The input is undefined afterwards.
    """
    _check_shards("reduce_scatter", group, whole=tensor, shard=output)

    def launch(shard: Tensor, whole: Tensor) -> Any:
        if backend_of(group) == "gloo" and _is_in_place(whole, shard, group):
            # gloo's reduce-scatter sums a copy of the whole on every rank
            return dist.all_reduce(whole, group=group.handle, async_op=True)
        return _reduce_scatter_single(shard, whole, group=group.handle, async_op=True)

    return _run("reduce_scatter", group, (output, tensor), async_op, launch)


class WithAdjoint(Function):
    """A linear function of a tensor, such as a collective. Its backward is the adjoint: apply(x, function, adjoint)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, function: Callable[[Tensor], Tensor], adjoint: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.adjoint = adjoint
        return function(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.adjoint(grad), None, None


class _Handles:
    """Several operations of gloo that are waited for together."""

    def __init__(self, handles: Sequence[Any]) -> None:
        self._handles = handles

    def wait(self) -> None:
        for handle in self._handles:
            handle.wait()

    def get_future(self) -> Any:
        return self._handles[-1].get_future()


def _is_in_place(whole: Tensor, shard: Tensor, group: Group) -> bool:
    """Return True if a shard is this rank's part of the whole."""
    return shard.data_ptr() == whole.data_ptr() + group.rank * shard.nbytes


def all_to_all(
    output: Tensor,
    tensor: Tensor,
    output_rows: Sequence[int],
    input_rows: Sequence[int],
    group: Group,
    async_op: bool = False,
) -> Work:
    """Send rows of tensor [sum of input_rows, ...] to each rank of the group, in order, and write those received from
    each rank into output [sum of output_rows, ...], in order.
    """
    _check_contiguous("all_to_all", group, output, tensor)
    for name, whole, rows in (("output", output, output_rows), ("input", tensor, input_rows)):
        if len(rows) != group.size or sum(rows) != whole.shape[0]:
            raise ValueError(
                f"all_to_all in group {group}: {whole.shape[0]} rows of {name} are divided as {list(rows)}"
            )

    return _run("all_to_all", group, (output, tensor), async_op, _exchange(output_rows, input_rows, group))


def shift(output: Tensor, tensor: Tensor, step: int, group: Group, async_op: bool = False) -> Work:
    """Send tensor [n, ...] to the rank of the group `step` places on, and write that of the rank as far before into
    output [n, ...].
    """
    _check_contiguous("shift", group, output, tensor)
    sends, receives = [0] * group.size, [0] * group.size
    sends[(group.rank + step) % group.size] = receives[(group.rank - step) % group.size] = tensor.shape[0]
    return _run("shift", group, (output, tensor), async_op, _exchange(receives, sends, group))


def _exchange(output_rows: Sequence[int], input_rows: Sequence[int], group: Group) -> Callable[[Tensor, Tensor], Any]:
    """Return what launches an all-to-all of so many rows from and to each rank."""
    splits = list(output_rows), list(input_rows)
    return lambda output, tensor: dist.all_to_all_single(output, tensor, *splits, group=group.handle, async_op=True)


def broadcast(tensor: Tensor, group: Group, source: int = 0, async_op: bool = False) -> Work:
    """Replace tensor by that of the group's rank `source`."""
    _check_contiguous("broadcast", group, tensor)
    launch = partial(dist.broadcast, group=group.handle, group_src=source, async_op=True)
    return _run("broadcast", group, (tensor,), async_op, launch)


def barrier(group: Group) -> None:
    """Return when every rank of the group has called it."""
    if group.handle is None:
        return
    devices = [torch.cuda.current_device()] if backend_of(group) == "nccl" else None
    _run("barrier", group, (), False, partial(dist.barrier, group=group.handle, device_ids=devices, async_op=True))


# Small objects, of the types that `wire.pack` accepts. These calls block.


def broadcast_object(obj: Any, group: Group, source: int = 0) -> Any:
    """Return the object of the group's rank `source` on every rank."""
    if group.handle is None:
        return obj
    data = pack(obj) if group.rank == source else b""
    with _blocking("broadcast_object", group):
        length = _lengths(group, data)[source]
        tensor = _padded(data, length, group)
        dist.broadcast(tensor, group=group.handle, group_src=source)
        received = tensor[:length].cpu().numpy().tobytes()
    return obj if group.rank == source else unpack(received)


def gather_objects(obj: Any, group: Group, destination: int | None = None) -> list[Any]:
    """Return the objects of all ranks, by group rank: on every rank, or only on `destination`, and [] on the others."""
    if group.handle is None or isinstance(group.handle, FakeHandle):
        return [obj] * group.size
    data = pack(obj)
    with _blocking("gather_objects", group):
        lengths = _lengths(group, data)
        tensor = _padded(data, max(lengths), group)
        if destination is None:
            whole = tensor.new_empty(group.size * len(tensor))
            _all_gather_single(whole, tensor, group=group.handle)
            parts = list(whole.split(len(tensor)))
        else:
            parts = [torch.empty_like(tensor) for _ in group.ranks] if group.rank == destination else []
            dist.gather(tensor, parts or None, group=group.handle, group_dst=destination)
        received = [part[:n].cpu().numpy().tobytes() for part, n in zip(parts, lengths, strict=False)]
    return [obj if rank == group.rank else unpack(data) for rank, data in enumerate(received)]


def _lengths(group: Group, data: bytes) -> list[int]:
    """Return the number of bytes that each rank has."""
    mine = torch.tensor([len(data)], dtype=torch.int64, device=_device_of(group))
    lengths = mine.new_empty(group.size)
    _all_gather_single(lengths, mine, group=group.handle)
    return [int(length) for length in lengths.tolist()]


def _padded(data: bytes, length: int, group: Group) -> Tensor:
    """Return the bytes as uint8 [max(length, 1)], on the device of the group's backend."""
    return torch.frombuffer(bytearray(data.ljust(max(length, 1), b"\0")), dtype=torch.uint8).to(_device_of(group))


def _device_of(group: Group) -> torch.device:
    is_nccl = backend_of(group) == "nccl"
    return torch.device("cuda", torch.cuda.current_device()) if is_nccl else torch.device("cpu")


def _run(name: str, group: Group, tensors: tuple[Tensor, ...], async_op: bool, launch: Callable[..., Any]) -> Work:
    """Launch an operation on tensors, of which it writes the first. In a group of one, copy the second to the first."""
    start_ns = perf_counter_ns()
    if group.handle is None:
        if len(tensors) == 2 and tensors[0].data_ptr() != tensors[1].data_ptr():
            tensors[0].copy_(tensors[1])
        return Work(None, name, group, start_ns)
    number = 0 if group.heartbeat is None else group.heartbeat.count_launch(group.name)
    try:
        handle: Any
        if isinstance(group.handle, FakeHandle):
            handle = group.handle.start(name, tensors)
        elif tensors and needs_host_copies(group.handle, tensors[0]):
            handle = HostCopies(tensors, 1, launch)
        else:
            handle = launch(*tensors)
    except RuntimeError as error:
        raise _error(name, group, tensors, start_ns, error) from error
    work = Work(handle, name, group, start_ns, tensors, number)
    if not async_op:
        work.wait()
    return work


@contextmanager
def _blocking(name: str, group: Group) -> Iterator[None]:
    """Report an operation that blocks to the heartbeat and the tracer, and raise its errors as CommunicationError."""
    start_ns = perf_counter_ns()
    heartbeat = group.heartbeat
    if heartbeat is not None:
        heartbeat.wait_for_all(group.name, name, heartbeat.count_launch(group.name))
    try:
        yield
    except RuntimeError as error:
        raise _error(name, group, (), start_ns, error) from error
    if heartbeat is not None:
        heartbeat.end_wait()
    if group.tracer is not None:
        group.tracer.event(f"{group.name} {name}", "collective", start_ns)


def _error(
    name: str, group: Group, tensors: tuple[Tensor, ...], start_ns: int, error: RuntimeError
) -> CommunicationError:
    if tensors:
        name += f" of {str(tensors[-1].dtype).removeprefix('torch.')}{list(tensors[-1].shape)}"
    return communication_error(group, name, error, start_ns)


def _check_contiguous(name: str, group: Group, *tensors: Tensor) -> None:
    for tensor in tensors:
        if not tensor.is_contiguous():
            found = f"shape {tuple(tensor.shape)} with strides {tensor.stride()}"
            raise ValueError(f"{name} in group {group.name} needs contiguous tensors; got {found}")


def _check_shards(name: str, group: Group, whole: Tensor, shard: Tensor) -> None:
    _check_contiguous(name, group, whole, shard)
    expected = (shard.shape[0] * group.size, *shard.shape[1:]) if shard.ndim else ()
    if not shard.ndim or tuple(whole.shape) != expected or whole.dtype != shard.dtype:
        found = f"{whole.dtype} {tuple(whole.shape)}, the shard {shard.dtype} {tuple(shard.shape)}"
        rule = f"the whole must be {group.size} shards along dim 0"
        raise ValueError(f"{name} in group {group}: the whole tensor is {found}; {rule}")
