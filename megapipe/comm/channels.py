"""Messages between pipeline ranks: one `Channel` per stage boundary, kind and direction, each first-in first-out.

The direction is 0 except for DualPipe's odd microbatches, which run through the ranks in reverse (direction 1). All
channels of one kind from one rank to another are a route (`schedule.dependencies`). Even in plain 1F1B two peers order
their sends and receives differently, but on every route a valid schedule posts receives in the order of the sends.

    gloo   one connection per pair of ranks; a tag on each tensor: channel, fingerprint of its shapes, running number
    NCCL   one communicator per route, of two ranks (stream order keeps messages in order)

Both ends declare what a message contains. The sender's declaration travels ahead of the first message of its kind
(slices of a sequence differ in length); the receiver compares it with its own and raises an error if they differ (gloo
would abort the process when a message is longer than its buffer). If only one end changes its declaration, gloo's tags
differ and the wait times out.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from time import perf_counter_ns
from typing import Any

import torch
from torch import Tensor

from megapipe.comm.groups import (
    FakeHandle,
    Group,
    HostCopies,
    backend_of,
    communication_error,
    needs_host_copies,
    new_handle,
)
from megapipe.errors import CommunicationError, ScheduleError
from megapipe.monitor.heartbeat import Wait
from megapipe.schedule.dependencies import ChannelPath, Route, ValueKind
from megapipe.schedule.placement import Placement

KINDS = ("activation", "gradient")  # over boundary s: from stage s to s + 1; from stage s + 1 to s
ChannelKey = tuple[int, str, int]  # (boundary, kind, direction)

# gloo's tags have 31 bits, from the highest: channel, fingerprint of the declaration, 1 for a header, running number
CHANNEL_BITS, FINGERPRINT_BITS, HEADER_BITS, NUMBER_BITS = 11, 8, 1, 11
DECLARATION_BYTES = 256

# nanoseconds of this rank's clock: (start, start) of a send; (start, end) of the wait for a received message
MessageTime = tuple[int, int]


@dataclass(frozen=True)
class MessageSpec:
    """Shape and dtype of one tensor of a message."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> MessageSpec:
        return cls(tuple(tensor.shape), tensor.dtype)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


@dataclass(frozen=True)
class _Declaration:
    """The contents of a channel's messages, kept from one message to the next because they seldom change."""

    messages: tuple[MessageSpec, ...]
    text: str
    tag: int  # the part of the tag that all these messages share

    def matches(self, tensors: tuple[Tensor, ...]) -> bool:
        if len(tensors) != len(self.messages):
            return False
        for tensor, message in zip(tensors, self.messages, strict=True):
            if tensor.shape != message.shape or tensor.dtype is not message.dtype:
                return False
        return True


@dataclass
class _Header:
    """A receive of the sender's declaration, to be compared with what is expected here."""

    buffer: Tensor  # [DECLARATION_BYTES], uint8
    expected: str
    handle: Any
    compared: bool = False


@dataclass(eq=False, slots=True)
class PendingSend:
    """A message in flight; keeps its tensors alive until it has arrived."""

    _channel: Channel
    _tensors: tuple[Tensor, ...]
    _handles: list[Any]
    _start_ns: int

    def done(self) -> bool:
        """Return True if the message is known to have arrived: gloo reports it only after `wait`, NCCL without it."""
        return all(handle.is_completed() for handle in self._handles)

    def wait(self) -> None:
        """Return when the receiver has the message (on a GPU: order the stream after it). May be called again."""
        handles, self._handles = self._handles, []
        for handle in handles:
            self._channel.wait_for(handle, self._start_ns, self._tensors)
        if handles:
            self._channel.trace("send", self._start_ns)
        self._tensors = ()


@dataclass(eq=False, slots=True)
class PendingReceive:
    """A posted receive."""

    _channel: Channel
    _tensors: tuple[Tensor, ...]
    _handles: list[Any]
    _headers: list[_Header]
    _start_ns: int

    def wait(self) -> tuple[Tensor, ...]:
        """Return the message once it has arrived (on a GPU: order the current stream after it). May be called again.

        Raises CommunicationError if the sender declared something else, is lost, or does not send within the group's
        timeout.
        """
        channel = self._channel
        wait_start = 0 if channel.message_times is None else channel.now()
        headers, self._headers = self._headers, []
        for header in headers:
            channel.compare(header, self._start_ns, self._tensors)
        handles, self._handles = self._handles, []
        for handle in handles:
            channel.wait_for(handle, self._start_ns, self._tensors)
        if handles:
            channel.trace("receive", self._start_ns)
            if channel.message_times is not None:
                channel.message_times.append((wait_start, channel.now()))
        return self._tensors


