"""Collectives over a Group. Each returns a `Work`; without async_op it is already complete. In a group of one they copy, or do nothing.

Tensors are contiguous and shards lie along dim 0 in order of group rank. An input may be the output's own slice (all_gather) and an
output the input's own slice (reduce_scatter): flat buffers are gathered and reduced in place. Nothing here is seen by autograd.

Raises CommunicationError, naming operation and group, when a peer is lost or silent (gloo; NCCL's watchdog ends the process instead);
ValueError for shapes that do not fit, before anything is sent.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter_ns
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megapipe.comm.failures import communication_error
from megapipe.comm.fake_backend import FakeHandle
from megapipe.comm.groups import Group, backend_of
from megapipe.comm.host_copies import HostCopies, travels_through_host
from megapipe.comm.wire import pack, unpack

REDUCTIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


def _named(new: str, old: str) -> Callable[..., Any]:
    """torch 2.13 renamed these two and warns about the old names; 2.11 knows only the old."""
    function: Callable[..., Any] = getattr(dist, new) if hasattr(dist, new) else getattr(dist, old)
    return function


_all_gather_single = _named("all_gather_single", "all_gather_into_tensor")
_reduce_scatter_single = _named("reduce_scatter_single", "reduce_scatter_tensor")


class Work:
    """An operation under way. `wait` may be called any number of times; it keeps the tensors alive until the first.

    On a GPU `wait` makes the current stream wait and returns at once.
    """

    __slots__ = ("_error", "_group", "_handle", "_kept", "_name", "_number", "_start_ns", "_traced")

    def __init__(
        self, handle: Any, name: str, group: Group, start_ns: int, kept: tuple[Tensor, ...] = (), number: int = 0
    ) -> None:
        self._number = number  # among the group's, where it has a heartbeat
        self._handle = handle
        self._name = name
        self._group = group
        self._start_ns = start_ns
        self._kept = kept
        self._error: Exception | None = None
        self._traced = False
        if handle is not None and group.tracer is not None:
            self._trace_completion(handle, kept)

    def wait(self) -> None:
        """Return when the result is there. Raises CommunicationError, the same one again if called again."""
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
            self._error = _failed(self._name, self._group, self._kept, self._start_ns, error)
            raise self._error from error
        finally:
            self._handle, self._kept = None, ()
        if heartbeat is not None:
            heartbeat.goes_on()
        self._trace()

    def _trace_completion(self, handle: Any, kept: tuple[Tensor, ...]) -> None:
        """Where the backend tells the moment of completion, record that moment: a wait may come long after."""
        if kept and kept[0].is_cuda:
            return
        try:
            future = handle.get_future()
        except RuntimeError:  # "not implemented": gloo's reduce-scatter
            return
        future.add_done_callback(lambda _: self._trace())

    def _trace(self) -> None:
        if self._group.tracer is not None and not self._traced:
            self._traced = True
            self._group.tracer.event(f"{self._group.name} {self._name}", "collective", self._start_ns)


def all_reduce(tensor: Tensor, group: Group, op: str = "sum", async_op: bool = False) -> Work:
    """tensor, any shape: replaced by the sum, maximum or minimum over the group ('sum', 'max', 'min')."""
    _check_contiguous("all_reduce", group, tensor)
    reduction = REDUCTIONS[op]
    return _run(
        "all_reduce",
        group,
        (tensor,),
        async_op,
        lambda tensor: dist.all_reduce(tensor, reduction, group=group.handle, async_op=True),
    )


def all_gather(output: Tensor, tensor: Tensor, group: Group, async_op: bool = False) -> Work:
    """output: [size x n, ...] = the ranks' tensors [n, ...] one after another along dim 0."""
    _check_shards("all_gather", group, whole=output, shard=tensor)
    if group.handle is None:
        return _copied(output, tensor, "all_gather", group)
    return _run(
        "all_gather",
        group,
        (output, tensor),
        async_op,
        lambda output, tensor: _all_gather_single(output, tensor, group=group.handle, async_op=True),
    )


def reduce_scatter(output: Tensor, tensor: Tensor, group: Group, async_op: bool = False) -> Work:
    """output: [n, ...] = this rank's slice of the sum of the ranks' tensors [size x n, ...]. The input's contents are undefined after."""
    _check_shards("reduce_scatter", group, whole=tensor, shard=output)
    if group.handle is None:
        return _copied(output, tensor, "reduce_scatter", group)
    return _run(
        "reduce_scatter",
        group,
        (output, tensor),
        async_op,
        lambda output, tensor: _reduce_scatter_single(output, tensor, group=group.handle, async_op=True),
    )


def broadcast(tensor: Tensor, group: Group, source: int = 0, async_op: bool = False) -> Work:
    """tensor: replaced by that of the group's rank `source`."""
    _check_contiguous("broadcast", group, tensor)
    return _run(
        "broadcast",
        group,
        (tensor,),
        async_op,
        lambda tensor: dist.broadcast(tensor, group=group.handle, group_src=source, async_op=True),
    )


def barrier(group: Group) -> None:
    """Return when every rank of the group has come here."""
    if group.handle is None:
        return
    devices = [torch.cuda.current_device()] if backend_of(group) == "nccl" else None
    _run("barrier", group, (), False, lambda: dist.barrier(group=group.handle, device_ids=devices, async_op=True))


def broadcast_object(obj: Any, group: Group, source: int = 0) -> Any:
    """The object of the group's rank `source`, on every rank; of the types of `wire.pack`, for small things, and blocking."""
    if group.handle is None:
        return obj
    held = pack(obj) if group.rank == source else None

    def call() -> bytes:
        length = _lengths(group, held)[source]
        tensor = _padded(held or b"", length, group)
        dist.broadcast(tensor, group=group.handle, group_src=source)
        return _content(tensor, length)

    received = _blocking("broadcast_object", group, call)
    return obj if held is not None else unpack(received)


