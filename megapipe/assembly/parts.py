"""The parts of a stage as the engine runs them: attention | dispatch | experts | combine of each layer, and the head.

Each part with computation is a `StageRunner` of its own, so that tensors are detached at its borders, and its backward
runs whole or in halves. What passes between the parts of a layer with experts is

    (residual, weights, x, rows, order, routes)     [t, h], [t, k], [t, h] or None, [rows, h]; `MoE.route` has the rest

where x is the input of the shared experts and later their output; `rows` are in turn those to dispatch, those that were
dispatched to this rank, their results, and the results for this rank's rows. Gradients are the first four of these.

Dispatch and combine only start their all-to-all; whoever needs its result waits (`Exchange`). All of a stage use one
communicator, in the order of the row. The weighted sum of the results follows the combine and belongs to it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megapipe.comm.collectives import Work
from megapipe.model.block import Block
from megapipe.model.context import LayerContext
from megapipe.model.dispatch import Routes, start_exchange
from megapipe.model.microbatch import Microbatch
from megapipe.model.moe import MoE
from megapipe.model.segments import tensor_of
from megapipe.model.stage import GPTStage
from megapipe.pipeline.stage import Gradients, LossFunction, Pending, Stage, StageRunner, Tensors
from megapipe.schedule.parts import Part, Parts

RunBackward = Callable[[int, Gradients], Tensors]


@dataclass(eq=False)
class Exchange:
    """An all-to-all in flight. finish: makes the result of the part from the tensor that it fills."""

    _work: Work | None
    _finish: Callable[[], Any]

    def wait(self) -> Tensors:
        """Return the result of the part when it is there; called once."""
        if self._work is not None:
            self._work.wait()
        return self._finish()  # type: ignore[no-any-return]


@dataclass(eq=False)
class StageParts:
    """State that the parts of one stage share. runner: that of the whole stage, whose observer gets its output.
    frees_weights: the weights of the stage exist only until its last part has been issued.
    """

    module: GPTStage
    runner: StageRunner
    frees_weights: bool
    _contexts: dict[int, dict[int, LayerContext]] = field(default_factory=dict)  # by microbatch and layer

    def context(self, given: _Given, layer: int, hidden: Tensor) -> LayerContext:
        """Return a layer's context for a microbatch. hidden: any hidden states."""
        return self.contexts(given, hidden)[layer]

    def contexts(self, given: _Given, hidden: Tensor) -> dict[int, LayerContext]:
        """Return the contexts of all layers of the stage."""
        found = self._contexts.get(given.number)
        if found is None:
            found = self._contexts[given.number] = self.module.make_context(given.microbatch, hidden.dtype)
        return found

    def end_forward(self, microbatch: int) -> None:
        """Forget the contexts of a microbatch that has passed the stage."""
        self._contexts.pop(microbatch, None)

    def clear(self) -> None:
        self._contexts.clear()


@dataclass(eq=False)
class _Given:
    """The input of a part besides tensors, and what `MoE.route` found in it."""

    number: int
    microbatch: Microbatch
    routing: tuple[Tensor, Routes] | None = None
    context: LayerContext | None = None


class _Part:
    """A part with computation. is_first, is_last: of its stage; index: in the schedule of parts."""

    def __init__(self, shared: StageParts, index: int, layer: int, is_first: bool, is_last: bool) -> None:
        self.shared, self.layer, self.is_first, self.is_last = shared, layer, is_first, is_last
        self.runner = StageRunner(self.compute, shared.runner.weight_gradients, part=index)
        self.begin_row = shared.module.begin_row if is_first else lambda trains: None

    @property
    def block(self) -> Block:
        block = self.shared.module.decoder.layers[str(self.layer)]
        assert isinstance(block, Block)
        return block

    @property
    def experts(self) -> MoE:
        assert isinstance(self.block.mlp, MoE)
        return self.block.mlp

    def compute(self, *inputs: Any) -> Any:
        """Compute the part from tensors and a `_Given`; differentiable."""
        raise NotImplementedError

    def forward(self, microbatch: int, inputs: Tensors, payload: Any, loss: LossFunction | None) -> Any:
        """Run one forward; as `StageRunner.forward`."""
        given = _Given(microbatch, payload)
        output = self.run_forward(given, inputs)
        if self.is_last:
            self.shared.end_forward(microbatch)
        return output

    def run_forward(self, given: _Given, inputs: Tensors) -> Tensors | Pending:
        return self.run(given, inputs)

    def run(self, given: _Given, inputs: Tensors) -> Tensors:
        """Run `compute` with detached inputs."""
        self.runner.observe = self.shared.runner.observe if self.is_last else None
        return self.runner.forward(given.number, inputs, given, None)  # type: ignore[no-any-return]

    def backward(self, microbatch: int, gradients: Gradients) -> Tensors | Pending:
        """Compute input and weight gradients (op B)."""
        return self.run_backward(self.runner.backward, microbatch, gradients)

    def backward_input(self, microbatch: int, gradients: Gradients) -> Tensors | Pending:
        """Compute input gradients (op I)."""
        return self.run_backward(self.runner.backward_input, microbatch, gradients)

    def run_backward(self, run: RunBackward, microbatch: int, gradients: Gradients) -> Tensors | Pending:
        return run(microbatch, gradients)

    def backward_weight(self, microbatch: int) -> None:
        """Compute the weight gradients that wait since op I (op W)."""
        self.runner.backward_weight(microbatch)

    def clear(self) -> None:
        """Discard microbatches whose backward will not run."""
        self.runner.clear()
        self.shared.clear()


