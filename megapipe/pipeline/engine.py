"""The pipeline engine: one loop over one rank's row of a lowered schedule.

The row fixes the order of actions, where receives are posted and when gradients are reduced. The engine waits only
where an action needs a message from a peer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from megapipe.comm.channels import Channel, ChannelKey, MessageSpec, PendingReceive
from megapipe.comm.trace import Tracer
from megapipe.gpu.streams import StageStreams
from megapipe.monitor.heartbeat import Heartbeat
from megapipe.pipeline.offload import Offload
from megapipe.pipeline.stage import LossFunction, Stage, Tensors
from megapipe.schedule.action import COMPUTE_OPS, Action, Op
from megapipe.schedule.lifetimes import NO_MOVES, Moves
from megapipe.schedule.schedule import Schedule

Key = tuple[int, int]  # (stage, microbatch)


@dataclass(frozen=True)
class Step:
    """The inputs of one run of the schedule."""

    microbatches: Sequence[Any]  # payloads by microbatch number, the same on every rank; each stage reads what it needs
    # boundary -> shapes and dtypes of the tensors that cross it; gradients of the floating-point ones are sent back
    message: Callable[[int], tuple[MessageSpec, ...]]
    loss: LossFunction  # of the last stage; its scalar includes the loss scale


class StageWeights(Protocol):
    """The weights of this rank's stages if they change while the row runs (asynchronous schedules)."""

    def use(self, stage: int, microbatch: int) -> None:
        """Load the microbatch's weight version into the module; called before its F and each part of its backward."""

    def update(self, stage: int, microbatch: int) -> None:
        """Run one optimizer step with the gradients since the last one; this microbatch's gradient is the latest."""


@dataclass
class BegunRun:
    """The state of a running row: the values in flight. Created by `Engine.begin`, consumed by `Engine.finish`."""

    step: Step
    # outputs and input gradients that are not sent yet, or not yet used by another stage of this rank
    outputs: dict[Key, Tensors] = field(default_factory=dict)
    input_gradients: dict[Key, Tensors] = field(default_factory=dict)
    receives: dict[tuple[Op, int, int], PendingReceive] = field(default_factory=dict)
    reports: dict[int, Any] = field(default_factory=dict)


