"""The pipeline engine: one loop over one rank's row of a lowered schedule.

Everything that could be decided beforehand is in the row: the order of actions, where receives are posted, when gradients are reduced.
The engine waits only where an action needs what a peer makes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megapipe.comm.channels import Channel, MessageSpec, PendingReceive
from megapipe.comm.trace import Tracer
from megapipe.pipeline.stage import StageRunner
from megapipe.schedule.action import Action, Op
from megapipe.schedule.schedule import Schedule

Key = tuple[int, int]  # (stage, microbatch)
Tensors = tuple[Tensor, ...]


def _nothing(stage: int) -> None:
    """The hook of who needs none."""


@dataclass(frozen=True)
class Hooks:
    """What the engine says to the data-parallel side; each is called with the stage."""

    before_first_forward: Callable[[int], None] = _nothing  # the stage's parameters must be whole now
    reduce_gradients: Callable[[int], None] = _nothing  # op REDUCE_GRAD: all weight gradients of the stage are there


@dataclass(frozen=True)
class Step:
    """What one run of the schedule works on.

    microbatches: payloads by microbatch number. message: shapes and dtypes that cross the boundary behind a stage, one entry a tensor.
    loss: on the last stage, (output, payload) -> (scalar to differentiate, loss scale included; report). training: with gradients, or
    forwards only.
    """

    microbatches: Sequence[Any]
    message: Callable[[int], tuple[MessageSpec, ...]]
    loss: Callable[[Any, Any], tuple[Tensor, Any]]
    training: bool = True


@dataclass
class _Run:
    """The values in flight while a row is run."""

    step: Step
    activations: dict[Key, Tensors] = field(default_factory=dict)  # input of (stage, microbatch) from a stage on this rank
    outputs: dict[Key, Tensors] = field(default_factory=dict)  # computed, not yet handed to a channel
    gradients: dict[Key, Tensors] = field(default_factory=dict)  # output gradient of (stage, microbatch) from a stage on this rank
    input_gradients: dict[Key, Tensors] = field(default_factory=dict)
    receives: dict[tuple[Op, int, int], PendingReceive] = field(default_factory=dict)
    reports: dict[int, Any] = field(default_factory=dict)


class Engine:
    """Runs this rank's row of `schedule` (lowered: with sends, receives and reductions).

    stages: the runner of each stage on this rank. channels: by (boundary, 'activation' | 'gradient'); boundary s lies behind stage s.
    They bound the sends under way, at no less than the depth the schedule's proof asks for. tracer: records start and end of every
    action under its text form, of every wait for a message inside one, and of the whole row.
    """

    def __init__(
        self,
        schedule: Schedule,
        pp_rank: int,
        stages: Mapping[int, StageRunner],
        channels: Mapping[tuple[int, str], Channel],
        hooks: Hooks = Hooks(),
        tracer: Tracer | None = None,
    ) -> None:
        placement = schedule.placement
        if set(stages) != set(placement.stages_of(pp_rank)):
            raise ValueError(
                f"pp_rank {pp_rank} was given stages {sorted(stages)}, its schedule places {placement.stages_of(pp_rank)} there"
            )
        self.row = schedule.rows[pp_rank]
        self.num_microbatches = schedule.num_microbatches
        self.last_stage = placement.num_stages - 1
        self._stages = stages
        self._channels = channels
        self._hooks = hooks
        self._tracer = tracer
        self._local = {s for s in range(self.last_stage) if placement.rank_of_stage[s] == placement.rank_of_stage[s + 1]}
        self._first_forward = _first_forwards(self.row)
        self._handlers: dict[Op, Callable[[_Run, Action], None]] = {
            Op.F: self._forward,
            Op.B: self._backward,
            Op.I: self._backward_input,
            Op.W: self._backward_weight,
            Op.SEND_F: self._send_forward,
            Op.RECV_F: self._receive_forward,
            Op.SEND_B: self._send_backward,
            Op.RECV_B: self._receive_backward,
            Op.REDUCE_GRAD: self._reduce,
        }

    def run(self, step: Step) -> list[Any]:
        """Run the row once. Returns the last stage's reports in order of microbatches; an empty list on other ranks."""
        if len(step.microbatches) != self.num_microbatches:
            raise ValueError(f"the schedule runs {self.num_microbatches} microbatches, {len(step.microbatches)} were given")
        run = _Run(step)
        start = time.perf_counter_ns()
        with torch.set_grad_enabled(step.training):
            for index, action in enumerate(self.row):
                if index in self._first_forward:
                    self._hooks.before_first_forward(action.stage)
                if self._tracer is None:
                    self._handlers[action.op](run, action)
                else:
                    self._traced(self._tracer, run, action)
        for channel in self._channels.values():
            channel.drain()
        if self._tracer is not None:
            self._tracer.event("row", "row", start)
        return [run.reports[m] for m in sorted(run.reports)]

    def _traced(self, tracer: Tracer, run: _Run, action: Action) -> None:
        start = time.perf_counter_ns()
        self._handlers[action.op](run, action)
        tracer.event(str(action), "action", start, time.perf_counter_ns())

    def _forward(self, run: _Run, action: Action) -> None:
        stage, microbatch = action.stage, _number(action)
        inputs: tuple[Tensor, ...] = ()
        if stage > 0:
            held = run.activations.pop((stage, microbatch), None)
            inputs = self._received(run, Op.RECV_F, stage, microbatch) if held is None else held
        is_last = stage == self.last_stage
        result = self._stages[stage].forward(microbatch, inputs, run.step.microbatches[microbatch], run.step.loss if is_last else None)
        if is_last:
            run.reports[microbatch] = result
        elif stage in self._local:
            run.activations[stage + 1, microbatch] = result
        else:
            run.outputs[stage, microbatch] = result

    def _backward(self, run: _Run, action: Action) -> None:
        stage, microbatch = action.stage, _number(action)
        self._deliver(run, stage, microbatch, self._stages[stage].backward(microbatch, self._output_gradients(run, stage, microbatch)))

    def _backward_input(self, run: _Run, action: Action) -> None:
        stage, microbatch = action.stage, _number(action)
        self._deliver(
            run, stage, microbatch, self._stages[stage].backward_input(microbatch, self._output_gradients(run, stage, microbatch))
        )

    def _backward_weight(self, run: _Run, action: Action) -> None:
        self._stages[action.stage].backward_weight(_number(action))

    def _send_forward(self, run: _Run, action: Action) -> None:
        self._channels[action.stage, "activation"].send(run.outputs.pop((action.stage, _number(action))))

    def _send_backward(self, run: _Run, action: Action) -> None:
        self._channels[action.stage - 1, "gradient"].send(run.input_gradients.pop((action.stage, _number(action))))

    def _receive_forward(self, run: _Run, action: Action) -> None:
        boundary = action.stage - 1
        pending = self._channels[boundary, "activation"].post_receive(run.step.message(boundary))
        run.receives[Op.RECV_F, action.stage, _number(action)] = pending

    def _receive_backward(self, run: _Run, action: Action) -> None:
        pending = self._channels[action.stage, "gradient"].post_receive(run.step.message(action.stage))
        run.receives[Op.RECV_B, action.stage, _number(action)] = pending

    def _reduce(self, run: _Run, action: Action) -> None:
        if run.step.training:
            self._hooks.reduce_gradients(action.stage)

    def _output_gradients(self, run: _Run, stage: int, microbatch: int) -> tuple[Tensor | None, ...]:
        if stage == self.last_stage:
            return (None,)  # the objective's gradient is 1
        held = run.gradients.pop((stage, microbatch), None)
        return self._received(run, Op.RECV_B, stage, microbatch) if held is None else held

    def _deliver(self, run: _Run, stage: int, microbatch: int, found: tuple[Tensor | None, ...]) -> None:
        if stage == 0:
            return
        input_gradients = tuple(gradient for gradient in found if gradient is not None)
        if len(input_gradients) != len(found):
            raise ValueError(f"stage {stage} does not use all its {len(found)} inputs: nothing can be sent back to stage {stage - 1}")
        if stage - 1 in self._local:
            run.gradients[stage - 1, microbatch] = input_gradients
        else:
            run.input_gradients[stage, microbatch] = input_gradients

    def _received(self, run: _Run, op: Op, stage: int, microbatch: int) -> tuple[Tensor, ...]:
        pending = run.receives.pop((op, stage, microbatch))
        if self._tracer is None:
            return pending.wait()
        start = time.perf_counter_ns()
        tensors = pending.wait()
        self._tracer.event(str(Action(stage, op, microbatch)), "wait", start, time.perf_counter_ns())
        return tensors


def _number(action: Action) -> int:
    assert action.microbatch is not None
    return action.microbatch


def _first_forwards(row: Sequence[Action]) -> frozenset[int]:
    """Positions in a row of each stage's first forward."""
    first: dict[int, int] = {}
    for index, action in enumerate(row):
        if action.op is Op.F:
            first.setdefault(action.stage, index)
    return frozenset(first.values())
