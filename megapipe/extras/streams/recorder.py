"""Records what a rank asks of the fake device, as a log for `order.find_races`, and replaces torch.cuda's streams.

Recorder           the log: operations on storages by stream, allocations and frees, events
Stream, Event, CudaGraph, graph    of torch.cuda
NcclBackend        process groups with internal streams
"""

from __future__ import annotations

import ctypes
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from itertools import count, product
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megapipe.assembly.runtime import TrainingRuntime
from megapipe.comm.groups import FakeHandle, Traffic
from megapipe.extras.streams.order import COMMUNICATOR, HOST, Entry, Free, Mark, Operation, Span, Wait
from megapipe.extras.streams.shapes import INSIDE, Answers, is_ours, tensors

COMM = f"{INSIDE}comm/"
MOST_ROWS = 64  # of a tensor with gaps; of more rows, the whole extent counts
COPIES = ("_to_copy", "copy_")
SYNCHRONIZING = ("_local_scalar_dense", "equal", "nonzero", "masked_select")  # they return to the host what they find
UNWRITTEN = ("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided")
DEFAULT = "the default stream"
RECORD, WAIT, USE = range(3)  # as in guard.cpp


class Device:
    """The functions of the fake device's library, and the recorder of the calls."""

    library: ClassVar[Any] = None
    recorder: ClassVar[Any] = None
    _callback: ClassVar[Any] = None

    @classmethod
    def load(cls, path: str) -> None:
        """Let torch report its own use of streams; the library has been loaded already."""
        cls.library = ctypes.CDLL(path)
        cls.library.fake_cuda_current_stream.restype = ctypes.c_int64
        cls._callback = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)(cls._observe)
        cls.library.fake_cuda_observe(cls._callback)

    @classmethod
    def _observe(cls, what: int, subject: int, stream: int) -> None:
        recorder: Recorder = cls.recorder
        if recorder is not None and what == USE:
            recorder.use(subject, _name(stream))
        elif recorder is not None:
            event, queue = f"torch's event {subject}", _name(stream)
            recorder.log.append(Mark(event, queue) if what == RECORD else Wait(queue, event))

    @classmethod
    def current(cls) -> int:
        return int(cls.library.fake_cuda_current_stream())

    @classmethod
    def set_current(cls, stream: int) -> None:
        cls.library.fake_cuda_set_stream(ctypes.c_int64(stream))


def _name(stream: int) -> str:
    return f"stream {stream}" if stream else DEFAULT


def current_queue() -> str:
    """Return the name of the current stream."""
    return _name(Device.current())


