"""CUDA graphs of this rank's stages: the forward and the backward of every slot, recorded once and replayed with one launch each.

A graph reads and writes at the addresses that it was recorded with, and what Python did meanwhile is not done again. Hence:

- Every microbatch in flight has a slot (`schedule.slots`) with graphs of its own, which read fixed buffers: messages, tokens and
  gradients are copied into them. Input gradients and loss reports are copied out, for the next replay overwrites them while they travel.
  A stage's output is not: its slot is used again after its own backward, whose gradient comes from where the output has arrived.
- Every slot has a memory pool of its own. There a replay comes in the order of the recording, forward before backward, so that memory
  which the backward frees may be used again in it. Between slots the order changes from microbatch to microbatch: in one pool, the
  temporaries of a slot's backward would lie where another slot, free when it was recorded, keeps its activations.
- Parameters and main gradients have fixed addresses, which is checked at every step; gradients are added in place.
- Waiting for parameters, starting reductions, watching outputs and naming actions happen outside.

It has not run on a GPU so far.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from megapipe.comm.channels import MessageSpec
from megapipe.errors import TrainingError
from megapipe.pipeline.engine import Step
from megapipe.pipeline.stage import StageRunner
from megapipe.schedule.gc_pause import gc_paused

Tensors = tuple[Tensor, ...]
Replay = Callable[[], None]
Result = TypeVar("Result")


class Recorder(Protocol):
    """Records what a function launches on the device."""

    def pool(self) -> Any:
        """A new memory pool."""

    def record(self, work: Callable[[], Result], pool: Any) -> tuple[Replay, Result]:
        """Run `work` without executing what it launches; its tensors lie in the pool. Returns what launches it, and what it returned."""


class CudaRecorder:
    """Records CUDA graphs, all on one stream, as autograd wants it: a backward runs on the stream of its forward."""

    def pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def record(self, work: Callable[[], Result], pool: Any) -> tuple[Replay, Result]:
        graph = torch.cuda.CUDAGraph()
        # thread_local: NCCL's watchdog and writers of checkpoints may ask CUDA something meanwhile
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            result = work()
        return graph.replay, result


@dataclass(frozen=True)
class Example:
    """What a stage's graphs are recorded with: shapes and dtypes of the message from the stage before, a microbatch, and on the last stage
    the engine's loss. Of the microbatch only tensors change from replay to replay; all else stays as it is here."""

    message: tuple[MessageSpec, ...]
    payload: Any
    loss: Callable[[Any, Any], tuple[Tensor, Any]] | None
    device: torch.device


@dataclass
class _Slot:
    """The fixed tensors of one slot, and what replays its graphs. output: what the stage's module returned; result: what its runner did."""

    inputs: Tensors
    payload: Tensors
    forward: Replay
    output: Any
    result: Any
    gradients: tuple[Tensor | None, ...] = ()
    input_gradients: Tensors = ()
    backward: Replay = lambda: None  # or its first half
    backward_weight: Replay | None = None