def gather_objects(obj: Any, group: Group) -> list[Any]:
    """The objects of all ranks, by group rank, on every rank; of the types of `wire.pack`, for small things, and blocking."""
    if group.handle is None:
        return [obj]
    held = pack(obj)

    def call() -> list[bytes]:
        lengths = _lengths(group, held)
        mine = _padded(held, max(lengths), group)
        whole = mine.new_empty(group.size * len(mine))
        _all_gather_single(whole, mine, group=group.handle)
        return [_content(part, length) for part, length in zip(whole.split(len(mine)), lengths, strict=True)]

    received = _blocking("gather_objects", group, call)
    return [obj if rank == group.rank else unpack(data) for rank, data in enumerate(received)]


def objects_at(obj: Any, group: Group, destination: int = 0) -> list[Any]:
    """The objects of all ranks, by group rank, on the group's rank `destination`; [] elsewhere. As gather_objects."""
    if group.handle is None:
        return [obj]
    held = pack(obj)

    def call() -> list[bytes]:
        lengths = _lengths(group, held)
        mine = _padded(held, max(lengths), group)
        parts = [torch.empty_like(mine) for _ in lengths] if group.rank == destination else None
        dist.gather(mine, parts, group=group.handle, group_dst=destination)
        return [_content(part, length) for part, length in zip(parts or [], lengths, strict=False)]

    received = _blocking("objects_at", group, call)
    return [obj if rank == group.rank else unpack(data) for rank, data in enumerate(received)]


def _lengths(group: Group, held: bytes | None) -> list[int]:
    """Of what each rank holds, in bytes."""
    mine = torch.tensor([0 if held is None else len(held)], dtype=torch.int64, device=_device_of(group))
    lengths = mine.new_empty(group.size)
    _all_gather_single(lengths, mine, group=group.handle)
    return [int(length) for length in lengths.tolist()]


def _padded(held: bytes, length: int, group: Group) -> Tensor:
    """[max(length, 1)] bytes, on the device whose tensors the group's backend moves."""
    return torch.frombuffer(bytearray(held.ljust(max(length, 1), b"\0")), dtype=torch.uint8).to(_device_of(group))


def _content(tensor: Tensor, length: int) -> bytes:
    return tensor[:length].cpu().numpy().tobytes()


def _device_of(group: Group) -> torch.device:
    return (
        torch.device("cuda", torch.cuda.current_device())
        if dist.get_backend(group.handle) == "nccl"
        else torch.device("cpu")
    )


def _run(name: str, group: Group, tensors: tuple[Tensor, ...], async_op: bool, launch: Callable[..., Any]) -> Work:
    """launch: starts the operation on the tensors, of which it writes the first."""
    start_ns = perf_counter_ns()
    if group.handle is None:
        return Work(None, name, group, start_ns)
    number = 0 if group.heartbeat is None else group.heartbeat.joins(group.name)
    try:
        handle: Any
        if isinstance(group.handle, FakeHandle):
            handle = group.handle.start(name, tensors)
        elif tensors and travels_through_host(group.handle, tensors[0]):
            handle = HostCopies(tensors, 1, launch)
        else:
            handle = launch(*tensors)
    except RuntimeError as error:
        raise _failed(name, group, tensors, start_ns, error) from error
    work = Work(handle, name, group, start_ns, tensors, number)
    if not async_op:
        work.wait()
    return work


def _blocking(name: str, group: Group, call: Callable[[], Any]) -> Any:
    start_ns = perf_counter_ns()
    heartbeat = group.heartbeat
    if heartbeat is not None:
        heartbeat.wait_for_all(group.name, name, heartbeat.joins(group.name))
    try:
        answer = call()
    except RuntimeError as error:
        raise _failed(name, group, (), start_ns, error) from error
    if heartbeat is not None:
        heartbeat.goes_on()
    if group.tracer is not None:
        group.tracer.event(f"{group.name} {name}", "collective", start_ns)
    return answer


def _copied(output: Tensor, tensor: Tensor, name: str, group: Group) -> Work:
    if output.data_ptr() != tensor.data_ptr():
        output.copy_(tensor)
    return Work(None, name, group, 0)


def _failed(name: str, group: Group, tensors: tuple[Tensor, ...], start_ns: int, error: Exception) -> Exception:
    what = (
        name if not tensors else f"{name} of {str(tensors[-1].dtype).removeprefix('torch.')}{list(tensors[-1].shape)}"
    )
    who = f"global rank {group.global_rank} in group {group}"
    return communication_error(what, who, error, (perf_counter_ns() - start_ns) / 1e9, group.timeout_seconds)


def _check_contiguous(name: str, group: Group, *tensors: Tensor) -> None:
    for tensor in tensors:
        if not tensor.is_contiguous():
            raise ValueError(
                f"{name} in group {group.name} needs contiguous tensors; got shape {tuple(tensor.shape)} with strides {tensor.stride()}"
            )


def _check_shards(name: str, group: Group, whole: Tensor, shard: Tensor) -> None:
    _check_contiguous(name, group, whole, shard)
    expected = (shard.shape[0] * group.size, *shard.shape[1:]) if shard.ndim else ()
    if not shard.ndim or tuple(whole.shape) != expected or whole.dtype != shard.dtype:
        raise ValueError(
            f"{name} in group {group}: the whole is {whole.dtype} {tuple(whole.shape)}, the shard {shard.dtype} {tuple(shard.shape)}; "
            f"the whole must be the shard {group.size} times along dim 0"
        )