class Recorder(TorchDispatchMode):
    """The log of one rank: every operation under this mode, with the bytes that it reads and writes.

    answers: the mode beside it. last_step: the length of the log before the last step. marks: of the engine, for a
    recorder that follows actions.
    """

    marks: Callable[[str], AbstractContextManager[Any]] | None = None
    last_step = 0

    def __init__(self) -> None:
        super().__init__()
        self.answers = Answers(self)
        self.log: list[Entry] = []
        self.capturing: CudaGraph | None = None
        self.capture_stream: Stream | None = None
        self._numbers = count(1)
        # by address: (reference, number, queue of the allocation, whether a graph owns the memory, record_stream's)
        self._storages: dict[int, tuple[Any, int, str, bool, set[str]]] = {}
        self._freed: dict[str, list[Free]] = {}  # by queue, until its next allocation, which may get the memory
        self._queues: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.see(func, args, kwargs, tensors(result))
        return result

    def see(self, func: Any, args: Any, kwargs: Any, results: list[Tensor]) -> None:
        """Record an operation that has run."""
        if func.namespace == "prim":  # asks for the device, for example
            return
        name, schema = func.overloadpacket.__name__, func._schema
        read: list[Tensor] = []
        written: list[Tensor] = []
        for position, argument in enumerate(schema.arguments):
            given = args[position] if position < len(args) else kwargs.get(argument.name)
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            (written if is_written else read).extend(tensors(given))
        known = {id(tensor.untyped_storage()) for tensor in (*read, *written)}
        made = [tensor for tensor in results if id(tensor.untyped_storage()) not in known]
        for tensor in made:
            self._number(tensor)
        is_view = not made and not written and results
        if not is_view and name not in UNWRITTEN and not name.startswith("set_"):
            if name.endswith("_like") or name.startswith("new_"):
                read = []
            self._run(name, read, [*written, *made], kwargs.get("non_blocking", len(args) > 2 and args[2] is True))

    def _run(self, name: str, read: list[Tensor], written: list[Tensor], non_blocking: bool) -> None:
        on_host = [tensor for tensor in (*read, *written) if not tensor.is_cuda]
        queue, place = current_queue(), f"{name} in {where()}"
        if len(on_host) == len(read) + len(written):
            self.launch(HOST, place, read, written)
        elif name in COPIES:
            self.launch(queue, place, read, written)
            if on_host and not (non_blocking and all(self.answers.is_pinned(tensor) for tensor in on_host)):
                self.synchronize([queue])
        else:
            self.launch(HOST, place, [tensor for tensor in read if not tensor.is_cuda], ())
            self.launch(queue, place, [tensor for tensor in read if tensor.is_cuda], written)
            if name in SYNCHRONIZING:
                self.synchronize([queue])

    def launch(self, queue: str, place: str, read: Iterable[Tensor], written: Iterable[Tensor], **message: Any) -> None:
        """Record an operation."""
        reads, writes = (tuple(span for tensor in each for span in self._spans(tensor)) for each in (read, written))
        if reads or writes:
            self.record(Operation(queue, place, reads, writes, **message))

    def record(self, operation: Operation) -> None:
        self._queues.add(operation.queue)
        self.log.append(operation)
        if self.capturing is not None:
            self.capturing.operations.append(operation)

    def read_by_host(self, tensor: Tensor, function: str) -> None:
        """Record that the host reads a tensor, and waits for it if it is on the device."""
        queue = current_queue() if tensor.is_cuda else HOST
        self.launch(queue, f"{function} in {where()}", [tensor], ())
        if tensor.is_cuda:
            self.synchronize([queue])

    def copied_to_device(self) -> None:
        """Called when numbers of the host become a tensor of the device."""

    def as_kernel(self, name: str, function: Callable[..., Any], *args: Any, where: str | None = None) -> Any:
        """Return function(*args), which is compiled to one kernel."""
        return function(*args)

    def take(self, runtime: TrainingRuntime) -> None:
        """Called with the rank's runtime before its first step."""

    def begin_step(self) -> None:
        """Called before each step."""
        self.last_step = len(self.log)

    def watching(self) -> AbstractContextManager[Any]:
        """Return the surroundings of what is recorded."""
        return nullcontext()

    def order(self, first: str, then: str) -> None:
        """Make the later work of one queue wait for what the other has been given."""
        event = self.new_event()
        self.log += [Mark(event, first), Wait(then, event)]

    def synchronize(self, queues: Iterable[str] | None = None) -> None:
        """Make the host wait for these queues; None for all."""
        for queue in sorted(self._queues - {HOST}) if queues is None else queues:
            self.order(queue, HOST)

    def new_event(self) -> str:
        return f"event {next(self._numbers)}"

    def use(self, address: int, queue: str) -> None:
        """Mark a storage as used by a queue, as record_stream does."""
        if address in self._storages:
            self._storages[address][-1].add(queue)

    def live(self) -> set[int]:
        """Return the numbers of all storages."""
        return {number for _, number, *_ in self._storages.values()}

    def resize(self, storage: torch.UntypedStorage) -> None:
        """Give a storage other memory than before, or none: its old memory is freed."""
        address = storage._cdata
        if address in self._storages:
            queue = self._storages[address][2]
            self._free(address)
            if storage.nbytes():
                self._allocate(storage, current_queue() if queue != HOST else HOST)

    def _number(self, tensor: Tensor) -> int:
        """Return the number of a tensor's storage; a new one is allocated on the current stream."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._storages:
            self._allocate(storage, current_queue() if tensor.is_cuda else HOST)
        return self._storages[storage._cdata][1]

    def _allocate(self, storage: torch.UntypedStorage, queue: str) -> None:
        address = storage._cdata
        reference = weakref.ref(storage, lambda _: self._free(address))
        self.log += self._freed.pop(queue, [])
        self._storages[address] = reference, next(self._numbers), queue, self.capturing is not None, set()

    def _free(self, address: int) -> None:
        _, number, queue, of_graph, used_by = self._storages.pop(address)
        # the allocator of pinned memory waits for copies; a graph's memory is not used by others
        if queue != HOST and (self.capturing is not None or not of_graph):
            events = {self.new_event(): user for user in used_by}
            self.log += [Mark(event, user) for event, user in events.items()]
            self._freed.setdefault(queue, []).append(Free(number, queue, where(), tuple(events)))

    def _spans(self, tensor: Tensor) -> list[Span]:
        if not tensor.numel():
            return []
        number, size = self._number(tensor), tensor.element_size()
        start = int(tensor.storage_offset()) * size
        layout = _rows(tuple(tensor.shape), tuple(tensor.stride()))
        return [(number, start + first * size, start + stop * size) for first, stop in layout]


@lru_cache(maxsize=4096)
def _rows(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """Return the ranges of elements that a tensor covers in its storage, from its first element."""
    dims = sorted((stride, size) for stride, size in zip(strides, shape, strict=True) if size > 1 and stride)
    length = 1
    while dims and dims[0][0] <= length:
        stride, size = dims.pop(0)
        length += stride * (size - 1)
    offsets = [0]
    for stride, size in dims:
        if len(offsets) * size > MOST_ROWS:
            return ((0, length + sum(stride * (size - 1) for stride, size in dims)),)
        offsets = [first + stride * index for first, index in product(offsets, range(size))]
    return tuple((first, first + length) for first in sorted(offsets))


def where() -> str:
    """Return where in megapipe, `comm` aside, the host is; in autograd's thread maybe only where its caller is."""
    main = threading.main_thread().ident or 0
    found = _place_of(sys._getframe(1))
    if found is None and threading.get_ident() != main:  # of the own thread it would hold this frame, and its tensors
        found = _place_of(sys._current_frames()[main])
    return found or "outside"


