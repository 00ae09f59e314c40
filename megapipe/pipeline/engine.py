"""The pipeline engine: one loop over one rank's row of a lowered schedule.

The row fixes the order of actions, where receives are posted and when gradients are reduced. The engine waits only
where an action needs a message from a peer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from megapipe.comm.channels import Channel, ChannelKey, MessageSpec, PendingReceive
from megapipe.comm.trace import Tracer
from megapipe.gpu.streams import StageStreams
from megapipe.monitor.heartbeat import Heartbeat
from megapipe.pipeline.deliveries import Deliveries
from megapipe.pipeline.stage import LossFunction, Pending, Stage, Tensors
from megapipe.schedule.action import COMPUTE_OPS, Action, Op
from megapipe.schedule.lower import without_pairs
from megapipe.schedule.parts import Parts
from megapipe.schedule.schedule import Schedule
from megapipe.schedule.stream import Stream

Key = tuple[int, int]  # (stage, microbatch)


@dataclass(frozen=True)
class Step:
    """The inputs of one run of the schedule."""

    # payloads by microbatch number (by slice, in the order of `Schedule.num_slices`), the same on every rank; each
    # stage reads what it needs
    microbatches: Sequence[Any]
    # boundary, where microbatches have slices also the number of the slice -> shapes and dtypes of the tensors that
    # cross it; gradients of the floating-point ones are sent back
    message: Callable[..., tuple[MessageSpec, ...]]
    loss: LossFunction  # of the last stage; its scalar includes the loss scale


@dataclass
class Run:
    """The state of a running row: the values in flight."""

    step: Step
    messages: Mapping[ChannelKey, Sequence[tuple[MessageSpec, ...]]]  # of channels that end on this rank, by slice
    # outputs and input gradients that are not sent yet, or not yet used by another stage of this rank
    outputs: dict[Key, Tensors | Pending] = field(default_factory=dict)
    input_gradients: dict[Key, Tensors | Pending] = field(default_factory=dict)
    receives: dict[Action, PendingReceive] = field(default_factory=dict)
    reports: dict[int, Any] = field(default_factory=dict)


Act = Callable[[Run], None]  # one action of the row
Handler = Callable[[Action], Any]
NO_HANDLERS: Mapping[Op, Handler] = MappingProxyType({})
Context = Callable[[], AbstractContextManager[Any]]


class Around(NamedTuple):
    """A context of some actions of a row, such as a stream, a range of a profiler or the copies of an offload."""

    context: Callable[[Action], Context | None]  # asked once for each action of a row; None: not around this one
    begin: Callable[[], Any] = lambda: None  # called at the start of a row
    clear: Callable[[], Any] = lambda: None  # called when a row is given up

    @classmethod
    def computing(cls, context: Callable[[Action], AbstractContextManager[Any]], *hooks: Callable[[], Any]) -> Around:
        """Return a context that is opened around every computation. hooks: `begin` and `clear`."""
        return cls(lambda action: partial(context, action) if action.op in COMPUTE_OPS else None, *hooks)


class Before(AbstractContextManager[None]):
    """A context that calls functions when it is entered, and may be entered again."""

    def __init__(self, *calls: Callable[[], Any]) -> None:
        self._calls = calls

    def __enter__(self) -> None:
        for call in self._calls:
            call()

    def __exit__(self, *error: object) -> None:
        pass


class Bound(NamedTuple):
    """An action of a row with all that is known of it before the run."""

    action: Action
    word: bytes  # its text form
    contexts: tuple[Context, ...]  # each encloses those after it
    act: Act


class Engine:
    """The runner of this rank's row of a lowered schedule; it computes gradients if the row holds backwards.

    stages: the runner of each stage on this rank.
    channels: by (boundary, 'activation' | 'gradient', direction); boundary s follows stage s, microbatch m takes
    direction m % number of directions. They bound the sends in flight, at no less than the depth that the schedule's
    proof requires.
    handlers: called with the actions of other ops than computations and messages: REDUCE_GRAD, when the weight
    gradients of its stage are complete (or, with a microbatch, more follow), UPDATE, UNSHARD, RESHARD, OVERLAP,
    RECOMPUTE, OFFLOAD, RELOAD.
    around: what surrounds actions; the first encloses those after it.
    tracer: records start and end of every action, of every wait for a message, and of the whole row.
    heartbeat: notified of every action as it begins.
    streams: CUDA streams on which the two halves of an OVERLAP run concurrently, with `StageStreams.computing` in
    `around` and `begin_pair` in `handlers`; without them they run in sequence.
    parts: those of a schedule of parts (schedule.parts). `stages` are then the runners of its parts, and channels,
    messages and handlers those of the stages (`Parts.stage_row`).
    deliveries: sends the results of all-to-alls when they are there; needed with `parts`.
    Raises ValueError if the stages are not those of the row, or if an op of the schedule has no handler.
    """

    _drains = True  # nothing is in flight after the row

    def __init__(
        self,
        schedule: Schedule,
        pp_rank: int,
        stages: Mapping[int, Stage],
        channels: Mapping[ChannelKey, Channel],
        handlers: Mapping[Op, Handler] = NO_HANDLERS,
        around: Sequence[Around] = (),
        tracer: Tracer | None = None,
        heartbeat: Heartbeat | None = None,
        streams: StageStreams | None = None,
        parts: Parts | None = None,
        deliveries: Deliveries | None = None,
    ) -> None:
        placement = schedule.placement
        if set(stages) != set(placement.stages_of(pp_rank)):
            raise ValueError(
                f"pp_rank {pp_rank} was given stages {sorted(stages)}, but its schedule places stages "
                f"{placement.stages_of(pp_rank)} there"
            )
        if placement.num_ranks > 1 and not schedule.is_lowered:
            raise ValueError(f"schedule {schedule} has no messages: lower it first (schedule.lower)")
        self._binders: dict[Op, Callable[[Action], Act]] = {
            Op.F: self._forward,
            Op.B: self._backward,
            Op.I: self._backward,
            Op.W: self._backward_weight,
            Op.SEND_F: self._send,
            Op.RECV_F: self._receive,
            Op.SEND_B: self._send,
            Op.RECV_B: self._receive,
        }
        ignored = {Op.OVERLAP} if streams is None else set()  # whose halves then run in sequence
        if not any(action.op is Op.REDUCE_GRAD and action.microbatch is not None for action in schedule.rows[pp_rank]):
            ignored.add(Op.REDUCE_GRAD)  # where gradients are whole, the caller may reduce them after the row
        self._handlers = dict.fromkeys(ignored, _ignore) | dict(handlers)
        if unknown := sorted(op.value for op in schedule.ops - self._binders.keys() - self._handlers.keys()):
            raise ValueError(f"schedule {schedule} holds {', '.join(unknown)}: the engine needs `handlers` of these")
        self.row = schedule.rows[pp_rank] if streams is not None else without_pairs(schedule.rows[pp_rank])
        self.num_units, self.num_slices = schedule.num_units, schedule.num_slices
        self.is_training = schedule.has_backward
        self.last_stage = placement.num_stages - 1
        self._stages = stages
        self._channels = channels
        self._around = around
        self._tracer = tracer
        self._heartbeat = heartbeat
        self._streams = streams
        self._parts, self._deliveries = parts, deliveries
        self._text: Callable[[Action], str] = schedule.text if parts is None else parts.text
        self._num_directions = len(placement.directions)
        # (boundary, direction) of the hops inside a rank
        self._local = {
            (stage, direction)
            for direction, rank_of_stage in enumerate(placement.directions)
            for stage in range(self.last_stage)
            if rank_of_stage[stage] == rank_of_stage[stage + 1]
        }
        of_stages = self.row if parts is None else parts.stage_row(self.row)
        self._acts = tuple(map(self._bind, self.row, of_stages))

    def _bind(self, action: Action, of_stage: Action) -> Bound:
        """Look up all that is known of an action before the run. of_stage: what it is to its stage."""
        bind, handler = self._binders.get(action.op), self._handlers.get(of_stage.op, _ignore)
        act = (lambda run: handler(of_stage)) if bind is None else bind(action)
        contexts = tuple([context for each in self._around if (context := each.context(action)) is not None])
        return Bound(action, self._text(action).encode(), contexts, act)

    def run(self, step: Step) -> list[Any]:
        """Run the row once and return the last stage's reports in microbatch order; an empty list on other ranks.

        Raises ValueError for another number of microbatches than the schedule's. Exceptions of a stage propagate; the
        stages are then cleared, and peers that wait for messages time out.
        """
        run, heartbeat, tracer = self._begin(step), self._heartbeat, self._tracer
        row_start = 0 if tracer is None else tracer.now()
        try:
            with torch.set_grad_enabled(self.is_training):
                for action, word, contexts, act in self._acts:
                    if heartbeat is not None:
                        heartbeat.act(word)
                    start = 0 if tracer is None else tracer.now()
                    if contexts:
                        with ExitStack() as stack:
                            for context in contexts:
                                stack.enter_context(context())
                            act(run)
                    else:
                        act(run)
                    if tracer is not None:
                        tracer.event(word.decode(), "action", start, tracer.now(self._stream_of(action)))
            if self._deliveries is not None:
                self._deliveries.finish()
            for channel in self._channels.values() if self._drains else ():
                channel.drain()
        except BaseException:
            self._clear()
            raise
        if heartbeat is not None:
            heartbeat.act(b"")
        if tracer is not None:
            tracer.event("row", "row", row_start, tracer.now())
        return [run.reports[m] for m in sorted(run.reports)]

    def _begin(self, step: Step) -> Run:
        if len(step.microbatches) != self.num_units:
            what = "microbatches" if self.num_slices == 1 else "slices of microbatches"
            raise ValueError(f"the schedule runs {self.num_units} {what}, {len(step.microbatches)} were given")
        ends = [key for key, channel in self._channels.items() if not channel.sends]
        slices = [()] if self.num_slices == 1 else [(number,) for number in range(self.num_slices)]
        for runner in self._stages.values():
            runner.begin_row()
        for around in self._around:
            around.begin()
        return Run(step, {key: [_contents(step.message(key[0], *each), key[1]) for each in slices] for key in ends})

    def _stream_of(self, action: Action) -> Any:
        """Return the stream on which a computation ends: each half of a pair on its own; None: on the current one."""
        return self._streams.of(action.stage) if self._streams and action.op in COMPUTE_OPS else None

    def _clear(self) -> None:
        """Give up what is in flight."""
        if self._deliveries is not None:
            self._deliveries.cancel()
        for runner in self._stages.values():
            runner.clear()
        for around in self._around:
            around.clear()

    # Each of the following returns the function that runs one action.

    def _forward(self, action: Action) -> Act:
        stage, microbatch = key = action.stage, _number(action)
        runner, inputs, is_last = self._stages[stage], self._inputs(action), stage == self.last_stage

        def act(run: Run) -> None:
            step = run.step
            payload = step.microbatches[microbatch]
            if is_last:
                run.reports[microbatch] = runner.forward(microbatch, inputs(run), payload, step.loss)
            else:
                run.outputs[key] = runner.forward(microbatch, inputs(run), payload, None)

        return act

    def _backward(self, action: Action) -> Act:
        """Bind B or I."""
        stage, microbatch = key = action.stage, _number(action)
        runner, gradients, is_full = self._stages[stage], self._inputs(action), action.op is Op.B

        def act(run: Run) -> None:
            backward = runner.backward if is_full else runner.backward_input
            input_gradients = backward(microbatch, gradients(run))
            if stage:
                run.input_gradients[key] = input_gradients

        return act

    def _backward_weight(self, action: Action) -> Act:
        runner, microbatch = self._stages[action.stage], _number(action)
        return lambda run: runner.backward_weight(microbatch)

    def _send(self, action: Action) -> Act:
        stage, microbatch = key = action.stage, _number(action)
        is_output = action.op is Op.SEND_F
        boundary, kind = (stage, "activation") if is_output else (stage - 1, "gradient")
        send = self._channels[self._stage_of(boundary), kind, microbatch % self._num_directions].send
        deliveries = self._deliveries

        def act(run: Run) -> None:
            message = (run.outputs if is_output else run.input_gradients).pop(key)
            if isinstance(message, tuple):
                send(message)
            else:  # the row continues meanwhile
                assert deliveries is not None
                deliveries.deliver(message, send)

        return act

    def _stage_of(self, index: int) -> int:
        """Return the stage of a part; the index itself where the schedule is one of stages."""
        return index if self._parts is None else self._parts.sites[index].stage

    def _receive(self, action: Action) -> Act:
        boundary, kind = (action.stage - 1, "activation") if action.op is Op.RECV_F else (action.stage, "gradient")
        channel = self._stage_of(boundary), kind, _number(action) % self._num_directions
        post, of_slice = self._channels[channel].post_receive, _number(action) % self.num_slices

        def act(run: Run) -> None:
            run.receives[action] = post(run.messages[channel][of_slice])

        return act

    def _inputs(self, action: Action) -> Callable[[Run], Any]:
        """Return the function that gives a computation its input, from another stage of this rank or a message."""
        stage, microbatch, is_forward = action.stage, _number(action), action.op is Op.F
        tracer, streams = self._tracer, self._streams
        if stage == (0 if is_forward else self.last_stage):
            return lambda run: () if is_forward else (None,)  # the objective's gradient is 1
        boundary, maker = (stage - 1, stage - 1) if is_forward else (stage, stage + 1)
        made, receive = (maker, microbatch), Action(stage, Op.RECV_F if is_forward else Op.RECV_B, microbatch)
        is_local, name = (boundary, microbatch % self._num_directions) in self._local, self._text(receive)

        def inputs(run: Run) -> Tensors:
            found = (run.outputs if is_forward else run.input_gradients).pop(made) if is_local else None
            if isinstance(found, tuple):
                tensors = found
            else:
                start = 0 if tracer is None else tracer.now()
                tensors = (run.receives.pop(receive) if found is None else found).wait()
                if tracer is not None:
                    tracer.event(name, "wait", start, tracer.now())
            if streams is not None:
                streams.use(tensors)
            return tensors

        return inputs


class StreamEngine(Engine):
    """The runner of this rank's row of a stream, which goes on from step to step until it is drained.

    Arguments: those of `Engine`. Actions carry the numbers of microbatches in the stream modulo those of two steps.
    """

    def __init__(self, stream: Stream, pp_rank: int, *arguments: Any) -> None:
        super().__init__(stream.alone, pp_rank, *arguments)
        self._stream, self._pp_rank, self._size = stream, pp_rank, stream.alone.num_microbatches
        self._parts_of_steps: dict[tuple[bool, int, bool], tuple[Bound, ...]] = {}
        self._payloads = _TwoSteps(self._size)
        self._flowing: Run | None = None  # between two steps of a stream
        self._num_begun = 0  # steps of the stream

    def advance(self, step: Step, following: Sequence[Any] | None) -> None:
        """Run this rank's part of one more step, in a new stream if the last one has drained.

        following: the payloads of the step after it, whose first forwards are run, too; None drains the pipeline.
        Errors as in `run`; the stream has then ended.
        """
        number, self._drains = self._num_begun, following is None
        self._acts = self._part(number, self._drains)
        self._payloads.halves[number % 2] = step.microbatches
        self._payloads.halves[1 - number % 2] = () if following is None else following
        self.run(step)
        self._num_begun = number + 1
        if following is None:
            self._flowing, self._num_begun = None, 0

    def _begin(self, step: Step) -> Run:
        if self._flowing is None:
            self._flowing = super()._begin(step)
            self._flowing.step = replace(step, microbatches=self._payloads)
        return self._flowing

    def _clear(self) -> None:
        super()._clear()
        self._flowing, self._num_begun = None, 0

    def _part(self, number: int, drains: bool) -> tuple[Bound, ...]:
        key = number == 0, number % 2, drains
        if key not in self._parts_of_steps:
            row = self._stream.row(self._pp_rank, number, drains)
            self._parts_of_steps[key] = tuple(self._bind(action, action) for action in row)
        return self._parts_of_steps[key]


class _TwoSteps(Sequence[Any]):
    """The payloads of two steps in turn, by their numbers in a stream modulo those of two steps."""

    def __init__(self, size: int) -> None:
        self._size = size
        self.halves: list[Sequence[Any]] = [(), ()]

    def __len__(self) -> int:
        return 2 * self._size

    def __getitem__(self, number: Any) -> Any:
        step, microbatch = divmod(number, self._size)
        return self.halves[step][microbatch]


def _contents(tensors: tuple[MessageSpec, ...], kind: str) -> tuple[MessageSpec, ...]:
    """Return what a message over a boundary that `tensors` cross contains: gradients only of floating-point ones."""
    return tensors if kind == "activation" else tuple(spec for spec in tensors if spec.dtype.is_floating_point)


def _ignore(action: Action) -> None:
    """Do nothing at an action."""


def _number(action: Action) -> int:
    assert action.microbatch is not None
    return action.microbatch