class StageGraphs:
    """The graphs of one stage.

    fixed: the parameters and main gradients as they lie now. ready: called before each forward, for a graph waits for nobody; returns when
    the stage's parameters, and what is made of them, are up to date. splits: backwards are recorded as I and W.
    """

    def __init__(
        self,
        stage: int,
        runner: StageRunner,
        fixed: Callable[[], Iterable[Tensor]],
        ready: Callable[[], None] = lambda: None,
        splits: bool = False,
    ) -> None:
        self.stage, self.runner = stage, runner
        self._fixed, self._ready, self._splits = fixed, ready, splits
        self._slots: list[_Slot] = []
        self._addresses: tuple[int, ...] = ()

    @property
    def are_recorded(self) -> bool:
        return bool(self._slots)

    def record(self, recorder: Recorder, num_slots: int, example: Example) -> None:
        """Record all graphs of the stage. Nothing is computed. Raises TrainingError for what cannot be recorded."""
        observe = self.runner.observe
        try:
            self._slots = [self._recorded(recorder, number, example) for number in range(num_slots)]
        finally:
            self.runner.observe = observe
        self._addresses = self._addresses_now()

    def release(self) -> None:
        """Give graphs and memory back."""
        self._slots = []

    def check_addresses(self) -> None:
        """Raises RuntimeError if parameters or gradients have moved since they were recorded."""
        if self._slots and self._addresses_now() != self._addresses:
            raise RuntimeError(
                f"stage {self.stage}: parameters or gradients lie elsewhere than when its graphs were recorded"
            )

    def forward(self, slot: int, inputs: Tensors, payload: Any) -> tuple[Any, Any]:
        """(the module's output, the runner's result), both at their fixed addresses."""
        held = self._slots[slot]
        self._ready()
        self._fill(held.inputs, inputs, "message")
        self._fill(held.payload, tensors_of(payload), "microbatch")
        held.forward()
        return held.output, held.result

    def backward(self, slot: int, gradients: tuple[Tensor | None, ...]) -> Tensors:
        """B, or where backwards are split I; returns input gradients of their own."""
        held = self._slots[slot]
        self._fill(present(held.gradients), present(gradients), "gradient")
        held.backward()
        return tuple(gradient.clone() for gradient in held.input_gradients)

    def backward_weight(self, slot: int) -> None:
        """W, where backwards are split; nothing where they are whole."""
        replay = self._slots[slot].backward_weight
        if replay is not None:
            replay()

    def _recorded(self, recorder: Recorder, number: int, example: Example) -> _Slot:
        runner, pool = self.runner, recorder.pool()
        outputs: list[Any] = []
        runner.observe = lambda _, output: outputs.append(output)
        inputs = tuple(torch.zeros(spec.shape, dtype=spec.dtype, device=example.device) for spec in example.message)
        payload = mapped(example.payload, Tensor.clone)

        def record(what: str, work: Callable[[], Result]) -> tuple[Replay, Result]:
            try:
                return recorder.record(work, pool)
            except RuntimeError as error:
                cause = error.__context__ or error  # ending a broken recording raises once more
                if isinstance(cause, torch.OutOfMemoryError):
                    raise cause from None
                raise TrainingError(
                    f"the {what} of stage {self.stage} cannot be recorded as a CUDA graph: {cause}. What waits for the device cannot be, "
                    "nor what allocates past torch; leave --cuda-graph-impl out"
                ) from error

        forward, result = record("forward", lambda: runner.forward(number, inputs, payload, example.loss))
        slot = _Slot(inputs, tensors_of(payload), forward, mapped(outputs[0], Tensor.detach), result)
        # one a slot: what waits for W may hold the gradient as it came
        coming = () if example.loss is not None else tuple(t for t in result if t.is_floating_point())
        slot.gradients = (
            (None,)
            if example.loss is not None
            else tuple(torch.zeros(t.shape, dtype=t.dtype, device=t.device) for t in coming)
        )
        if self._splits:
            slot.backward, slot.input_gradients = record(
                "backward", lambda: runner.backward_input(number, slot.gradients)
            )
            slot.backward_weight, _ = record("weight gradients", lambda: runner.backward_weight(number))
        else:
            slot.backward, slot.input_gradients = record("backward", lambda: runner.backward(number, slot.gradients))
        return slot

    def _fill(self, fixed: Tensors, given: Tensors, what: str) -> None:
        if [(t.shape, t.dtype) for t in fixed] != [(t.shape, t.dtype) for t in given]:
            raise RuntimeError(
                f"stage {self.stage}: its graphs were recorded for a {what} of {[tuple(t.shape) for t in fixed]}, but "
                f"{[tuple(t.shape) for t in given]} came; leave --cuda-graph-impl out where sizes change"
            )
        for target, source in zip(fixed, given, strict=True):
            target.copy_(source)

    def _addresses_now(self) -> tuple[int, ...]:
        return tuple(tensor.data_ptr() for tensor in self._fixed())