class _Attention(_Part):
    """The first branch of a layer; of the first layer with the embedding, where the stage has it."""

    def compute(self, *inputs: Any) -> Any:
        *hidden, given = inputs
        return self.attend(hidden[0] if hidden else None, given)

    def attend(self, hidden: Tensor | None, given: _Given) -> Tensor:
        if self.is_first:
            hidden = self.shared.module.embed(hidden, given.microbatch)
        assert hidden is not None
        return self.block.attend(hidden, self.shared.context(given, self.layer, hidden))


class _DenseMLP(_Part):
    """The second branch of a layer without experts."""

    def compute(self, *inputs: Any) -> Any:
        hidden, given = inputs
        block = self.block
        if block.mlp is None:
            return hidden
        return block.after_attention(hidden, self.shared.context(given, self.layer, hidden))


class _Head(_Part):
    """Final norm, output layer, loss and multi-token prediction, whose experts wait for their all-to-alls."""

    _number: int  # of the microbatch

    def compute(self, *inputs: Any) -> Any:
        (hidden, microbatch), module = inputs, self.shared.module
        given = _Given(self._number, microbatch)
        contexts = {} if module.mtp is None else self.shared.contexts(given, hidden)
        return module.run_head(hidden, microbatch, contexts)

    def forward(self, microbatch: int, inputs: Tensors, payload: Any, loss: LossFunction | None) -> Any:
        self.runner.observe, self._number = self.shared.runner.observe, microbatch
        report = self.runner.forward(microbatch, inputs, payload, loss)
        self.shared.end_forward(microbatch)
        return report


class _RoutedAttention(_Attention):
    """The first branch of a layer with experts, the norm of the second one, the router, and the rows to dispatch."""

    def compute(self, *inputs: Any) -> Any:
        *hidden, given = inputs
        residual = self.attend(hidden[0] if hidden else None, given)
        context = self.shared.context(given, self.layer, residual)
        x = self.block.normed(residual, context)
        weights, order, routes, rows = self.experts.route(x, context)
        given.routing = order, routes
        return (
            (residual, weights, rows)
            if self.experts.shared_experts is None
            else (residual, weights, rows, tensor_of(x))
        )

    def run_forward(self, given: _Given, inputs: Tensors) -> Any:
        residual, weights, rows, *x = self.run(given, inputs)
        assert given.routing is not None
        return residual, weights, x[0] if x else None, rows, *given.routing

    def run_backward(self, run: RunBackward, microbatch: int, gradients: Gradients) -> Tensors:
        residual, weights, x, rows = gradients
        return run(microbatch, (residual, weights, rows) if x is None else (residual, weights, rows, x))


class _Dispatch(_Part):
    """The all-to-all that brings rows to the ranks of their experts; nothing is computed."""

    def __init__(self, *place: Any) -> None:
        super().__init__(*place)
        self._routes: dict[int, Routes] = {}  # by microbatch

    def run_forward(self, given: _Given, inputs: Any) -> Pending:
        residual, weights, x, rows, order, routes = inputs
        self._routes[given.number] = routes
        received, work = start_exchange(rows, routes.sent, routes.received, routes.groups.ep)
        return Exchange(work, lambda: (residual, weights, x, received, order, routes))

    def run_backward(self, run: RunBackward, microbatch: int, gradients: Any) -> Pending:
        residual, weights, x, received = gradients
        routes = self._routes.pop(microbatch)
        rows, work = start_exchange(received, routes.received, routes.sent, routes.groups.ep)
        return Exchange(work, lambda: (residual, weights, x, rows))

    def clear(self) -> None:
        super().clear()
        self._routes.clear()


