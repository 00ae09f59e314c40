"""A simulation of CUDA's hardware work queues and of the SMs that NCCL kernels hold, driven by the rows of a schedule.

A process has CUDA_DEVICE_MAX_CONNECTIONS hardware work queues (8 if unset), and every stream is mapped to one of them.
A queue is strictly in order: if its head cannot start, because its stream is busy or waits for an event, nothing behind
it starts, even on other streams. A receive that is behind such a head is not posted, and its sender may be what the
head waits for: the run hangs. With too few queues streams also wait where they could overlap (`slowdown`).

`enqueue` writes down what the engine enqueues on every rank, `QueueRun` executes it, and `waiting_receives` counts
the receives that hold SMs: NCCL's blocks do not share one with other kernels. Simulated, not measured: how a driver
maps streams to queues is not documented, so two mappings are tried.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import NamedTuple

from megapipe.errors import ScheduleError
from megapipe.schedule.action import BACKWARD_OPS, COMPLETES_OPS, COMPUTE_OPS, RECV_OPS, SEND_OPS, Action, Op
from megapipe.schedule.dependencies import NEEDS, TRAVELS, ChannelPath, Route, ValueKind, channel_of
from megapipe.schedule.lifetimes import NO_MOVES, Moves, Unit
from megapipe.schedule.lower import without_pairs
from megapipe.schedule.parts import Part, Parts
from megapipe.schedule.schedule import Row, Schedule, gc_paused

DEFAULT_CONNECTIONS = 8  # CUDA's, if CUDA_DEVICE_MAX_CONNECTIONS is unset
MOST_CONNECTIONS = 32
POOL_STREAMS, POOL_PRIORITIES = 32, 4  # torch's pool: so many streams of each priority; communicators take them in turn
HIGH = POOL_PRIORITIES - 1  # pool of NCCL's streams with is_high_priority_stream
# names of streams; those of messages are routes, of DualPipe's stages ints
CURRENT, TP, DP, TO_HOST, TO_DEVICE = "current", "tp", "dp", "to host", "to device"
CP, EP, COUNTS, GATHER, DELIVERY = "cp", "ep", "ep counts", "gather", "delivery"
COLLECTIVES = (TP, DP, CP, EP, GATHER, DELIVERY, "to ")  # beginnings of names of streams that do not compute
SECONDS = {Op.F: 1.0, Op.B: 2.0, Op.I: 1.0, Op.W: 1.0, Op.UPDATE: 0.0}  # of computations, F = 1
# stream -> hardware queue: in the order in which this job first uses its streams, or in the order in which torch
# creates its pool, where the priorities alternate
BY_USE, BY_POOL = "use", "pool"
MAPPINGS = (BY_USE, BY_POOL)

Stream = str | int | Route


class Enqueued(NamedTuple):
    """One entry of a stream: a kernel, or with `after` the wait for an event."""

    stream: Stream
    name: str  # for messages: 2F0, 2RECV_F0, tp
    after: int | None = None  # index of the entry of this rank after which the awaited event was recorded
    seconds: float = 0.0
    message: tuple[ChannelPath, int] | None = None  # a send or receive: channel, number on it
    is_receive: bool = False
    host: int | None = None  # index of the entry after which the host enqueues this one


@dataclass
class Program:
    """The entries that one rank enqueues in a step, in order."""

    works: list[Enqueued] = field(default_factory=list)
    host: int | None = None  # index of the last entry that the host has waited for
    last: dict[Stream, int] = field(default_factory=dict)  # stream -> index of its latest entry
    idle: frozenset[Stream] = frozenset()  # streams of the process that this step does not use

    @property
    def streams(self) -> list[Stream]:
        """The streams of the process, in the order in which it creates them."""
        return sorted({work.stream for work in self.works} | self.idle, key=_creation_order)

    def add(self, work: Enqueued) -> int:
        """Enqueue an entry and return its index."""
        self.works.append(work._replace(host=self.host))
        self.last[work.stream] = len(self.works) - 1
        return len(self.works) - 1

    def wait(self, stream: Stream, index: int | None, name: str) -> None:
        """Make a stream wait for an entry (cudaStreamWaitEvent). index: None to return at once."""
        if index is not None:
            self.add(Enqueued(stream, name, after=index))

    def communicate(self, work: Enqueued, waiting: Stream = CURRENT) -> int:
        """Enqueue an NCCL kernel that waits for what `waiting` holds so far, as torch does, and return its index."""
        self.wait(work.stream, self.last.get(waiting), work.name)
        return self.add(work)


@dataclass(frozen=True)
class RankTraffic:
    """The communication of a step besides the messages of the schedule, and the limits of both."""

    tp_collectives: int = 0  # of each forward and each (half) backward; 0: tp is 1
    # REDUCE_GRAD starts collectives over the replicas; of whole gradients the backward before it does, bucket by bucket
    dp: bool = False
    send_depth: int | None = None  # with so many sends in flight the stream waits for the oldest; None: never
    message_seconds: float = 0.0  # of a message, a forward takes 1
    collective_seconds: float = 0.0  # of a collective, or a message of a ring
    # --cuda-graph-impl: a computation with its collectives is one entry of its stream, the launch of a graph
    graphs: bool = False
    moves: tuple[Moves, ...] = ()  # of each pp_rank: activations that are copied to the host and back
    copy_seconds: float = 0.0  # of one of these copies
    cp_messages: int = 0  # those of a ring; while one travels, the part before it is computed
    ep_collectives: int = 0  # all-to-alls of experts, where these are no parts
    host_waits: bool = False  # a forward first exchanges the numbers of rows for each expert, and the host reads them
    parts: Parts | None = None  # of a schedule of parts, whose all-to-alls run beside the row
    sharded: bool = False  # weights and gradients: UNSHARD starts a gather, one reduction is in flight at a time
    buckets: int = 1  # collectives of each gather and reduction


@gc_paused()
def enqueue(schedule: Schedule, traffic: RankTraffic = RankTraffic()) -> tuple[Program, ...]:
    """Return what each pp_rank enqueues in one step of a lowered schedule.

    Ranks of one tp or dp group enqueue the same, so only one of them is simulated: a cycle of waits over several of
    them would also be a cycle in their common program. A forward-only schedule gives the step of an evaluation, whose
    process also has the streams of training: `beside` adds them. Not included: the declarations of the first messages.
    """
    streams = Op.OVERLAP in schedule.ops
    return tuple(
        _RankProgram(schedule, pp_rank, traffic, streams).program_of(row if streams else without_pairs(row))
        for pp_rank, row in enumerate(schedule.rows)
    )


def beside(programs: tuple[Program, ...], others: tuple[Program, ...]) -> tuple[Program, ...]:
    """Return programs whose processes also have the streams of `others`, the programs of another step of the run."""
    return tuple(
        replace(program, idle=frozenset(other.streams)) for program, other in zip(programs, others, strict=True)
    )


class _RankProgram:
    """The engine on one rank, as far as streams see it (`pipeline.engine`, `comm.channels`, `gpu.streams`)."""

    def __init__(self, schedule: Schedule, pp_rank: int, traffic: RankTraffic, stage_streams: bool) -> None:
        self.placement, self.pp_rank, self.traffic = schedule.placement, pp_rank, traffic
        self.num_directions = len(self.placement.directions)
        self.stages = self.placement.stages_of(pp_rank) if stage_streams else ()
        self.program = Program()
        self.in_flight: defaultdict[ChannelPath, deque[int]] = defaultdict(deque)
        self.numbers: defaultdict[ChannelPath, int] = defaultdict(int)
        self.received: dict[Action, int] = {}
        self.halves_left = 0
        self.gathers: dict[int, int] = {}  # of stages whose weights no computation has waited for
        self.reducing: int | None = None  # stage whose gradients are being reduced
        self.completing: set[Action] = set()  # the last weight gradients of each stage
        self.exchanges: dict[Action, int] = {}  # all-to-alls in flight: (part, F or B, microbatch)
        self.copies = _OffloadCopies(self.program, traffic, traffic.moves[pp_rank] if traffic.moves else NO_MOVES)

    def program_of(self, row: Row) -> Program:
        program, parts = self.program, self.traffic.parts
        self.completing = {
            next(last for last in reversed(row[:slot]) if last.stage == action.stage and last.op in COMPLETES_OPS)
            for slot, action in enumerate(row)
            if action.op is Op.REDUCE_GRAD and self.traffic.dp and not self.traffic.sharded and parts is None
        }
        stage_row = row if parts is None else parts.stage_row(row)
        for slot, (action, of_stage) in enumerate(zip(row, stage_row, strict=True)):
            if action.op in COMPUTE_OPS:
                self.use(of_stage, CURRENT)
                self.compute(action)
            elif action.op in RECV_OPS or action.op in SEND_OPS:
                self.message(action)
            elif action.op is Op.OVERLAP:
                for half in row[slot + 1 : slot + 3]:
                    self.use(half, CURRENT)
                self.fork()
                self.halves_left = 2
            elif of_stage.op is not Op.OVERLAP:
                self.share(of_stage)
        sends = [send for of_channel in self.in_flight.values() for send in of_channel]
        for index in (program.last.get(DELIVERY), *sends, program.last.get(DP)):
            program.wait(CURRENT, index, "end of the row")
        return program

    def share(self, action: Action) -> None:
        """Start a gather of weights or a reduction of gradients over the replicas (`data_parallel.stores`)."""
        program, seconds, name = self.program, self.traffic.collective_seconds, str(action)
        if action.op is Op.UNSHARD:
            for _ in range(self.traffic.buckets):
                self.gathers[action.stage] = program.communicate(Enqueued(GATHER, name, seconds=seconds))
        elif action.op is not Op.RESHARD and self.traffic.dp:
            if self.traffic.sharded:
                program.wait(CURRENT, program.last.get(DP), name)
                self.reducing = action.stage
            for _ in range(self.traffic.buckets if self.traffic.sharded else 1):
                program.communicate(Enqueued(DP, name, seconds=seconds))
            if action.op is Op.UPDATE:
                program.wait(CURRENT, program.last[DP], name)

    def use(self, action: Action, stream: Stream) -> None:
        """Wait for the weights of a computation, and for a reduction that still reads the gradients it adds to."""
        self.program.wait(stream, self.gathers.pop(action.stage, None), str(action))
        if action.op in BACKWARD_OPS and action.stage == self.reducing:
            self.program.wait(stream, self.program.last[DP], str(action))
            self.reducing = None

    def message(self, action: Action) -> None:
        """Post a send or a receive: its kernel starts once what the current stream holds is done. A result that an
        all-to-all brings is sent from the stream of deliveries, which waits for it.
        """
        channel, program, name = channel_of(action, self.num_directions), self.program, str(action)
        is_send, stream = action.op in SEND_OPS, CURRENT
        sends = self.in_flight[channel] if is_send else deque()
        made = Action(action.stage, Op.F if action.op is Op.SEND_F else Op.B, action.microbatch)
        if is_send and made in self.exchanges:
            stream = DELIVERY
            program.wait(stream, program.last.get(CURRENT), name)
            program.wait(stream, self.exchanges.pop(made), name)
        if is_send and len(sends) == self.traffic.send_depth:
            program.wait(stream, sends.popleft(), name)
        seconds, message = self.traffic.message_seconds, (channel, self.numbers[channel])
        self.numbers[channel] += 1
        route = channel.route(self.placement)
        index = program.communicate(Enqueued(route, name, None, seconds, message, not is_send), stream)
        if is_send:
            sends.append(index)
        else:
            self.received[action] = index

    def compute(self, action: Action) -> None:
        """Run F, B, I or W, after the message that it needs; in the stage's own stream if pairs overlap (DualPipe)."""
        stage, op, microbatch = action
        program, stream, name = self.program, CURRENT if not self.stages else stage, str(action)
        if self.stages and self.halves_left == 0:
            self.fork()
        for kind, offset in NEEDS[op]:
            if kind in TRAVELS:
                receive = Action(stage, TRAVELS[kind][1], microbatch)
                if TRAVELS[kind][2] == -offset and receive in self.received:
                    program.wait(stream, self.received.pop(receive), name)
                maker = Action(stage + offset, Op.F if kind is ValueKind.ACT else Op.B, microbatch)
                program.wait(stream, self.exchanges.pop(maker, None) if offset else None, name)
        parts, moments = self.traffic.parts, self.copies.moments_of(action)
        if parts is not None and stage in parts.network:
            self.exchange(action, parts.sites[stage].part)
            return
        if not moments:
            self.work(stream, action, SECONDS[op])
        for moment in moments:
            self.copies.begin(moment, stream)
            self.work(stream, action, SECONDS[op] / len(moments))
            self.copies.end(moment, stream)
        self.halves_left = max(0, self.halves_left - 1)
        if self.stages and self.halves_left == 0:
            for other in self.stages:
                program.wait(CURRENT, program.last.get(other), "join")

    def work(self, stream: Stream, action: Action, seconds: float) -> None:
        """Run kernels for so long, with the collectives of layers between them, and the first reductions."""
        program, traffic, kinds = self.program, self.traffic, list[str]()
        stage, op, name = action.stage, action.op, str(action)
        if op is not Op.W and not traffic.graphs:
            counts = ((TP, traffic.tp_collectives), (CP, traffic.cp_messages), (EP, traffic.ep_collectives))
            kinds = [kind for kind, count in counts for _ in range(count)]
            if op is Op.F and traffic.host_waits and traffic.ep_collectives:
                kinds.insert(kinds.index(EP), COUNTS)
        if action in self.completing and not traffic.graphs:
            kinds += [DP] * (traffic.buckets - 1)
        share = seconds / (len(kinds) + 1)
        program.add(Enqueued(stream, name, seconds=share))
        for kind in kinds:
            group: str = EP if kind == COUNTS else kind
            if self.stages and kind != DP:
                group = f"{group} {stage}"  # the halves of a pair have a communicator each
            brought = program.communicate(Enqueued(group, name, seconds=traffic.collective_seconds), stream)
            if kind not in (CP, DP):
                program.wait(stream, brought, name)
            if kind == COUNTS:
                program.host = program.last[stream]
            program.add(Enqueued(stream, name, seconds=share))
            if kind == CP:
                program.wait(stream, brought, name)

    def exchange(self, action: Action, part: Part) -> None:
        """Start an all-to-all that is a part, and first that of the numbers of rows, which has its own communicator."""
        program, name, seconds = self.program, str(action), self.traffic.collective_seconds
        if self.traffic.host_waits and action.op is Op.F and part is Part.DISPATCH:
            counted = program.communicate(Enqueued(COUNTS, name))
            program.wait(CURRENT, counted, name)
            program.host = program.last[CURRENT]
        self.exchanges[action] = program.communicate(Enqueued(EP, name, seconds=seconds))

    def fork(self) -> None:
        for stage in self.stages:
            self.program.wait(stage, self.program.last.get(CURRENT), "fork")