@dataclass(eq=False, repr=False)
class Channel:
    """One direction of one stage boundary, as seen from one of its two ranks.

    Messages are matched in the order of `send` and `post_receive`; over NCCL in that of all channels of the route.
    """

    boundary: int  # boundary s is between stages s and s + 1
    kind: str  # 'activation' or 'gradient'
    direction: int  # 1 for DualPipe's odd microbatches, else 0
    index: int  # the channel's number in the pipeline, equal on both ends
    route: Route
    sends: bool  # True on the sending end
    group: Group
    peer: int  # global rank of the other end
    handle: Any  # torch's process group that carries the messages
    handle_peer: int  # the peer's rank in it
    device: torch.device
    # at this number of messages not known to have arrived, `send` first waits for the oldest; None: the caller bounds
    # them by waiting
    max_in_flight: int | None = None
    message_times: list[MessageTime] | None = None  # a list while times of messages are recorded
    now: Callable[[], int] = perf_counter_ns  # clock of message_times; a device clock on a GPU
    _number: int = 0  # tensors posted so far
    _declaration: _Declaration | None = None  # of the last message
    _declarations: dict[tuple[MessageSpec, ...], _Declaration] = field(default_factory=dict)  # slices differ in length
    _headers: list[_Header] = field(default_factory=list)  # not yet compared
    _in_flight: deque[PendingSend] = field(default_factory=deque)

    def __post_init__(self) -> None:
        self._suffix = f", direction {self.direction}" if self.direction else ""
        self._encoded_name = str(self).encode()

    def __str__(self) -> str:
        route = (self.boundary, self.boundary + 1) if self.kind == "activation" else (self.boundary + 1, self.boundary)
        return f"{self.kind} from stage {route[0]} to {route[1]}{self._suffix}"

    def send(self, tensors: tuple[Tensor, ...]) -> PendingSend:
        """Start to send one message and return at once. The tensors must not be changed before the send is complete."""
        if not self.sends:
            raise self._wrong_end("send")
        for tensor in tensors:
            if not isinstance(tensor, Tensor):
                found = tuple(type(tensor).__name__ for tensor in tensors)
                raise ValueError(f"{self}: a message is a tuple of tensors, got {found}")
        in_flight = self._in_flight
        while in_flight and (len(in_flight) == self.max_in_flight or in_flight[0].done()):
            in_flight.popleft().wait()
        start_ns = perf_counter_ns()
        if self.message_times is not None:
            start = self.now()
            self.message_times.append((start, start))
        tensors = tuple([tensor.detach().contiguous() for tensor in tensors])
        declaration, is_new, handles, kept = self._declaration, False, [], tensors
        if declaration is None or not declaration.matches(tensors):
            declaration, is_new = self._declare(tuple(map(MessageSpec.of, tensors)))
        if is_new:
            padded = _encode(declaration.text).ljust(DECLARATION_BYTES, b"\0")
            header = torch.tensor(list(padded), dtype=torch.uint8).to(self.device)
            handles.append(self._post(header, self._tag("", header=True)))
            kept = (*tensors, header)
        handles += [self._post(tensor, declaration.tag) for tensor in tensors]
        pending = PendingSend(self, kept, handles, start_ns)
        in_flight.append(pending)
        return pending

    def post_receive(self, messages: tuple[MessageSpec, ...]) -> PendingReceive:
        """Start to receive one message into new tensors. On a GPU this occupies the device until the peer sends."""
        if self.sends:
            raise self._wrong_end("post_receive")
        start_ns = perf_counter_ns()
        declaration, is_new = self._declaration, False
        if self._headers:
            self._headers = [header for header in self._headers if not header.compared]
        if declaration is None or declaration.messages != messages:
            declaration, is_new = self._declare(messages)
        if is_new:
            buffer = torch.zeros(DECLARATION_BYTES, dtype=torch.uint8, device=self.device)
            self._headers.append(_Header(buffer, declaration.text, self._post(buffer, self._tag("", header=True))))
        tensors = tuple([torch.empty(message.shape, dtype=message.dtype, device=self.device) for message in messages])
        handles = [self._post(tensor, declaration.tag) for tensor in tensors]
        return PendingReceive(self, tensors, handles, list(self._headers), start_ns)

    def drain(self) -> None:
        """Wait for all sends."""
        while self._in_flight:
            self._in_flight.popleft().wait()

    def wait_for(self, handle: Any, start_ns: int, tensors: tuple[Tensor, ...]) -> None:
        """Wait for one of torch's handles. Raises CommunicationError if the operation has failed."""
        heartbeat = self.group.heartbeat
        if heartbeat is not None:
            heartbeat.wait_for_peer(Wait.SEND if self.sends else Wait.RECEIVE, self._encoded_name, self.peer)
        try:
            handle.wait()
        except RuntimeError as error:
            raise self._error(error, start_ns, tensors) from error
        if heartbeat is not None:
            heartbeat.end_wait()

    def compare(self, header: _Header, start_ns: int, tensors: tuple[Tensor, ...]) -> None:
        """Raise CommunicationError unless the sender declared what is expected here."""
        if isinstance(self.handle, FakeHandle):  # it transfers no declaration
            header.compared = True
        if header.compared:  # by whichever message was waited for first
            return
        self.wait_for(header.handle, start_ns, tensors)
        header.compared = True
        declared = bytes(header.buffer.cpu().tolist()).rstrip(b"\0")
        if declared != _encode(header.expected):
            raise CommunicationError(
                f"{self}: global rank {self.peer} sends ({declared.decode()}), "
                f"global rank {self.group.global_rank} expects ({header.expected})"
            )

    def trace(self, kind: str, start_ns: int) -> None:
        if self.group.tracer is not None:
            self.group.tracer.event(f"boundary {self.boundary} {self.kind}{self._suffix}", kind, start_ns)

    def connection_round(self) -> int:
        """Return the round of `connect`: the pairs of ranks of a round are disjoint, so that they connect in parallel.

        0 for the neighbours (0, 1), (2, 3), ...; 1 for (1, 2), (3, 4), ...; an odd ring closes in round 2.
        """
        group = self.group
        first, second = sorted((group.rank, group.ranks.index(self.peer)))
        return first % 2 if second == first + 1 else 1 + group.size % 2

    def connect(self) -> None:
        """Exchange one element, by which NCCL creates the connection."""
        token = torch.zeros(1, device=self.device)
        self.wait_for(self._post(token, self._tag("")), perf_counter_ns(), (token,))

    def _declare(self, messages: tuple[MessageSpec, ...]) -> tuple[_Declaration, bool]:
        """Return the declaration of messages other than the last one's, and whether it is their first."""
        is_new = messages not in self._declarations
        if is_new:
            text = ", ".join(map(str, messages))
            self._declarations[messages] = _Declaration(messages, text, self._tag(text))
        self._declaration = self._declarations[messages]
        return self._declaration, is_new

    def _tag(self, text: str, header: bool = False) -> int:
        """Return the tag for a declaration, with running number 0."""
        fingerprint = zlib.crc32(text.encode()) & (1 << FINGERPRINT_BITS) - 1
        return ((self.index << FINGERPRINT_BITS | fingerprint) << HEADER_BITS | header) << NUMBER_BITS

    def _post(self, tensor: Tensor, tag: int) -> Any:
        """Start the transfer of one tensor; both ends number their tensors alike. NCCL ignores tags.

        The process group is called directly: dist.isend takes twice as long, to check what holds here by construction.
        """
        tag |= self._number & (1 << NUMBER_BITS) - 1  # wraps around
        self._number += 1
        operation = self.handle.send if self.sends else self.handle.recv
        try:
            if needs_host_copies(self.handle, tensor):
                writes = 0 if self.sends else 1
                return HostCopies([tensor], writes, lambda copy: operation([copy], self.handle_peer, tag))
            return operation([tensor], self.handle_peer, tag)
        except RuntimeError as error:
            raise self._error(error, perf_counter_ns(), (tensor,)) from error

    def _error(self, error: RuntimeError, start_ns: int, tensors: tuple[Tensor, ...]) -> CommunicationError:
        verb, preposition = ("sending", "to") if self.sends else ("receiving", "from")
        contents = ", ".join(str(MessageSpec.of(tensor)) for tensor in tensors)
        peer = f" {preposition} global rank {self.peer}"
        return communication_error(self.group, f"{verb} {self} ({contents})", error, start_ns, peer)

    def _wrong_end(self, operation: str) -> ScheduleError:
        own = f"global rank {self.group.global_rank}"
        return ScheduleError(f"{own} cannot {operation} {self}: it is the other end of that channel")


