"""Messages between pipeline ranks: one `Channel` for each stage boundary, kind and direction, first-in first-out.

Two peers order their sends and receives differently even in plain 1F1B, and with pp = 2 and chunks the previous and the next rank are
the same one: a single in-order connection a pair would hang or hand over the wrong tensor. So every (boundary, kind, direction) has its
own order. Direction 0 is the only one but for DualPipe, whose odd microbatches take the stages over the ranks in reverse, direction 1:

    gloo   a tag for each message: channel, fingerprint of shapes and dtypes, running number
    NCCL   a communicator of its own, two ranks and one direction (streams keep its order)

Both ends declare what a message holds. At the first message, and whenever the declaration changes, the sender's declaration travels ahead
and the receiver compares: different shapes raise instead of killing the receiver, as gloo does when a message is longer than its buffer.
If only one end changes its declaration, gloo's tags no longer match and the wait times out.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from time import perf_counter_ns
from typing import Any

import torch
from torch import Tensor

from megapipe.comm.failures import communication_error
from megapipe.comm.groups import Group, backend_of, new_handle
from megapipe.comm.host_copies import HostCopies, travels_through_host
from megapipe.errors import CommunicationError, ScheduleError
from megapipe.monitor.record import Wait
from megapipe.schedule.placement import Placement

KINDS = ("activation", "gradient")  # over boundary s: from stage s to s + 1; from stage s + 1 to s
Path = tuple[int, str, int]  # (boundary, kind, direction)

# gloo's 31 bits of tag, from the highest: channel, fingerprint, header or data, running number
CHANNEL_BITS, FINGERPRINT_BITS, HEADER_BITS, NUMBER_BITS = 11, 8, 1, 11
DECLARATION_BYTES = 256

Moment = tuple[
    int, int
]  # nanoseconds of this rank's clock: a send began (twice); or the wait for a message began and ended


@dataclass(frozen=True)
class MessageSpec:
    """One tensor of a message."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> MessageSpec:
        return cls(tuple(tensor.shape), tensor.dtype)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)}"


class PendingSend:
    """A message on its way; holds its tensors until it has arrived."""

    def __init__(self, channel: Channel, tensors: tuple[Tensor, ...], handles: list[Any], start_ns: int) -> None:
        self._channel = channel
        self._tensors = tensors
        self._handles = handles
        self._start_ns = start_ns

    def done(self) -> bool:
        """Whether the message is known to have arrived. gloo knows it only after `wait`; NCCL when the kernel has ended."""
        return all(handle.is_completed() for handle in self._handles)

    def wait(self) -> None:
        """Return when the receiver has the message (on a GPU: order the current stream after it). May be called again."""
        handles, self._handles = self._handles, []
        for handle in handles:
            self._channel.wait_for(handle, self._start_ns, self._tensors)
        if handles:
            self._channel.trace("send", self._start_ns)
        self._tensors = ()


class PendingReceive:
    """A posted receive."""

    def __init__(
        self, channel: Channel, tensors: tuple[Tensor, ...], handles: list[Any], headers: list[_Header], start_ns: int
    ) -> None:
        self._channel = channel
        self._tensors = tensors
        self._handles = handles
        self._headers = headers
        self._start_ns = start_ns

    def wait(self) -> tuple[Tensor, ...]:
        """The message, once it is there (on a GPU: the current stream is ordered after it). May be called again.

        Raises CommunicationError if the sender declared something else, is lost, or is silent for the group's time-out.
        """
        moments, mark = self._channel.moments, self._channel.mark
        began_ns = 0 if moments is None else mark()
        headers, self._headers = self._headers, []
        for header in headers:
            self._channel.compare(header, self._start_ns, self._tensors)
        handles, self._handles = self._handles, []
        for handle in handles:
            self._channel.wait_for(handle, self._start_ns, self._tensors)
        if handles:
            self._channel.trace("receive", self._start_ns)
            if moments is not None:
                moments.append((began_ns, mark()))
        return self._tensors


