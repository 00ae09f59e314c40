"""The pipeline engine: one loop over one rank's row of a lowered schedule.

The row fixes the order of actions, where receives are posted and when gradients are reduced. The engine waits only
where an action needs a message from a peer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch

from megapipe.comm.channels import Channel, ChannelKey, MessageSpec, PendingReceive
from megapipe.comm.trace import Tracer
from megapipe.gpu.streams import StageStreams
from megapipe.monitor.heartbeat import Heartbeat
from megapipe.pipeline.deliveries import Deliveries
from megapipe.pipeline.offload import Offload
from megapipe.pipeline.stage import LossFunction, Pending, Stage, Tensors
from megapipe.schedule.action import BACKWARD_OPS, COMPUTE_OPS, SHARDING_OPS, Action, Op
from megapipe.schedule.lifetimes import NO_MOVES, Moves
from megapipe.schedule.lower import without_pairs
from megapipe.schedule.parts import Parts
from megapipe.schedule.schedule import Schedule

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


class StageWeights(Protocol):
    """The weights of this rank's stages if they change while the row runs (asynchronous schedules)."""

    def use(self, stage: int, microbatch: int) -> None:
        """Load the microbatch's weight version into the module; called before its F and each part of its backward."""

    def update(self, stage: int, microbatch: int) -> None:
        """Run one optimizer step with the gradients since the last one; this microbatch's gradient is the latest."""


class Sharded(Protocol):
    """Weights and gradients of this rank's stages that are whole only while they are needed (data_parallel.stores)."""

    def unshard(self, stage: int) -> None:
        """Start to gather the weights of a stage (UNSHARD)."""

    def use(self, stage: int) -> None:
        """Wait for the weights of a stage; called before its F, B and I."""

    def reshard(self, stage: int) -> None:
        """Free the weights of a stage (RESHARD)."""

    def accumulate(self, stage: int) -> None:
        """Provide the memory of a stage's gradients; called before its B, I and W."""

    def reduce_part(self, stage: int) -> None:
        """Start to reduce the gradients of a stage, of which more follow (REDUCE_GRAD with a microbatch)."""


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