class CapturedStage:
    """A stage as the engine of one row takes it (`engine.Stage`): replayed once its graphs are there, by its runner before.

    slots: of each microbatch of the row. Without gradients it is always the runner who computes.
    """

    def __init__(self, graphs: StageGraphs, slots: Mapping[int, int]) -> None:
        self._graphs, self._slots, self._runner = graphs, slots, graphs.runner

    def begin_row(self, trains: bool) -> None:
        self._runner.begin_row(trains)
        self._graphs.check_addresses()

    def forward(
        self, microbatch: int, inputs: Tensors, payload: Any, loss: Callable[[Any, Any], tuple[Tensor, Any]] | None
    ) -> Any:
        if not self._graphs.are_recorded or not torch.is_grad_enabled():
            return self._runner.forward(microbatch, inputs, payload, loss)
        output, result = self._graphs.forward(self._slots[microbatch], inputs, payload)
        if self._runner.observe is not None:
            self._runner.observe(microbatch, output)
        return result if loss is None else mapped(result, Tensor.clone)

    def backward(self, microbatch: int, gradients: tuple[Tensor | None, ...]) -> Tensors:
        if not self._graphs.are_recorded:
            return self._runner.backward(microbatch, gradients)
        input_gradients = self.backward_input(microbatch, gradients)
        self.backward_weight(microbatch)
        return input_gradients

    def backward_input(self, microbatch: int, gradients: tuple[Tensor | None, ...]) -> Tensors:
        if not self._graphs.are_recorded:
            return self._runner.backward_input(microbatch, gradients)
        return self._graphs.backward(self._slots[microbatch], gradients)

    def backward_weight(self, microbatch: int) -> None:
        if not self._graphs.are_recorded:
            return self._runner.backward_weight(microbatch)
        return self._graphs.backward_weight(self._slots[microbatch])

    def clear(self) -> None:
        self._runner.clear()


@dataclass
class RankGraphs:
    """When the graphs of a rank are recorded: between two steps, after the warm-up.

    stages: by number. num_slots: of each. last_stage: of the pipeline. warmup_steps: steps that run before, in which kernels are chosen and
    connections made. settle: called first, completes what still changes the parameters. example: what of a microbatch the graphs are
    recorded with. during: opened around the recording, which takes a while.
    """

    stages: Mapping[int, StageGraphs]
    num_slots: Mapping[int, int]
    last_stage: int
    warmup_steps: int
    device: torch.device
    recorder: Recorder = field(default_factory=CudaRecorder)
    settle: Callable[[], None] = lambda: None
    example: Callable[[Any], Any] = lambda payload: payload
    during: Callable[[], AbstractContextManager[Any]] = nullcontext
    _num_steps: int = 0

    def after_step(self, step: Step) -> None:
        """The row of a training step has been run, with microbatches and messages like those of all later ones."""
        self._num_steps += 1
        if self._num_steps < self.warmup_steps or all(graphs.are_recorded for graphs in self.stages.values()):
            return
        self.settle()
        # what cycles still hold of earlier backwards would bring the stream that those ran on into the recording
        gc.collect()
        with self.during(), torch.enable_grad():
            self._record(step)

    @gc_paused()  # a graph or an event that is freed meanwhile would break the recording
    def _record(self, step: Step) -> None:
        payload = self.example(step.microbatches[0])
        for stage, graphs in self.stages.items():
            message = step.message(stage - 1) if stage else ()
            loss = step.loss if stage == self.last_stage else None
            graphs.record(self.recorder, self.num_slots[stage], Example(message, payload, loss, self.device))

    def release(self) -> None:
        """Let everything run without graphs, the next step too; after it they are recorded again."""
        for graphs in self.stages.values():
            graphs.release()


def mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The value with its tensors changed: those of tuples, lists, dicts and dataclasses, at any depth."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple | list):
        return type(value)(mapped(part, change) for part in value)
    if isinstance(value, dict):
        return {key: mapped(part, change) for key, part in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.replace(
            value, **{f.name: mapped(getattr(value, f.name), change) for f in dataclasses.fields(value)}
        )
    return value


def tensors_of(value: Any) -> Tensors:
    """The tensors that `mapped` would change, in its order."""
    found: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    mapped(value, keep)
    return tuple(found)


def present(tensors: Iterable[Tensor | None]) -> Tensors:
    """Without those that are None."""
    return tuple(tensor for tensor in tensors if tensor is not None)
