"""Planted mistakes in the order of streams: `PLANTS` replaces a method of megapipe by a function that makes one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from torch import Tensor

from megapipe.comm.channels import Channel, PendingReceive, PendingSend
from megapipe.comm.collectives import Work
from megapipe.data_parallel.store import Store, free
from megapipe.data_parallel.stores import Stores
from megapipe.extras.streams.recorder import Stream, on
from megapipe.gpu.streams import HostBuffer, StageStreams, StreamCopies
from megapipe.model.context_parallel import Ring
from megapipe.pipeline import engine
from megapipe.pipeline.graphs import CapturedStage
from megapipe.pipeline.offload import _Carried
from megapipe.schedule.action import Op
from megapipe.schedule.lower import without_pairs
from megapipe.schedule.schedule import Row
from megapipe.tensor_parallel import gemms
from megapipe.tensor_parallel.gemms import SequenceGather
from tests.schedule.strategies import exchange_receives

begin_step, finish, post_receive = Stores.begin_step, Stores.finish_gradients, Channel.post_receive
launch, shift = Store._launch, Ring.shift


def nothing(*_: Any) -> None:
    """Do nothing in place of something."""


@contextmanager
def computing_without_join(streams: StageStreams, stage: int) -> Iterator[None]:
    streams._fork()
    with on(streams.of(stage)):
        yield


def to_busy_buffer(copies: StreamCopies, stream: Stream, buffer: HostBuffer, copy: Callable[[], None]) -> Any:
    copies._out.wait_stream(stream)
    return copies._run(copies._out, copy)


def to_busy_memory(copies: StreamCopies, stream: Stream, buffer: HostBuffer, copy: Callable[[], None]) -> Any:
    buffer.read = copies._run(copies._in, copy)
    return buffer.read


def release_at_once(carried: Any) -> None:
    for part in carried._parts.values():
        part.bytes = None


def message_on_its_way(receive: PendingReceive) -> tuple[Tensor, ...]:
    return receive._tensors


def drop_message(send: PendingSend) -> None:
    send._handles, send._tensors = [], ()


def receive_into_one_buffer(channel: Channel, messages: Any) -> PendingReceive:
    buffer = channel.handle.__dict__.setdefault("buffer", [])
    if not buffer:
        receive = post_receive(channel, messages)
        buffer += receive._tensors
        return receive
    declaration = channel._declaration
    assert declaration is not None
    return PendingReceive(channel, tuple(buffer), [channel._post(tensor, declaration.tag) for tensor in buffer], [], 0)


def reduce_early(stores: Stores, num_microbatches: int) -> None:
    begin_step(stores, num_microbatches)
    for store in stores.all:
        if store.layout.kind == "plain":
            store.reduce()
            store._num_launched = 0


def finish_at_once(stores: Stores) -> None:
    for store in stores.all:
        store.reducing = []
    finish(stores)


def drop_gathers(stores: Stores, stage: int, entries: Any = None) -> None:
    for store, bucket in stores._gathered_once[stage] if entries is None else entries:
        store.gathering.pop(bucket.start, None)


def start_only(collective: Callable[..., Any]) -> Callable[..., Any]:
    def start(*tensors: Any, async_op: bool = False) -> Any:
        collective(*tensors, async_op=True)
        return SimpleNamespace(wait=nothing)

    return start


def gathered_halfway(gather: SequenceGather) -> Tensor:
    gather.launch()
    return gather.tensor if gather._full is None else gather._full


def send_from_the_graph(stage: CapturedStage, microbatch: int, gradients: Any) -> tuple[Tensor, ...]:
    slot = stage._graphs.slots[stage._slots[microbatch]]
    stage._graphs.fill(slot.gradients, gradients, "gradient")
    slot.backward()
    return slot.input_gradients


def launch_and_free(store: Store, bucket: Any) -> None:
    launch(store, bucket)
    if store.level == 2 and bucket is store.layout.buckets[-1]:
        free(store.gradients)


def shift_and_overwrite(ring: Ring, tensor: Tensor, step: int) -> tuple[Tensor, Work]:
    started = shift(ring, tensor, step)
    tensor.zero_()
    return started


def receive_at_once(channel: Channel, messages: Any) -> PendingReceive:
    receive = post_receive(channel, messages)
    for handle in receive._handles:
        handle.wait()
    return receive


def receives_in_another_order(row: Row) -> Row:
    stages = {action.stage for action in row if action.op is Op.RECV_F}
    return exchange_receives(row, Op.RECV_F) if len(stages) > 1 else without_pairs(row)


PLANTS: dict[str, Callable[[], Any]] = {
    "no fork": partial(patch.object, StageStreams, "_fork", nothing),
    "no join": partial(patch.object, StageStreams, "computing", computing_without_join),
    "no event after a copy": partial(patch.object, StreamCopies, "wait", nothing),
    "host buffer overwritten": partial(patch.object, StreamCopies, "to_host", to_busy_buffer),
    "copied into memory in use": partial(patch.object, StreamCopies, "to_device", to_busy_memory),
    "released during the copy": partial(patch.object, _Carried, "release", release_at_once),
    "message not waited for": partial(patch.object, PendingReceive, "wait", message_on_its_way),
    "receive buffer reused": partial(patch.object, Channel, "post_receive", receive_into_one_buffer),
    "sent tensor freed": partial(patch.object, PendingSend, "wait", drop_message),
    "reduced before the backward": partial(patch.object, Stores, "begin_step", reduce_early),
    "reduction not waited for": partial(patch.object, Stores, "finish_gradients", finish_at_once),
    "parameters not waited for": partial(patch.object, Stores, "wait", drop_gathers),
    "sum over tp not waited for": partial(patch.object, gemms, "all_reduce", start_only(gemms.all_reduce)),
    "chunk's sum not waited for": partial(patch.object, gemms, "reduce_scatter", start_only(gemms.reduce_scatter)),
    "chunk not waited for": partial(patch.object, SequenceGather, "full", gathered_halfway),
    "host update without wait": partial(patch.object, Stream, "synchronize", nothing),
    "rows freed while they are sent": partial(patch.object, Work, "record_stream", nothing),
    "gather of weights not waited for": partial(patch.object, Stores, "wait", drop_gathers),
    "gradients freed while they are reduced": partial(patch.object, Store, "_launch", launch_and_free),
    "ring's buffer overwritten": partial(patch.object, Ring, "shift", shift_and_overwrite),
    "collectives waited for at once": partial(patch.object, Work, "__post_init__", Work.wait),
    "messages waited for at once": partial(patch.object, Channel, "post_receive", receive_at_once),
    "receives in another order": partial(patch.object, engine, "without_pairs", receives_in_another_order),
    "sent from a graph": partial(patch.object, CapturedStage, "backward_input", send_from_the_graph),
}