class _OffloadCopies:
    """Offloading on one rank, as far as streams see it (`pipeline.offload`, `gpu.streams.StreamCopies`).

    A moment is an index of `Moves.moments`.
    """

    def __init__(self, program: Program, traffic: RankTraffic, moves: Moves) -> None:
        self.program, self.moves, self.seconds = program, moves, traffic.copy_seconds
        self.next = 0
        self.written: dict[Unit, tuple[Stream, int]] = {}  # the stream of the forward, the copy to the host
        self.arrived: dict[Unit, int] = {}  # the copy back
        self.buffers: list[int | None] = []  # free ones, with the last copy out of each

    def moments_of(self, action: Action) -> range:
        """Return the moments of a computation, in order; none without offloading."""
        first, moments = self.next, self.moves.moments
        while self.next < len(moments) and moments[self.next][:3] == action:
            self.next += 1
        return range(first, self.next)

    def begin(self, index: int, stream: Stream) -> None:
        """Wait for copies, and start those back to the device, before a moment computes."""
        program, moment = self.program, self.moves.moments[index]
        for unit in self.moves.released.get(index, ()):
            made_on, copy = self.written[unit]
            program.wait(made_on, copy, f"release of {unit.stage}F{unit.microbatch}")
        for unit in self.moves.loaded.get(index, ()):
            made_on, _ = self.written.pop(unit)
            name = f"copy back of {unit.stage}F{unit.microbatch}"
            program.wait(TO_DEVICE, program.last.get(made_on), name)
            self.arrived[unit] = program.add(Enqueued(TO_DEVICE, name, seconds=self.seconds))
            self.buffers.append(self.arrived[unit])
        own = Unit(moment.stage, moment.microbatch, moment.group)
        program.wait(stream, self.arrived.pop(own, None), str(Action(*moment[:3])))

    def end(self, index: int, stream: Stream) -> None:
        """Start the copy to the host after the forward of a group that leaves the device."""
        program, moment = self.program, self.moves.moments[index]
        unit = Unit(moment.stage, moment.microbatch, moment.group)
        if moment.op is not Op.F or unit not in self.moves.moved:
            return
        name = f"copy of {moment.stage}F{moment.microbatch}"
        program.wait(TO_HOST, program.last.get(stream), name)
        program.wait(TO_HOST, self.buffers.pop() if self.buffers else None, name)
        self.written[unit] = stream, program.add(Enqueued(TO_HOST, name, seconds=self.seconds))