class _Experts(_Part):
    """The experts of this rank, and the shared experts."""

    def compute(self, *inputs: Any) -> Any:
        received, *x, given = inputs
        results = self.experts.run_experts(received, given.routing[1], given.context)
        shared = self.experts.shared_experts
        return (results,) if shared is None else (results, shared(*x, given.context))

    def run_forward(self, given: _Given, inputs: Any) -> Any:
        residual, weights, x, received, *routing = inputs
        given.routing, given.context = (routing[0], routing[1]), self.shared.context(given, self.layer, residual)
        results, *shared = self.run(given, (received,) if x is None else (received, x))
        return residual, weights, shared[0] if shared else None, results, *routing

    def run_backward(self, run: RunBackward, microbatch: int, gradients: Any) -> Any:
        residual, weights, shared, results = gradients
        received, *x = run(microbatch, (results,) if shared is None else (results, shared))
        return residual, weights, x[0] if x else None, received


class _Combine(_Part):
    """The all-to-all that brings the results back, then their weighted sum and the residual one."""

    def __init__(self, *place: Any) -> None:
        super().__init__(*place)
        self._routes: dict[int, Routes] = {}  # by microbatch

    def compute(self, *inputs: Any) -> Any:
        residual, weights, returned, *shared, given = inputs
        output = self.experts.weigh(returned, weights, given.routing[0]).view(residual.shape)
        update = output + shared[0] if shared else output
        return self.block.add_mlp(residual, update, given.context)

    def run_forward(self, given: _Given, inputs: Any) -> Tensors | Pending:
        residual, weights, shared, results, *routing = inputs
        given.routing = _, routes = routing[0], routing[1]
        given.context = self.shared.context(given, self.layer, residual)
        self._routes[given.number] = routes
        returned, work = start_exchange(results, routes.received, routes.sent, routes.groups.ep)
        tensors = (residual, weights, returned) if shared is None else (residual, weights, returned, shared)
        exchange = Exchange(work, lambda: self.run(given, tensors))
        # a norm after the experts reads weights
        is_late = self.shared.frees_weights and self.block.post_mlp_layernorm is not None
        return exchange.wait() if is_late else exchange

    def run_backward(self, run: RunBackward, microbatch: int, gradients: Any) -> Pending:
        residual, weights, returned, *shared = made = run(microbatch, gradients)
        for tensor in made:  # autograd makes them on the stream that completed the forward (StreamDeliveries)
            if tensor.device.type == "cuda":
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
        routes = self._routes.pop(microbatch)
        results, work = start_exchange(returned, routes.sent, routes.received, routes.groups.ep)
        return Exchange(work, lambda: (residual, weights, shared[0] if shared else None, results))

    def clear(self) -> None:
        super().clear()
        self._routes.clear()


_KINDS: dict[tuple[Part, bool], type[_Part]] = {  # by part, and whether the layer has experts
    (Part.ATTENTION, False): _Attention,
    (Part.ATTENTION, True): _RoutedAttention,
    (Part.DISPATCH, True): _Dispatch,
    (Part.MLP, False): _DenseMLP,
    (Part.MLP, True): _Experts,
    (Part.COMBINE, True): _Combine,
    (Part.HEAD, False): _Head,
}


def part_runners(
    parts: Parts, stage: int, module: GPTStage, runner: StageRunner, frees_weights: bool
) -> dict[int, Stage]:
    """Return the runners of the parts of one stage, by their index in `parts`. Others: as in `StageParts`."""
    shared, indices = StageParts(module, runner, frees_weights), parts.of_stage[stage]
    found: dict[int, Stage] = {}
    for index in indices:
        _, layer, part = parts.sites[index]
        block = module.decoder.layers[str(layer)] if part is not Part.HEAD else None
        kind = _KINDS[part, isinstance(getattr(block, "mlp", None), MoE)]
        found[index] = kind(shared, index, layer, index == indices[0], index == indices[-1])
    return found
