"""CUDA graphs of this rank's stages: forward and backward of every slot, captured once, replayed with one launch each.

A graph reads and writes the addresses that it was captured with, and Python code does not run in a replay. Hence:

- Every microbatch in flight has a slot (`schedule.lifetimes.assign_slots`) with its own graphs, which read fixed
  buffers: messages, tokens and gradients are copied into them. Input gradients and loss reports are copied out, because
  the next replay would overwrite them while they are being sent. A stage's output is not copied: its slot is reused
  only after its own backward, whose gradient depends on the output having arrived.
- Every slot has its own memory pool. Within a slot, replays follow the order of the capture, forward before backward,
  so memory that the backward frees can be reused. Between slots the order varies: in a shared pool, the temporaries of
  one slot's backward would overlap the activations of another slot that was free during the capture.
- Parameters and main gradients have fixed addresses, checked at every step; gradients are added in place.
- Waiting for parameters, starting reductions, observing outputs and naming actions happen outside of the graphs.

It has not run on a GPU so far.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from megapipe.errors import TrainingError
from megapipe.pipeline.engine import Step
from megapipe.pipeline.stage import Gradients, LossFunction, StageRunner, Tensors
from megapipe.schedule.schedule import gc_paused

Replay = Callable[[], None]
Result = TypeVar("Result")


class CudaRecorder:
    """A recorder of CUDA graphs, all on one stream, because autograd runs a backward on the stream of its forward."""

    def pool(self) -> Any:
        """Return a new memory pool."""
        return torch.cuda.graph_pool_handle()

    def record(self, work: Callable[[], Result], pool: Any) -> tuple[Replay, Result]:
        """Run `work` without executing its kernels, with tensors from `pool`; return (replay function, its result)."""
        graph = torch.cuda.CUDAGraph()
        # torch leaves the stream of a capture that fails as the current one. thread_local: NCCL's watchdog and
        # checkpoint writers may call CUDA during the capture
        restored = torch.cuda.stream(torch.cuda.current_stream())
        with restored, torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            result = work()
        return graph.replay, result


@dataclass
class _Slot:
    """The fixed tensors of one slot and its replay functions. output: of the stage's module; result: of its runner."""

    inputs: Tensors
    payload: Tensors
    forward: Replay
    output: Any
    result: Any
    gradients: Gradients = ()
    input_gradients: Tensors = ()
    backward: Replay = lambda: None  # B, or I if the backward is split
    backward_weight: Replay = lambda: None  # W if the backward is split


@dataclass
class StageGraphs:
    """The graphs of one stage."""

    stage: int
    runner: StageRunner
    fixed: Callable[[], Iterable[Tensor]]  # the parameters and main gradients, whose addresses must not change
    # called before each forward; waits until the stage's parameters and everything derived from them are up to date
    ready: Callable[[], None] = lambda: None
    splits: bool = False  # backwards are captured as I and W
    slots: list[_Slot] = field(default_factory=list)
    _addresses: list[int] = field(default_factory=list)

    def record(
        self, recorder: CudaRecorder, num_slots: int, inputs: Tensors, payload: Any, loss: LossFunction | None
    ) -> None:
        """Capture all graphs of the stage without computing anything.

        inputs: tensors like those from the stage before. payload: a microbatch; only its tensors change from replay to
        replay. loss: the engine's loss, on the last stage. Raises TrainingError if an operation cannot be captured.
        """
        observe = self.runner.observe
        try:
            self.slots = [self._recorded(recorder, number, inputs, payload, loss) for number in range(num_slots)]
        finally:
            self.runner.observe = observe
        self._addresses = [tensor.data_ptr() for tensor in self.fixed()]

    def check_addresses(self) -> None:
        """Raise RuntimeError if parameters or gradients have moved since the capture."""
        if self.slots and [tensor.data_ptr() for tensor in self.fixed()] != self._addresses:
            raise RuntimeError(f"stage {self.stage}: parameters or gradients have moved since its graphs were captured")

    def fill(self, fixed: Iterable[Tensor | None], given: Iterable[Tensor | None], what: str) -> None:
        """Copy the given tensors into the fixed ones that a replay reads."""
        targets = [tensor for tensor in fixed if tensor is not None]
        sources = [tensor for tensor in given if tensor is not None]
        if [(t.shape, t.dtype) for t in targets] != [(t.shape, t.dtype) for t in sources]:
            raise RuntimeError(
                f"stage {self.stage}: its graphs were captured for a {what} of {[tuple(t.shape) for t in targets]}, "
                f"but {[tuple(t.shape) for t in sources]} was given; omit --cuda-graph-impl if sizes change"
            )
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)

    def _recorded(
        self, recorder: CudaRecorder, number: int, inputs: Tensors, payload: Any, loss: LossFunction | None
    ) -> _Slot:
        runner, pool = self.runner, recorder.pool()
        outputs: list[Any] = []
        runner.observe = lambda _, output: outputs.append(output)
        inputs, payload = mapped(inputs, torch.zeros_like), mapped(payload, Tensor.clone)

        def record(what: str, work: Callable[[], Result]) -> tuple[Replay, Result]:
            try:
                return recorder.record(work, pool)
            except RuntimeError as error:
                cause = error.__context__ or error  # ending a failed capture raises again
                if isinstance(cause, torch.OutOfMemoryError):
                    raise cause from None
                raise TrainingError(
                    f"the {what} of stage {self.stage} cannot be captured as a CUDA graph: {cause}. Synchronization "
                    "with the device and allocations outside of torch cannot be captured; omit --cuda-graph-impl"
                ) from error

        forward, result = record("forward", lambda: runner.forward(number, inputs, payload, loss))
        slot = _Slot(inputs, tensors_of(payload), forward, mapped(outputs[0], Tensor.detach), result)
        # one per slot: operations deferred to W may keep a reference to the gradient
        slot.gradients = (None,)
        if loss is None:
            sent = (t for t in result if t.is_floating_point())
            slot.gradients = tuple(torch.zeros(t.shape, dtype=t.dtype, device=t.device) for t in sent)
        backward = runner.backward_input if self.splits else runner.backward
        slot.backward, slot.input_gradients = record("backward", lambda: backward(number, slot.gradients))
        if self.splits:
            slot.backward_weight, _ = record("weight gradients", lambda: runner.backward_weight(number))
        return slot


