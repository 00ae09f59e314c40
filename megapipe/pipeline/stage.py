"""One stage of a pipeline on its rank: its forward, and its backward whole or in two halves."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, _engine_run_backward, get_gradient_edge

from megapipe.tensor_parallel.gradients import WeightQueue

Tensors = tuple[Tensor, ...]
Gradients = tuple[Tensor | None, ...]
LossFunction = Callable[[Any, Any], tuple[Tensor, Any]]  # (output, payload) -> (scalar to differentiate, report)


class Pending(Protocol):
    """A result that is on its way: the output or the input gradient of an all-to-all."""

    def wait(self) -> Tensors:
        """Return the result when it is there; called once. On a GPU the current stream waits, not the host."""

    def record_stream(self, stream: Any) -> None:
        """Keep the memory of what is sent and received until `stream`, which will wait, has done so."""


class Stage(Protocol):
    """The interface that the engine needs of a stage or of a part of one: `StageRunner`, `graphs.CapturedStage`, or
    the parts of `pipeline.parts`. A tuple between two parts of a stage may hold other things than tensors.
    """

    @property
    def begin_row(self) -> Callable[[], None]: ...
    def forward(self, microbatch: int, inputs: Tensors, payload: Any, loss: LossFunction | None) -> Any: ...
    def backward(self, microbatch: int, gradients: Gradients) -> Tensors | Pending: ...
    def backward_input(self, microbatch: int, gradients: Gradients) -> Tensors | Pending: ...
    def backward_weight(self, microbatch: int) -> None: ...
    def clear(self) -> None: ...


class _Enter(torch.autograd.Function):
    """Begins a graph at a tensor that only the operations that save it keep, unlike a leaf.

    anchor: a tensor that requires a gradient, and gets none. place: a tensor of one element that is expanded to the
    shape; its .grad becomes the gradient.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensor: Tensor, place: Tensor) -> Tensor:
        ctx.place = place
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        (ctx.place.grad,) = gradients
        return None, None, None


@dataclass
class _Kept:
    """The state of one microbatch from F to B."""

    inputs: Tensors  # floating-point leaves, or the places of their gradients
    # in place of outputs, so that sent tensors can be freed; None for an output without a graph, whose gradient is
    # ignored
    edges: tuple[GradientEdge | None, ...]
    scalar: tuple[torch.dtype, torch.device] | None  # of the last stage's loss
    replays: tuple[Callable[[], None], ...]  # of what the forward has dropped


def _edge(tensor: Tensor) -> GradientEdge:
    """Return the gradient edge of a tensor; torch's own function makes another tensor, which only some nodes need."""
    node = tensor.grad_fn
    if node is None or isinstance(node, BackwardCFunction):
        return get_gradient_edge(tensor)
    return GradientEdge(node, tensor.output_nr)