def _place_of(frame: Any) -> str | None:
    while frame is not None:
        path = frame.f_code.co_filename
        if is_ours(path) and not path.startswith(COMM):
            return f"{path.removeprefix(INSIDE)}:{frame.f_code.co_name}"
        frame = frame.f_back
    return None


class Stream:
    """A replacement for torch.cuda.Stream."""

    def __init__(self, device: Any = None, number: int | None = None, **_: Any) -> None:
        self.number = next(Device.recorder._numbers) if number is None else number
        self.queue, self.cuda_stream = _name(self.number), self.number

    def wait_stream(self, other: Stream) -> None:
        Device.recorder.order(other.queue, self.queue)

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def record_event(self) -> Event:
        event = Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        Device.recorder.synchronize([self.queue])


class Event:
    """A replacement for torch.cuda.Event. No time passes between two events."""

    def __init__(self, **_: Any) -> None:
        self._name = Device.recorder.new_event()

    def record(self, stream: Stream | None = None) -> None:
        Device.recorder.log.append(Mark(self._name, (stream or current_stream()).queue))

    def wait(self, stream: Stream | None = None) -> None:
        Device.recorder.log.append(Wait((stream or current_stream()).queue, self._name))

    def synchronize(self) -> None:
        Device.recorder.log.append(Wait(HOST, self._name))

    def elapsed_time(self, _: Event) -> float:
        return 0.0


def current_stream(device: Any = None) -> Stream:
    return Stream(number=Device.current())


@contextmanager
def on(stream: Stream) -> Iterator[None]:
    """Replace torch.cuda.stream."""
    before = Device.current()
    Device.set_current(stream.number)
    try:
        yield
    finally:
        Device.set_current(before)


class CudaGraph:
    """A replacement for torch.cuda.CUDAGraph. A replay accesses what was accessed in the capture and still lives.

    Memory that was freed during the capture belongs to the pool: every replay of a graph of the pool writes it.
    """

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.pool, self.place = 0, ""

    def replay(self) -> None:
        recorder, live = Device.recorder, Device.recorder.live()

        def spans(each: Callable[[Operation], Sequence[Span]]) -> tuple[Span, ...]:
            return tuple({span: None for done in self.operations for span in each(done) if span[0] in live})

        reads, writes = spans(lambda done: done.reads), spans(lambda done: done.writes)
        queue = current_queue()
        recorder.record(Operation(queue, f"graph of {self.place}", reads, (*writes, (self.pool, 0, 1))))