@dataclass(frozen=True)
class _Form:
    """What both ends declared last: every message is like the one before it, so this is worked out once."""

    messages: tuple[MessageSpec, ...]
    text: str
    tag: int  # of the channel and the declaration, without a number

    def fits(self, tensors: tuple[Tensor, ...]) -> bool:
        return len(tensors) == len(self.messages) and all(
            tensor.shape == message.shape and tensor.dtype is message.dtype
            for tensor, message in zip(tensors, self.messages, strict=True)
        )


@dataclass
class _Header:
    """The sender's declaration under way, and what is expected here."""

    buffer: Tensor  # [DECLARATION_BYTES], uint8
    expected: str
    handle: Any
    compared: bool = False


class Channel:
    """One path over one stage boundary, as seen from one of its two ranks.

    boundary s lies between stages s and s + 1; kind is 'activation' or 'gradient'; direction is 1 on the way of DualPipe's odd
    microbatches, else 0. index: of the path among those of the pipeline. sends: whether this rank is the sending end.
    max_in_flight: messages sent and not known to have arrived; at the limit `send` first waits for the oldest. None: the caller bounds
    them by waiting. Messages are matched in the order of `send` and `post_receive`.
    """

    def __init__(
        self,
        boundary: int,
        kind: str,
        direction: int = 0,
        *,
        index: int,
        sends: bool,
        group: Group,
        peer: int,
        handle: Any,
        handle_peer: int,
        device: torch.device,
        max_in_flight: int | None = None,
    ) -> None:
        self.boundary = boundary
        self.kind = kind
        self.direction = direction
        self.sends = sends
        self.peer = peer  # global rank
        self.device = device
        self.max_in_flight = max_in_flight
        self._group = group
        self._handle = handle
        self._handle_peer = handle_peer  # the peer's index in the handle's group
        self._index = index
        self._number = 0
        self._form: _Form | None = None
        self._headers: list[_Header] = []  # not yet compared
        self._in_flight: deque[PendingSend] = deque()
        self._word = str(self).encode()
        self.moments: list[Moment] | None = None  # of this rank's messages, where somebody wants to know them
        self.mark: Callable[[], int] = (
            perf_counter_ns  # the clock of moments; pipeline.device_clock.EventClock's on a GPU
        )

    def __str__(self) -> str:
        route = (self.boundary, self.boundary + 1) if self.kind == "activation" else (self.boundary + 1, self.boundary)
        return f"{self.kind} from stage {route[0]} to {route[1]}{self._direction_text}"

    def send(self, tensors: tuple[Tensor, ...]) -> PendingSend:
        """Start to send one message; returns at once. The tensors must not be changed before the send is complete."""
        self._check_end("send", sends=True)
        if any(not isinstance(tensor, Tensor) for tensor in tensors):
            raise ValueError(
                f"{self}: a message holds tensors, got {tuple(type(tensor).__name__ for tensor in tensors)}"
            )
        while self._in_flight and (self._in_flight[0].done() or len(self._in_flight) == self.max_in_flight):
            self._in_flight.popleft().wait()
        start_ns = perf_counter_ns()
        if self.moments is not None:
            begun = self.mark()
            self.moments.append((begun, begun))
        tensors = tuple(tensor.detach().contiguous() for tensor in tensors)
        form, handles, kept = self._form, [], tensors
        if form is None or not form.fits(tensors):
            form = self._declare(tuple(MessageSpec.of(tensor) for tensor in tensors))
            header = _encode(form.text).to(self.device)
            handles.append(self._post(header, self._tag("", header=True)))
            kept = (*tensors, header)
        handles += [self._post(tensor, form.tag) for tensor in tensors]
        pending = PendingSend(self, kept, handles, start_ns)
        self._in_flight.append(pending)
        return pending

    def post_receive(self, messages: tuple[MessageSpec, ...]) -> PendingReceive:
        """Start to receive one message into new tensors. On a GPU it occupies the device until the peer sends."""
        self._check_end("post_receive", sends=False)
        start_ns = perf_counter_ns()
        form = self._form
        if self._headers:
            self._headers = [header for header in self._headers if not header.compared]
        if form is None or form.messages != messages:
            form = self._declare(messages)
            buffer = torch.zeros(DECLARATION_BYTES, dtype=torch.uint8, device=self.device)
            self._headers.append(_Header(buffer, form.text, self._post(buffer, self._tag("", header=True))))
        tensors = tuple(torch.empty(message.shape, dtype=message.dtype, device=self.device) for message in messages)
        handles = [self._post(tensor, form.tag) for tensor in tensors]
        return PendingReceive(self, tensors, handles, list(self._headers), start_ns)

    def drain(self) -> None:
        """Wait for all sends."""
        while self._in_flight:
            self._in_flight.popleft().wait()

    def wait_for(self, handle: Any, start_ns: int, tensors: tuple[Tensor, ...]) -> None:
        """Wait once for one of torch's handles, a failure told as CommunicationError."""
        heartbeat = self._group.heartbeat
        if heartbeat is not None:
            heartbeat.wait_for_peer(Wait.SEND if self.sends else Wait.RECEIVE, self._word, self.peer)
        try:
            handle.wait()
        except RuntimeError as error:
            raise self._failed(error, start_ns, tensors) from error
        if heartbeat is not None:
            heartbeat.goes_on()

    def compare(self, header: _Header, start_ns: int, tensors: tuple[Tensor, ...]) -> None:
        """Raise CommunicationError unless the sender declared what is expected here. Once a header, by whichever message waits first."""
        if header.compared:
            return
        self.wait_for(header.handle, start_ns, tensors)
        header.compared = True
        if header.buffer.is_meta:  # the fake backend transfers no declaration
            return
        declared = bytes(header.buffer.cpu().tolist()).rstrip(b"\0").decode()
        if declared != _encode_text(header.expected).decode():
            raise CommunicationError(
                f"{self}: global rank {self.peer} sends ({declared}), global rank {self._group.global_rank} expects ({header.expected})"
            )

    def trace(self, kind: str, start_ns: int) -> None:
        if self._group.tracer is not None:
            self._group.tracer.event(f"boundary {self.boundary} {self.kind}{self._direction_text}", kind, start_ns)

    @property
    def _direction_text(self) -> str:
        return f", direction {self.direction}" if self.direction else ""

    def _declare(self, messages: tuple[MessageSpec, ...]) -> _Form:
        text = _declaration(messages)
        self._form = form = _Form(messages, text, self._tag(text))
        return form

    def _post(self, tensor: Tensor, tag: int) -> Any:
        """Start one tensor's way; the peer and this rank count alike. NCCL ignores tags.

        The group is asked itself: what dist.isend does before that costs as much again and checks what holds here by construction.
        """
        tag |= self._number & (1 << NUMBER_BITS) - 1
        self._number += 1
        operation = self._handle.send if self.sends else self._handle.recv
        try:
            if travels_through_host(self._handle, tensor):
                return HostCopies(
                    [tensor], 0 if self.sends else 1, lambda copy: operation([copy], self._handle_peer, tag)
                )
            return operation([tensor], self._handle_peer, tag)
        except RuntimeError as error:
            raise self._failed(error, perf_counter_ns(), (tensor,)) from error

    def _tag(self, text: str, header: bool = False) -> int:
        """The part of a tag that its messages have in common."""
        tag = self._index << FINGERPRINT_BITS | zlib.crc32(text.encode()) & (1 << FINGERPRINT_BITS) - 1
        return (tag << HEADER_BITS | header) << NUMBER_BITS

    def _failed(self, error: Exception, start_ns: int, tensors: tuple[Tensor, ...]) -> CommunicationError:
        verb = "sending" if self.sends else "receiving"
        what = f"{verb} {self} ({_declaration(tuple(MessageSpec.of(tensor) for tensor in tensors))})"
        end = "to" if self.sends else "from"
        who = f"global rank {self._group.global_rank} {end} global rank {self.peer} in group {self._group}"
        return communication_error(what, who, error, (perf_counter_ns() - start_ns) / 1e9, self._group.timeout_seconds)

    def _check_end(self, operation: str, sends: bool) -> None:
        if self.sends != sends:
            raise ScheduleError(
                f"global rank {self._group.global_rank} cannot {operation} {self}: it is the other end of that channel"
            )