class StageRunner:
    """Runs `module(*inputs, microbatch)` and its backward for one stage.

    module: called with the tensors from the previous stage (none for the first) and the microbatch; returns a tensor or
    a tuple of tensors: the message to the next stage or, on the last stage, the input of `loss`. Tensors that are not
    floating-point are only sent forward; a floating-point one that a stage does not use has gradient zero.
    weight_gradients: needed only by schedules that split the backward (ops I and W).
    begin_row: called at the start of a row. observe: if set, called with every output.
    part: what distinguishes its waiting weight gradients from those of others that share the queue.
    replays: where a forward of the module leaves what computes again what it drops; for op RECOMPUTE.
    """

    def __init__(
        self,
        module: Callable[..., Any],
        weight_gradients: WeightQueue | None = None,
        begin_row: Callable[[], None] = lambda: None,
        part: Hashable = None,
        replays: list[Callable[[], None]] | None = None,
    ) -> None:
        self.module = module
        self._part = part
        self.begin_row = begin_row
        self.weight_gradients = weight_gradients
        self._replays = [] if replays is None else replays
        self.observe: Callable[[int, Any], None] | None = None
        self.releases_inputs = False  # only operations that save an input keep it for the backward, not the runner
        self._kept: dict[int, _Kept] = {}

    def forward(self, microbatch: int, inputs: Tensors, payload: Any, loss: LossFunction | None) -> Any:
        """Run one forward and keep what its backward needs under the microbatch's number.

        loss: on the last stage, maps (output, payload) to (scalar to differentiate, report); the report is returned.
        Elsewhere the detached outputs are returned, a tuple. Without gradients (torch.no_grad) nothing is kept.
        """
        training = torch.is_grad_enabled()
        if training:
            inputs, kept = self._begin_graph(inputs)
        output = self.module(*inputs, payload)
        if self.observe is not None:
            self.observe(microbatch, output)
        report = scalar = None
        if loss is not None:
            output, report = loss(output, payload)
            if training:
                scalar = output.dtype, output.device
                if output.shape:
                    raise ValueError(f"the loss must be a scalar of shape [], got shape {list(output.shape)}")
        outputs = output if isinstance(output, tuple) else (output,)
        if training:
            edges = tuple([_edge(t) if t.requires_grad else None for t in outputs if t.is_floating_point()])
            replays = tuple(self._replays)
            self._replays.clear()
            self._kept[microbatch] = _Kept(kept, edges, scalar, replays)
        return report if loss is not None else tuple([t.detach() for t in outputs])

    def recompute(self, microbatch: int) -> None:
        """Compute again what the forward has dropped, ahead of its backward (op RECOMPUTE)."""
        with torch.enable_grad():
            for replay in self._kept[microbatch].replays:
                replay()

    def _begin_graph(self, inputs: Tensors) -> tuple[Tensors, Tensors]:
        """Return the inputs as the start of a graph, and what will have the gradients of the floating-point ones."""
        if not self.releases_inputs:
            leaves = tuple([t.detach().requires_grad_(t.is_floating_point()) for t in inputs])
            return leaves, tuple([t for t in leaves if t.requires_grad])
        anchor = torch.empty(0, requires_grad=True)
        places = [t.new_empty(()).expand(t.shape) for t in inputs]
        pairs = zip(inputs, places, strict=True)
        begun = tuple([_Enter.apply(anchor, *each) if each[0].is_floating_point() else each[0] for each in pairs])
        return begun, tuple([place for place in places if place.is_floating_point()])

    def backward(self, microbatch: int, gradients: Gradients) -> Tensors:
        """Compute input and weight gradients together (op B) and return the gradients of the floating-point inputs.

        gradients: those of the floating-point outputs; (None,) for the loss means 1.
        """
        kept = self._kept.pop(microbatch)
        if kept.scalar is not None and gradients[0] is None:
            dtype, device = kept.scalar
            gradients = (torch.ones((), dtype=dtype, device=device),)
        edges = tuple([edge for edge in kept.edges if edge is not None])
        if len(edges) < len(kept.edges):
            gradients = tuple([g for edge, g in zip(kept.edges, gradients, strict=True) if edge is not None])
        if edges:
            # torch.autograd.backward first checks shapes in Python, which takes longer than the rest of its overhead;
            # the engine in C++ checks them again
            _engine_run_backward(edges, gradients, False, False, (), allow_unreachable=True, accumulate_grad=True)
        return tuple([torch.zeros_like(t) if (grad := t.grad) is None else grad for t in kept.inputs])

    def backward_input(self, microbatch: int, gradients: Gradients) -> Tensors:
        """Compute only input gradients (op I); queue those of weights for `backward_weight`."""
        queue = self._queue()
        queue.defer(self._key(microbatch))
        try:
            return self.backward(microbatch, gradients)
        finally:
            queue.immediate()

    def backward_weight(self, microbatch: int) -> None:
        """Compute the weight gradients that `backward_input` queued (op W)."""
        self._queue().run(self._key(microbatch))

    def clear(self) -> None:
        """Discard microbatches whose backward will not run, for example after an error."""
        self._kept.clear()
        self._replays.clear()
        if self.weight_gradients is not None:
            self.weight_gradients.clear()

    @property
    def num_live(self) -> int:
        """Microbatches between their F and their B."""
        return len(self._kept)

    def _key(self, microbatch: int) -> Hashable:
        return microbatch if self._part is None else (self._part, microbatch)

    def _queue(self) -> WeightQueue:
        if self.weight_gradients is None:
            raise ValueError(
                "this schedule splits the backward (I and W): the stage needs `weight_gradients`, its linears' queue"
            )
        return self.weight_gradients