def queue_map(
    streams: Iterable[Stream], connections: int | None, mapping: str, high_priority: Sequence[str]
) -> dict[Stream, tuple[int, int]]:
    """Return stream -> (number of the CUDA stream, hardware queue). connections: None for a queue of each stream.

    torch hands out the POOL_STREAMS streams of a priority in turn, so more communicators than that share streams.
    """
    taken: dict[int | None, int] = defaultdict(int)
    numbers: dict[Stream, int] = {}
    for stream in streams:
        kind = "pp" if isinstance(stream, Route) else str(stream).split()[0]
        pool = None if stream == CURRENT else HIGH if kind in high_priority else 0  # None: the default stream
        index = taken[pool] % POOL_STREAMS
        taken[pool] += 1
        numbers[stream] = 0 if pool is None else 1 + index * POOL_PRIORITIES + pool
    in_order = enumerate(dict.fromkeys(numbers.values()))
    ranks = {number: rank if mapping == BY_USE else number for rank, number in in_order}
    return {
        stream: (number, ranks[number] if connections is None else ranks[number] % connections)
        for stream, number in numbers.items()
    }


class QueueRun:
    """The programs of all ranks, executed on hardware queues.

    An entry starts when the one before it in its queue has started, the one before it in its stream has ended, and the
    event it waits for has happened. A kernel then ends after its seconds, both ends of a message after both have
    started (no send completes without its receive). Entries only wait for others, so the order in which they are tried
    changes nothing: if this run does not hang, none does, however long kernels and messages take.

    starts, ends: [rank][entry], -1 where an entry never started or ended. blocked: of each queue that is stuck, its
    head and what that waits for; empty if all ended.
    """

    @gc_paused()
    def __init__(
        self,
        programs: tuple[Program, ...],
        connections: int | None,
        mapping: str = BY_USE,
        high_priority: Sequence[str] = ("pp", "tp"),
    ) -> None:
        self.programs = programs
        self.starts = [[-1.0] * len(program.works) for program in programs]
        self.ends = [[-1.0] * len(program.works) for program in programs]
        self.awaited: list[list[list[int]]] = []  # entries whose ends each waits for: in its stream, events, the host's
        self.queues: list[list[list[int]]] = []  # [rank][queue] -> entries
        for program in programs:
            queue_of = queue_map(program.streams, connections, mapping, high_priority)
            last: dict[int, int] = {}
            entries: defaultdict[int, list[int]] = defaultdict(list)
            awaited: list[list[int]] = []
            for index, work in enumerate(program.works):
                number, queue = queue_of[work.stream]
                others = (last.get(number), work.after, work.host)
                awaited.append([other for other in others if other is not None])
                last[number] = index
                entries[queue].append(index)
            self.awaited.append(awaited)
            self.queues.append(list(entries.values()))
        self.heads = [[0] * len(queues) for queues in self.queues]
        self.ready = [(rank, queue) for rank, queues in enumerate(self.queues) for queue in range(len(queues))]
        self.waiting: defaultdict[tuple[int, int], list[int]] = defaultdict(list)  # (rank, entry) -> queues of the rank
        self.half: dict[tuple[ChannelPath, int], tuple[int, int]] = {}  # a message's first end: (rank, entry)
        while self.ready:
            self.advance(*self.ready.pop())
        self.blocked = tuple(self.stuck())

    def blocker(self, rank: int, index: int) -> int | None:
        """Return the entry whose end an entry waits for; None if it can start."""
        return next((other for other in self.awaited[rank][index] if self.ends[rank][other] < 0), None)

    def advance(self, rank: int, queue: int) -> None:
        """Start entries of a queue up to the first that cannot start."""
        entries, works = self.queues[rank][queue], self.programs[rank].works
        starts, ends = self.starts[rank], self.ends[rank]
        head = self.heads[rank][queue]
        clock = starts[entries[head - 1]] if head else 0.0
        while head < len(entries):
            index = entries[head]
            blocker = self.blocker(rank, index)
            if blocker is not None:
                self.waiting[rank, blocker].append(queue)
                break
            work = works[index]
            starts[index] = clock = max([clock, *(ends[other] for other in self.awaited[rank][index])])
            head += 1
            if work.message is None:
                self.end(rank, index, clock + work.seconds)
            elif work.message in self.half:
                peer, posted = self.half.pop(work.message)
                end = max(clock, self.starts[peer][posted]) + work.seconds
                self.end(rank, index, end)
                self.end(peer, posted, end)
            else:
                self.half[work.message] = rank, index
        self.heads[rank][queue] = head

    def end(self, rank: int, index: int, time: float) -> None:
        self.ends[rank][index] = time
        self.ready += [(rank, queue) for queue in self.waiting.pop((rank, index), ())]

    def stuck(self) -> Iterable[str]:
        """Yield a line for each queue that did not reach its end."""
        for rank, queues in enumerate(self.queues):
            works = self.programs[rank].works
            for entries, head in zip(queues, self.heads[rank], strict=True):
                if head < len(entries):
                    other = self.blocker(rank, entries[head])
                    assert other is not None
                    behind = len(entries) - head - 1
                    name, awaited = works[entries[head]].name, works[other].name
                    yield f"rank {rank}: {name} waits for {awaited}, with {behind} entries behind it in its queue"