Handler = Callable[[BegunRun, Action], None]


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
    head_start: the number of first actions that `begin` runs; they are closed under messages (schedule.lower).
    heartbeat: notified of every action as it begins.
    marks: context managers opened around every action under its text form, for profilers.
    offload, moves: what moves activations to the host and back during the row, and the plan of that.
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
        head_start: int = 0,
        heartbeat: Heartbeat | None = None,
        marks: Callable[[str], AbstractContextManager[Any]] | None = None,
        offload: Offload | None = None,
        moves: Moves = NO_MOVES,
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
        ops = set(Op) if streams is not None else set(Op) - {Op.OVERLAP}
        self.row = tuple(action for action in schedule.rows[pp_rank] if action.op in ops)
        self.num_microbatches = schedule.num_microbatches
        self.is_training = schedule.has_backward
        self.last_stage = placement.num_stages - 1
        self._stages = stages
        self._channels = channels
        self._reduce_gradients = reduce_gradients or (lambda stage: None)
        self._tracer = tracer
        self._streams = streams
        self._head_start = head_start
        self._heartbeat = heartbeat
        self._offload, self._moves = offload, moves
        self._words = tuple(str(action).encode() for action in self.row)
        self._num_directions = len(placement.directions)
        # (boundary, direction) of the hops inside a rank
        self._local = {
            (stage, direction)
            for direction, rank_of_stage in enumerate(placement.directions)
            for stage in range(self.last_stage)
            if rank_of_stage[stage] == rank_of_stage[stage + 1]
        }
        self._handlers = self._make_handlers(weights, streams, marks)

    def _make_handlers(
        self,
        weights: StageWeights | None,
        streams: StageStreams | None,
        marks: Callable[[str], AbstractContextManager[Any]] | None,
    ) -> dict[Op, Handler]:
        """Return the function that runs each kind of action, wrapped by what the run needs around it.

        The order of the wrappers matters: a mark encloses the stream, the stream the offload, the offload the weights.
        """

        def with_weights(handler: Handler, weights: StageWeights) -> Handler:
            def handle(run: BegunRun, action: Action) -> None:
                weights.use(action.stage, _number(action))
                handler(run, action)

            return handle

        def within(handler: Handler, context: Callable[[Action], AbstractContextManager[Any]]) -> Handler:
            def handle(run: BegunRun, action: Action) -> None:
                with context(action):
                    handler(run, action)

            return handle

        handlers: dict[Op, Handler] = {
            Op.F: self._forward,
            Op.B: self._backward,
            Op.I: self._backward,
            Op.W: lambda run, action: self._stages[action.stage].backward_weight(_number(action)),
            Op.SEND_F: self._send,
            Op.RECV_F: self._receive,
            Op.SEND_B: self._send,
            Op.RECV_B: self._receive,
            Op.REDUCE_GRAD: lambda run, action: self._reduce_gradients(action.stage),
        }
        if weights is not None:
            handlers |= {op: with_weights(handlers[op], weights) for op in COMPUTE_OPS}
            handlers[Op.UPDATE] = lambda run, action: weights.update(action.stage, _number(action))
        if self._offload is not None:
            handlers |= {op: within(handlers[op], self._offload.computing) for op in COMPUTE_OPS}
        if streams is not None:
            handlers |= {op: within(handlers[op], lambda action: streams.computing(action.stage)) for op in COMPUTE_OPS}
            handlers[Op.OVERLAP] = lambda run, action: streams.begin_pair()
        if marks is not None:
            handlers = {op: within(handler, lambda action: marks(str(action))) for op, handler in handlers.items()}
        return handlers

    def run(self, step: Step) -> list[Any]:
        """Run the row once and return the last stage's reports in microbatch order; an empty list on other ranks.

        Raises ValueError for another number of microbatches than the schedule's. Exceptions of a stage propagate; the
        stages are then cleared, and peers that wait for messages time out.
        """
        return self.finish(self.begin(step))

    def begin(self, step: Step) -> BegunRun:
        """Run the head start of the row; `finish` runs the rest."""
        if len(step.microbatches) != self.num_microbatches:
            raise ValueError(
                f"the schedule runs {self.num_microbatches} microbatches, {len(step.microbatches)} were given"
            )
        run = BegunRun(step)
        for runner in self._stages.values():
            runner.begin_row(self.is_training)
        if self._offload is not None:
            self._offload.begin(self._moves)
        if self._head_start:
            self._act(run, slice(self._head_start), run_ends=False)
        return run

    def finish(self, run: BegunRun) -> list[Any]:
        """Run the rest of the row and return the reports, as `run` does."""
        self._act(run, slice(self._head_start, None), run_ends=True)
        return [run.reports[m] for m in sorted(run.reports)]

    def discard(self) -> None:
        """Discard a begun run. If all ranks of the pipeline do so, each may begin again, with other weights."""
        for runner in self._stages.values():
            runner.clear()
        if self._offload is not None:
            self._offload.clear()

    def _act(self, run: BegunRun, part: slice, run_ends: bool) -> None:
        heartbeat, tracer, streams, handlers = self._heartbeat, self._tracer, self._streams, self._handlers
        row_start = 0 if tracer is None else tracer.now()
        try:
            with torch.set_grad_enabled(self.is_training):
                for action, word in zip(self.row[part], self._words[part], strict=True):
                    if heartbeat is not None:
                        heartbeat.act(word)
                    if tracer is None:
                        handlers[action.op](run, action)
                        continue
                    start = tracer.now()
                    handlers[action.op](run, action)
                    # each half of a pair ends on its own stream; the current stream waits for both
                    own_stream = streams.of(action.stage) if streams and action.op in COMPUTE_OPS else None
                    ended = tracer.now(own_stream)
                    tracer.event(str(action), "action", start, ended)
            if run_ends:
                for channel in self._channels.values():
                    channel.drain()
        except BaseException:
            self.discard()
            raise
        if heartbeat is not None:
            heartbeat.act(b"")
        if tracer is not None:
            tracer.event("row", "row", row_start, tracer.now())

    def _forward(self, run: BegunRun, action: Action) -> None:
        stage, microbatch = action.stage, _number(action)
        inputs = self._arrived(run, action, Op.RECV_F) if stage else ()
        is_last = stage == self.last_stage
        result = self._stages[stage].forward(
            microbatch, inputs, run.step.microbatches[microbatch], run.step.loss if is_last else None
        )
        if is_last:
            run.reports[microbatch] = result
        else:
            run.outputs[stage, microbatch] = result

    def _backward(self, run: BegunRun, action: Action) -> None:
        """Run B or I."""
        stage, microbatch = action.stage, _number(action)
        gradients: tuple[Tensor | None, ...] = (None,)  # the objective's gradient is 1
        if stage != self.last_stage:
            gradients = self._arrived(run, action, Op.RECV_B)
        runner = self._stages[stage]
        backward = runner.backward if action.op is Op.B else runner.backward_input
        input_gradients = backward(microbatch, gradients)
        if stage:
            run.input_gradients[stage, microbatch] = input_gradients

    def _send(self, run: BegunRun, action: Action) -> None:
        stage, microbatch = action.stage, _number(action)
        if action.op is Op.SEND_F:
            self._channel(stage, "activation", microbatch).send(run.outputs.pop((stage, microbatch)))
        else:
            self._channel(stage - 1, "gradient", microbatch).send(run.input_gradients.pop((stage, microbatch)))

    def _receive(self, run: BegunRun, action: Action) -> None:
        stage, microbatch = action.stage, _number(action)
        if action.op is Op.RECV_F:
            channel, message = self._channel(stage - 1, "activation", microbatch), run.step.message(stage - 1)
        else:
            channel = self._channel(stage, "gradient", microbatch)
            message = tuple(spec for spec in run.step.message(stage) if spec.dtype.is_floating_point)
        run.receives[action.op, stage, microbatch] = channel.post_receive(message)

    def _arrived(self, run: BegunRun, action: Action, receive: Op) -> Tensors:
        """Return the input of a computation, from another stage of this rank or from the message of `receive`."""
        stage, microbatch, tracer = action.stage, _number(action), self._tracer
        made, maker, boundary = run.outputs, stage - 1, stage - 1
        if receive is Op.RECV_B:
            made, maker, boundary = run.input_gradients, stage + 1, stage
        if (boundary, microbatch % self._num_directions) in self._local:
            tensors = made.pop((maker, microbatch))
        else:
            pending = run.receives.pop((receive, stage, microbatch))
            start = 0 if tracer is None else tracer.now()
            tensors = pending.wait()
            if tracer is not None:
                tracer.event(str(Action(stage, receive, microbatch)), "wait", start, tracer.now())
        if self._streams is not None:
            self._streams.use(tensors)
        return tensors

    def _channel(self, boundary: int, kind: str, microbatch: int) -> Channel:
        return self._channels[boundary, kind, microbatch % self._num_directions]


def _number(action: Action) -> int:
    assert action.microbatch is not None
    return action.microbatch