class Channels(dict[ChannelKey, Channel]):
    """The channels that begin or end on this rank, by (boundary, kind, direction)."""

    @classmethod
    def build(
        cls,
        placement: Placement,
        pp: Group,
        device: torch.device | str = "cpu",
        max_in_flight: int | None = None,
    ) -> Channels:
        """Create the channels of this rank's pipeline `pp`; called by all ranks of the world (NCCL connects them here).

        Over NCCL the channels of a route share a communicator: at most 4 on a rank of a loop with any number of chunks,
        8 on one of a V or of DualPipe, which sends and receives both kinds at both neighbours.
        placement: which pp_rank holds which stage. A boundary inside one rank has no channel. max_in_flight: see
        Channel. Raises ScheduleError if the placement is for another number of ranks or has more boundaries
        than tags can number.
        """
        if placement.num_ranks != pp.size:
            wanted = f"the placement is for {placement.num_ranks} pipeline ranks"
            raise ScheduleError(f"{wanted}, the group {pp} has {pp.size}")
        most = (1 << CHANNEL_BITS) // (len(KINDS) * len(placement.directions))
        if placement.num_stages - 1 > most:
            raise ScheduleError(f"{placement.num_stages} stages: channels can number at most {most} boundaries")
        uses_nccl = backend_of(pp) == "nccl"
        handles: dict[Route, Any] = {}
        channels = cls()
        keys = product(range(placement.num_stages - 1), range(len(placement.directions)), KINDS)
        for index, (boundary, direction, kind) in enumerate(keys):
            route = ChannelPath(ValueKind(kind), boundary, direction).route(placement)
            sender, receiver, _ = route
            if sender == receiver:
                continue
            if route not in handles:
                if uses_nccl:
                    handles[route] = _communicator(pp, route)
                else:
                    handles[route] = pp.handle.another(str(route)) if isinstance(pp.handle, FakeHandle) else pp.handle
            if pp.rank not in (sender, receiver):
                continue
            peer = receiver if pp.rank == sender else sender
            channels[boundary, kind, direction] = Channel(
                boundary,
                kind,
                direction,
                index=index,
                route=route,
                sends=pp.rank == sender,
                group=pp,
                peer=pp.ranks[peer],
                handle=handles[route],
                handle_peer=int(peer > pp.rank) if uses_nccl else peer,
                device=torch.device(device),
                max_in_flight=max_in_flight,
            )
        if uses_nccl:
            channels.connect()
            torch.cuda.synchronize()
        return channels

    def connect(self) -> None:
        """Connect every route, in one order on all ranks: the first messages would do it in one that may deadlock.

        Pairs of ranks take turns in two rounds; in the order of the boundaries each would wait for the one before.
        """
        first_of_route: dict[Route, Channel] = {}
        for channel in self.values():
            first_of_route.setdefault(channel.route, channel)
        for channel in sorted(first_of_route.values(), key=Channel.connection_round):
            channel.connect()

    def drain(self) -> None:
        """Wait for all sends of all channels."""
        for channel in self.values():
            channel.drain()


def _communicator(pp: Group, route: Route) -> Any:
    """Create the communicator of a route in every pipeline of the world and return this pipeline's; called by all."""
    handles = {}
    for pipeline in pp.siblings:
        ends = tuple(sorted((pipeline[route.sender], pipeline[route.receiver])))
        handles[pipeline] = new_handle(ends, f"pp {route}", "nccl", pp.timeout_seconds, "pp", pp.nccl)
    return handles[pp.ranks]


def _encode(text: str) -> bytes:
    """Return the text in at most DECLARATION_BYTES bytes; a longer one is cut and ends in its checksum."""
    encoded = text.encode()
    if len(encoded) <= DECLARATION_BYTES:
        return encoded
    return encoded[: DECLARATION_BYTES - 12] + f"... {zlib.crc32(encoded):08x}".encode()