class Channels(Mapping[Path, Channel]):
    """The channels that begin or end on this rank, by (boundary, kind, direction)."""

    def __init__(self, channels: dict[Path, Channel]) -> None:
        self._channels = channels

    @classmethod
    def build(
        cls, placement: Placement, pp: Group, device: torch.device | str = "cpu", max_in_flight: int | None = None
    ) -> Channels:
        """The channels of this rank's pipeline; called by all ranks of the world at one time (NCCL makes communicators here).

        placement: which pp_rank holds which stage. pp: this rank's pipeline. A boundary inside one rank has no channel. For
        max_in_flight see Channel. Raises ScheduleError if the placement is for another number of ranks or has more paths than tags.
        """
        if placement.num_ranks != pp.size:
            raise ScheduleError(
                f"the placement is for {placement.num_ranks} pipeline ranks, the group {pp} has {pp.size}"
            )
        most = (1 << CHANNEL_BITS) // (len(KINDS) * len(placement.directions))
        if placement.num_stages - 1 > most:
            raise ScheduleError(f"{placement.num_stages} stages: channels count at most {most} boundaries")
        device = torch.device(device)
        own_communicators = backend_of(pp) == "nccl"
        channels: dict[Path, Channel] = {}
        for index, path, sender, receiver in _routes(placement):
            handle = _communicator(pp, path, sender, receiver) if own_communicators else pp.handle
            if pp.rank not in (sender, receiver):
                continue
            peer = receiver if pp.rank == sender else sender
            channels[path] = Channel(
                *path,
                index=index,
                sends=pp.rank == sender,
                group=pp,
                peer=pp.ranks[peer],
                handle=handle,
                handle_peer=int(peer > pp.rank) if own_communicators else peer,
                device=device,
                max_in_flight=max_in_flight,
            )
        built = cls(channels)
        if own_communicators:
            built._connect()
        return built

    def drain(self) -> None:
        """Wait for all sends of all channels."""
        for channel in self._channels.values():
            channel.drain()

    def _connect(self) -> None:
        """Make NCCL's connections in one order on all ranks: left to the first messages they block, in an order that may circle."""
        for channel in self._channels.values():
            token = torch.zeros(1, device=channel.device)
            channel.wait_for(channel._post(token, channel._tag("")), perf_counter_ns(), (token,))
        torch.cuda.synchronize()

    def __getitem__(self, key: Path) -> Channel:
        return self._channels[key]

    def __iter__(self) -> Iterator[Path]:
        return iter(self._channels)

    def __len__(self) -> int:
        return len(self._channels)