class CapturedStage:
    """A stage for the engine (`stage.Stage`) that replays its graphs; until they are captured, its runner computes.

    slots: microbatch of the row -> slot. Without gradients the runner always computes.
    """

    def __init__(self, graphs: StageGraphs, slots: Mapping[int, int]) -> None:
        self._graphs, self._slots, self._runner = graphs, slots, graphs.runner
        self.clear = graphs.runner.clear

    def begin_row(self) -> None:
        self._runner.begin_row()
        self._graphs.check_addresses()

    def forward(self, microbatch: int, inputs: Tensors, payload: Any, loss: LossFunction | None) -> Any:
        graphs = self._graphs
        if not graphs.slots or not torch.is_grad_enabled():
            return self._runner.forward(microbatch, inputs, payload, loss)
        slot = graphs.slots[self._slots[microbatch]]
        graphs.ready()
        graphs.fill(slot.inputs, inputs, "message")
        graphs.fill(slot.payload, tensors_of(payload), "microbatch")
        slot.forward()
        if self._runner.observe is not None:
            self._runner.observe(microbatch, slot.output)
        return slot.result if loss is None else mapped(slot.result, Tensor.clone)

    def backward(self, microbatch: int, gradients: Gradients) -> Tensors:
        if not self._graphs.slots:
            return self._runner.backward(microbatch, gradients)
        input_gradients = self.backward_input(microbatch, gradients)
        self.backward_weight(microbatch)
        return input_gradients

    def backward_input(self, microbatch: int, gradients: Gradients) -> Tensors:
        if not self._graphs.slots:
            return self._runner.backward_input(microbatch, gradients)
        slot = self._graphs.slots[self._slots[microbatch]]
        self._graphs.fill(slot.gradients, gradients, "gradient")
        slot.backward()
        return tuple(gradient.clone() for gradient in slot.input_gradients)

    def backward_weight(self, microbatch: int) -> None:
        if not self._graphs.slots:
            return self._runner.backward_weight(microbatch)
        self._graphs.slots[self._slots[microbatch]].backward_weight()


@dataclass
class RankGraphs:
    """The graphs of a rank, captured between two steps after the warm-up."""

    stages: Mapping[int, StageGraphs]
    num_slots: Mapping[int, int]  # by stage
    last_stage: int  # of the pipeline
    warmup_steps: int  # before the capture: kernels are chosen and connections made in them
    device: torch.device
    recorder: CudaRecorder = field(default_factory=CudaRecorder)
    settle: Callable[[], None] = lambda: None  # called before the capture; completes pending changes of the parameters
    example: Callable[[Any], Any] = lambda payload: payload  # the part of a microbatch that graphs are captured with
    during: Callable[[], AbstractContextManager[Any]] = nullcontext  # around the capture, which takes a while
    _num_steps: int = 0

    def after_step(self, step: Step) -> None:
        """Count a training step and capture the graphs after the warm-up. Later steps must have the same shapes."""
        self._num_steps += 1
        if self._num_steps < self.warmup_steps or all(graphs.slots for graphs in self.stages.values()):
            return
        self.settle()
        # tensors of earlier backwards that cycles keep alive would bring the streams that those ran on into the capture
        gc.collect()
        # a graph or an event that the cycle collector freed during the capture would break it
        with self.during(), torch.enable_grad(), gc_paused():
            payload = self.example(step.microbatches[0])
            for stage, graphs in self.stages.items():
                message = step.message(stage - 1) if stage else ()
                inputs = tuple(torch.zeros(spec.shape, dtype=spec.dtype, device=self.device) for spec in message)
                loss = step.loss if stage == self.last_stage else None
                graphs.record(self.recorder, self.num_slots[stage], inputs, payload, loss)

    def release(self) -> None:
        """Free all graphs. The next step runs without them; after it they are captured again."""
        for graphs in self.stages.values():
            graphs.slots = []


def mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Apply `change` to all tensors in a nested value of tuples, lists, dicts and dataclasses."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple | list):
        return type(value)(mapped(part, change) for part in value)
    if isinstance(value, dict):
        return {key: mapped(part, change) for key, part in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        changed = {each.name: mapped(getattr(value, each.name), change) for each in dataclasses.fields(value)}
        return dataclasses.replace(value, **changed)
    return value


def tensors_of(value: Any) -> Tensors:
    """Return the tensors of a nested value, in the order of `mapped`."""
    found: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    mapped(value, keep)
    return tuple(found)