def _creation_order(stream: Stream) -> tuple[int, str]:
    """Return the key by which a rank's streams are created: the routes are connected before the first step.

    Those of one pair of ranks follow each other, as in `comm.channels`: down the ranks through the model, then up.
    """
    if isinstance(stream, Route):
        first, second = sorted(stream[:2])
        goes_up = (stream.sender == first) != (stream.kind is ValueKind.ACT)
        return 1, f"{first % 2 if second == first + 1 else 2} {int(goes_up)} {stream.kind.value}"
    return (0 if stream == CURRENT else 2), str(stream)


def why_it_hangs(
    programs: tuple[Program, ...],
    connections: int,
    high_priority: Sequence[str] = ("pp", "tp"),
    mappings: Sequence[str] = MAPPINGS,
) -> str:
    """Return what waits for what if a step can hang with so many connections under any of the mappings, else ''."""
    for mapping in mappings:
        run = QueueRun(programs, connections, mapping, high_priority)
        if run.blocked:
            return run.blocked[0]
    return ""


def slowdown(programs: tuple[Program, ...], connections: int, high_priority: Sequence[str] = ("pp", "tp")) -> float:
    """Return how many times as long a step takes as with a queue for every stream, streams numbered by their use."""
    ends = [QueueRun(programs, each, BY_USE, high_priority).ends for each in (connections, None)]
    few, enough = (max((max(of_rank, default=0.0) for of_rank in each), default=0.0) for each in ends)
    return few / enough if enough else 1.0