@contextmanager
def graph(captured: CudaGraph, pool: int = 0, **_: Any) -> Iterator[None]:
    """Replace torch.cuda.graph: within the block, operations are checked without the others of the device."""
    recorder: Recorder = Device.recorder
    recorder.synchronize()
    captured.pool, captured.place, recorder.capturing = pool, where(), captured
    recorder.capture_stream = recorder.capture_stream or Stream()  # torch captures all graphs on one
    try:
        with on(recorder.capture_stream):
            yield
    finally:
        recorder.capturing = None
        recorder.synchronize()


class NcclBackend(Traffic):
    """Every group and every route of messages has a communicator."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def handle(self, kind: str) -> NcclHandle:
        return NcclHandle(kind, self)


class NcclHandle(FakeHandle):
    """A communicator: its operations run on one internal stream, each after what the current stream holds at the call.

    A tensor stays alive only as long as the caller keeps it, though torch's NCCL backend would keep it until `wait`.
    """

    def __init__(self, kind: str, backend: NcclBackend) -> None:
        super().__init__(kind, backend)
        self._recorder, self._queue, self._posted = backend.recorder, f"{COMMUNICATOR}{kind}", count()

    def another(self, name: str) -> FakeHandle:
        return self._traffic.handle(name)

    def start(self, operation: str, tensors: Sequence[Tensor]) -> Any:
        super().start(operation, tensors)
        return self._launch(operation, tensors[1:], tensors[:1])

    def send(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Any:
        super().send(tensors, peer, tag)
        return self._launch("send", tensors, (), sends=self._match(tag))

    def recv(self, tensors: Sequence[Tensor], peer: int, tag: int) -> Any:
        super().recv(tensors, peer, tag)
        return self._launch("receive", (), tensors, receives=self._match(tag))

    def _match(self, tag: int) -> str:
        """Return a name that equals the one at the other end only if both post in the same order, as NCCL needs it."""
        return f"{self._kind}, number {next(self._posted)}, tag {tag}"

    def _launch(self, operation: str, read: Sequence[Tensor], written: Sequence[Tensor], **message: Any) -> Any:
        recorder, place = self._recorder, f"{operation} in {where()}"
        if not all(tensor.is_cuda for tensor in (*read, *written)):
            recorder.launch(HOST, place, read, written, **message)
            return NcclWork(recorder, HOST)
        recorder.order(current_queue(), self._queue)
        recorder.launch(self._queue, place, read, written, **message)
        return NcclWork(recorder, self._queue)


class NcclWork:
    """An operation in flight; `wait` makes the current stream wait for it."""

    def __init__(self, recorder: Recorder, queue: str) -> None:
        self._recorder, self._end = recorder, recorder.new_event()
        recorder.log.append(Mark(self._end, queue))

    def wait(self) -> None:
        self._recorder.log.append(Wait(current_queue(), self._end))

    def is_completed(self) -> bool:
        return False


STAND_INS = {
    "Stream": Stream,
    "Event": Event,
    "CUDAGraph": CudaGraph,
    "graph": graph,
    "current_stream": current_stream,
    "stream": on,
    "graph_pool_handle": lambda: next(Device.recorder._numbers),
    "is_current_stream_capturing": lambda: Device.recorder.capturing is not None,
    "synchronize": lambda *_: Device.recorder.synchronize(),
}


def compiled(function: Callable[..., Any], **_: Any) -> Callable[..., Any]:
    """Stand in for torch.compile of pointwise functions and reductions: one kernel that reads its arguments once."""
    name = f"compiled {getattr(function, '__name__', 'function')}"
    where = getattr(function, "__module__", "").removeprefix("megapipe.").replace(".", "/") + ".py:"

    def call(*args: Any) -> Any:
        return Device.recorder.as_kernel(name, function, *args, where=where)

    return call


def pretend_streams() -> None:
    """Replace those parts of torch.cuda that order work, record_stream, the resizing of storages, and torch.compile."""
    for name, value in STAND_INS.items():
        setattr(torch.cuda, name, value)
    torch.compile = compiled  # type: ignore[assignment]

    def record_stream(tensor: Tensor, stream: Stream) -> None:
        Device.recorder.use(tensor.untyped_storage()._cdata, stream.queue)

    Tensor.record_stream = record_stream  # type: ignore[assignment]
    resize = torch.UntypedStorage.resize_

    def resize_(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        before = storage.nbytes()
        resize(storage, size)
        if Device.recorder is not None and size != before:
            Device.recorder.resize(storage)
        return storage

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign, assignment]