def _routes(placement: Placement) -> Iterator[tuple[int, Path, int, int]]:
    """(index, path, sending pp_rank, receiving pp_rank) of every hop between ranks, in the one order of all ranks."""
    paths = product(range(placement.num_stages - 1), enumerate(placement.directions), KINDS)
    for index, (boundary, (direction, rank_of_stage), kind) in enumerate(paths):
        ends = rank_of_stage[boundary], rank_of_stage[boundary + 1]
        if ends[0] != ends[1]:
            sender, receiver = ends if kind == "activation" else ends[::-1]
            yield index, (boundary, kind, direction), sender, receiver


def _communicator(pp: Group, path: Path, sender: int, receiver: int) -> Any:
    """One communicator of two ranks, ascending, in every pipeline of the world; returns that of this rank's pipeline."""
    mine = None
    for pipeline in pp.siblings:
        ranks = (pipeline[min(sender, receiver)], pipeline[max(sender, receiver)])
        handle = new_handle(ranks, "pp channel {} {} {}".format(*path), "nccl", pp.timeout_seconds, "pp", pp.nccl)
        if pipeline == pp.ranks:
            mine = handle
    return mine


def _declaration(messages: tuple[MessageSpec, ...]) -> str:
    return ", ".join(map(str, messages))


def _encode_text(text: str) -> bytes:
    encoded = text.encode()
    if len(encoded) <= DECLARATION_BYTES:
        return encoded
    return encoded[: DECLARATION_BYTES - 12] + f"... {zlib.crc32(encoded):08x}".encode()


def _encode(text: str) -> Tensor:
    return torch.tensor(list(_encode_text(text).ljust(DECLARATION_BYTES, b"\0")), dtype=torch.uint8)