class HeldReceives(NamedTuple):
    """Receives of one rank that wait for their sender. Each holds as many SMs as its communicator has channels."""

    mean: float  # while the rank computes
    peak: int
    # the most kernels of messages, sends included, that can wait at once, however long kernels and messages take
    bound: int


def waiting_receives(schedule: Schedule, traffic: RankTraffic = RankTraffic()) -> tuple[HeldReceives, ...]:
    """Return for each pp_rank how many receives wait in a step of a lowered schedule that no queue delays."""
    run = QueueRun(enqueue(schedule, traffic), None)
    if run.blocked:
        raise ScheduleError(f"schedule {schedule} hangs even with a queue for every stream: {run.blocked[0]}")
    held = []
    for program, starts, ends in zip(run.programs, run.starts, run.ends, strict=True):
        receives, busy = [], []
        for work, start, end in zip(program.works, starts, ends, strict=True):
            if work.is_receive:
                receives.append((start, end))
            elif work.message is None and work.seconds and not str(work.stream).startswith(COLLECTIVES):
                busy.append((start, end))
        overlap = sum(max(0.0, min(a, b) - max(c, d)) for c, a in receives for d, b in busy)
        steps = sorted([(end, -1) for _, end in receives] + [(start, 1) for start, end in receives if end > start])
        peak = max(accumulate(step for _, step in steps), default=0)
        held.append(HeldReceives(overlap / sum(end - start for start, end in busy), peak, most_waiting(program)))
    return tuple(held)


def most_waiting(program: Program) -> int:
    """Return the most kernels of messages of one rank that can be on its SMs at once.

    One can be there from the moment it is enqueued until a stream has waited for it; of those of one communicator,
    whose stream is in order, only the first.
    """
    waiting: set[int] = set()
    most = 0
    for index, work in enumerate(program.works):
        if work.message is not None:
            waiting.add(index)
            most = max(most, len({program.works[other].stream for other in waiting}))
        waiting.discard(-1 if work.after is None else work.after)
    return most