class Engine:
    """The runner of this rank's row of a lowered schedule; it computes gradients if the row holds backwards.

    stages: the runner of each stage on this rank.
    channels: by (boundary, 'activation' | 'gradient', direction); boundary s follows stage s, microbatch m takes
    direction m % number of directions. They bound the sends in flight, at no less than the depth that the schedule's
    proof requires.
    reduce_gradients: called with a stage at REDUCE_GRAD, when all its weight gradients are complete.
    tracer: records start and end of every action, of every wait for a message, and of the whole row.
    streams: CUDA streams on which the two halves of an OVERLAP run concurrently; without them they run in sequence.
    weights: needed by schedules with UPDATE.
    heartbeat: notified of every action as it begins.
    marks: context managers opened around every action under its text form, for profilers.
    offload, moves: what moves activations to the host and back during the row, and the plan of that.
    parts: those of a schedule of parts (schedule.parts). `stages` are then the runners of its parts, and channels,
    messages and reductions those of the stages: the last reduction of a part in the row is that of its stage.
    deliveries: sends the results of all-to-alls when they are there; needed with `parts`.
    sharded: needed by schedules with UNSHARD, RESHARD or REDUCE_GRAD of a microbatch.
    Raises ValueError if the stages are not those of the row.
    """

    def __init__(
        self,
        schedule: Schedule,
        pp_rank: int,
        stages: Mapping[int, Stage],
        channels: Mapping[ChannelKey, Channel],
        reduce_gradients: Callable[[int], None] | None = None,
        tracer: Tracer | None = None,
        streams: StageStreams | None = None,
        weights: StageWeights | None = None,
        heartbeat: Heartbeat | None = None,
        marks: Callable[[str], AbstractContextManager[Any]] | None = None,
        offload: Offload | None = None,
        moves: Moves = NO_MOVES,
        parts: Parts | None = None,
        deliveries: Deliveries | None = None,
        sharded: Sharded | None = None,
    ) -> None:
        placement = schedule.placement
        if set(stages) != set(placement.stages_of(pp_rank)):
            raise ValueError(
                f"pp_rank {pp_rank} was given stages {sorted(stages)}, but its schedule places stages "
                f"{placement.stages_of(pp_rank)} there"
            )
        if placement.num_ranks > 1 and not schedule.is_lowered:
            raise ValueError(f"schedule {schedule} has no messages: lower it first (schedule.lower)")
        if weights is None and not schedule.is_synchronous:
            raise ValueError(f"schedule {schedule} updates weights while it runs: the engine needs `weights`")
        if sharded is None and schedule.ops & SHARDING_OPS:
            raise ValueError(f"schedule {schedule} gathers weights while it runs: the engine needs `sharded`")
        self.row = schedule.rows[pp_rank] if streams is not None else without_pairs(schedule.rows[pp_rank])
        self.num_units, self.num_slices = schedule.num_units, schedule.num_slices
        self.is_training = schedule.has_backward
        self.last_stage = placement.num_stages - 1
        self._stages = stages
        self._channels = channels
        self._reduce_gradients = reduce_gradients or (lambda stage: None)
        self._tracer = tracer
        self._streams = streams
        self._heartbeat = heartbeat
        self._offload, self._moves = offload, moves
        self._parts, self._deliveries, self._sharded = parts, deliveries, sharded
        self._text: Callable[[Action], str] = schedule.text if parts is None else parts.text
        self._words = tuple(self._text(action).encode() for action in self.row)
        self._num_directions = len(placement.directions)
        # (boundary, direction) of the hops inside a rank
        self._local = {
            (stage, direction)
            for direction, rank_of_stage in enumerate(placement.directions)
            for stage in range(self.last_stage)
            if rank_of_stage[stage] == rank_of_stage[stage + 1]
        }
        self._reads_weights = schedule.reads_weights
        self._acts = tuple(self._bind(action, weights, marks) for action in self.row)

    def _bind(
        self,
        action: Action,
        weights: StageWeights | None,
        marks: Callable[[str], AbstractContextManager[Any]] | None,
    ) -> Act:
        """Return the function that runs one action, wrapped by what the run needs around it.

        All that is known before the run is looked up here, once per action. The order of the wrappers matters: a mark
        encloses the stream, the stream the offload, the offload the weights.
        """
        stage, op, _ = action
        binders: dict[Op, Callable[[Action], Act]] = {
            Op.F: self._forward,
            Op.B: self._backward,
            Op.I: self._backward,
            Op.W: lambda action: lambda run: self._stages[stage].backward_weight(_number(action)),
            Op.SEND_F: self._send,
            Op.RECV_F: self._receive,
            Op.SEND_B: self._send,
            Op.RECV_B: self._receive,
            Op.REDUCE_GRAD: self._reduce,
        }
        if weights is not None:
            binders[Op.UPDATE] = lambda action: lambda run: weights.update(stage, _number(action))
        streams, sharded = self._streams, self._sharded
        if streams is not None:
            binders[Op.OVERLAP] = lambda action: lambda run: streams.begin_pair()
        if sharded is not None:
            binders[Op.UNSHARD] = lambda action: self._of_first_part(action, sharded.unshard)
            binders[Op.RESHARD] = lambda action: self._of_first_part(action, sharded.reshard)
        act = binders[op](action)
        if sharded is not None:
            # waits for weights and provides gradients, for both halves of a pair before their streams
            slot = self.row.index(action) + 1 if op is Op.OVERLAP else 0
            for each in self.row[slot : slot + 2] if slot else (action,):
                if self._reads_weights(each):
                    act = _after(partial(sharded.use, self._stage_of(each.stage)), act)
                if each.op in BACKWARD_OPS:
                    act = _after(partial(sharded.accumulate, self._stage_of(each.stage)), act)
        if op in COMPUTE_OPS:
            if weights is not None:
                act = _after(partial(weights.use, stage, _number(action)), act)
            if self._offload is not None:
                act = _within(partial(self._offload.computing, action), act)
            if streams is not None:
                act = _within(partial(streams.computing, stage), act)
        return act if marks is None else _within(partial(marks, self._text(action)), act)

    def run(self, step: Step) -> list[Any]:
        """Run the row once and return the last stage's reports in microbatch order; an empty list on other ranks.

        Raises ValueError for another number of microbatches than the schedule's. Exceptions of a stage propagate; the
        stages are then cleared, and peers that wait for messages time out.
        """
        if len(step.microbatches) != self.num_units:
            what = "microbatches" if self.num_slices == 1 else "slices of microbatches"
            raise ValueError(f"the schedule runs {self.num_units} {what}, {len(step.microbatches)} were given")
        ends = [key for key, channel in self._channels.items() if not channel.sends]
        slices = [()] if self.num_slices == 1 else [(number,) for number in range(self.num_slices)]
        run = Run(step, {key: [_contents(step.message(key[0], *each), key[1]) for each in slices] for key in ends})
        for runner in self._stages.values():
            runner.begin_row()
        if self._offload is not None:
            self._offload.begin(self._moves)
        try:
            self._act(run)
        except BaseException:
            self._clear()
            raise
        return [run.reports[m] for m in sorted(run.reports)]

    def _clear(self) -> None:
        """Give up what is in flight."""
        if self._deliveries is not None:
            self._deliveries.cancel()
        for runner in self._stages.values():
            runner.clear()
        if self._offload is not None:
            self._offload.clear()

    def _act(self, run: Run) -> None:
        """Run all actions of the row."""
        heartbeat, tracer, streams = self._heartbeat, self._tracer, self._streams
        row_start = 0 if tracer is None else tracer.now()
        with torch.set_grad_enabled(self.is_training):
            for act, action, word in zip(self._acts, self.row, self._words, strict=True):
                if heartbeat is not None:
                    heartbeat.act(word)
                if tracer is None:
                    act(run)
                    continue
                start = tracer.now()
                act(run)
                # each half of a pair ends on its own stream; the current stream waits for both
                own_stream = streams.of(action.stage) if streams and action.op in COMPUTE_OPS else None
                ended = tracer.now(own_stream)
                tracer.event(word.decode(), "action", start, ended)
        if self._deliveries is not None:
            self._deliveries.finish()
        for channel in self._channels.values():
            channel.drain()
        if heartbeat is not None:
            heartbeat.act(b"")
        if tracer is not None:
            tracer.event("row", "row", row_start, tracer.now())

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

    def _reduce(self, action: Action) -> Act:
        """Bind REDUCE_GRAD; of the parts of a stage only the last in the row reduces the gradients of the stage.

        One with a microbatch is not the last of its stage in the step.
        """
        stage, sharded = self._stage_of(action.stage), self._sharded
        if action.microbatch is not None:
            if sharded is None:
                raise ValueError(f"{action} is not the last reduction of the stage: the engine needs `sharded`")
            return self._of_first_part(action, sharded.reduce_part)
        of_stage = [a for a in self.row if a.op is Op.REDUCE_GRAD and self._stage_of(a.stage) == stage]
        return (lambda run: self._reduce_gradients(stage)) if action == of_stage[-1] else lambda run: None

    def _of_first_part(self, action: Action, run_stage: Callable[[int], None]) -> Act:
        """Return what an action of a stage does; of the actions of all its parts only the first does it."""
        stage = self._stage_of(action.stage)
        if self._parts is not None and action.stage != self._parts.of_stage[stage][0]:
            return lambda run: None
        return lambda run: run_stage(stage)

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


def _contents(tensors: tuple[MessageSpec, ...], kind: str) -> tuple[MessageSpec, ...]:
    """Return what a message over a boundary that `tensors` cross contains: gradients only of floating-point ones."""
    return tensors if kind == "activation" else tuple(spec for spec in tensors if spec.dtype.is_floating_point)


def _number(action: Action) -> int:
    assert action.microbatch is not None
    return action.microbatch


def _after(first: Callable[[], Any], act: Act) -> Act:
    def both(run: Run) -> None:
        first()
        act(run)

    return both


def _within(context: Callable[[], AbstractContextManager[Any]], act: Act) -> Act:
    def enclosed(run: Run) -> None:
        with context():
            act(run)

    return enclosed
