"""The parts of a stage as the engine runs them: attention | dispatch | experts | combine of each layer, and the head.

The parts of a layer are its list of elements (`model.segments`), cut at the exchanges of its experts. Each part with
computation is a `StageRunner` of its own, so that tensors are detached at its borders, and its backward runs whole or
in halves. What passes between the parts of a layer is the state of that list: the residual stream and the values of the
branch. What comes back has the gradient of each of them, None for what has none.

Dispatch and combine only start their all-to-all; whoever needs its result waits (`Exchange`). All of a stage use one
communicator, in the order of the row. The elements behind the combine belong to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megapipe.comm.collectives import Work
from megapipe.model.block import Block
from megapipe.model.context import LayerContext
from megapipe.model.dispatch import Routes, routes_of
from megapipe.model.microbatch import Microbatch
from megapipe.model.moe import MoE
from megapipe.model.routing import Routing
from megapipe.model.segments import FIRST, NOTHING, Elements, Operator, Segment, tensor_of
from megapipe.model.stage import GPTStage
from megapipe.pipeline.stage import Gradients, LossFunction, Pending, Stage, StageRunner, Tensors
from megapipe.schedule.parts import NETWORK_PARTS, Part, Parts

RunBackward = Callable[[int, Gradients], Tensors]
State = tuple[Any, ...]  # the residual stream and the values of a branch, in a backward their gradients


@dataclass(eq=False)
class Exchange:
    """All-to-alls in flight. finish: makes the result of the part from the tensors that they fill."""

    _works: tuple[Work | None, ...]
    _finish: Callable[[], Any]

    def wait(self) -> Tensors:
        """Return the result of the part when it is there; called once."""
        for work in self._works:
            if work is not None:
                work.wait()
        return self._finish()  # type: ignore[no-any-return]

    def record_stream(self, stream: Any) -> None:
        """Keep the memory of what is sent and received until `stream`, which will wait, has done so."""
        for work in self._works:
            if work is not None:
                work.record_stream(stream)


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
    """The input of a part besides tensors. state: of the layer, before the part and then behind it."""

    number: int
    microbatch: Microbatch
    state: State
    context: LayerContext | None = None
    taken: tuple[int, ...] = ()  # the places in the state of the tensors that the part is given
    made: tuple[int, ...] = ()  # and of those that it returns


class _Part:
    """A part with computation. is_first, is_last: of its stage; index: in the schedule of parts."""

    def __init__(self, shared: StageParts, index: int, layer: int, is_first: bool, is_last: bool) -> None:
        self.shared, self.layer, self.is_first, self.is_last = shared, layer, is_first, is_last
        self.runner = StageRunner(self.compute, shared.runner.weight_gradients, part=index)
        self.begin_row = shared.module.begin_row if is_first else lambda: None

    def compute(self, *inputs: Any) -> Any:
        """Compute the part from tensors and a `_Given`; differentiable."""
        raise NotImplementedError

    def forward(self, microbatch: int, inputs: State, payload: Any, loss: LossFunction | None) -> Any:
        """Run one forward; as `StageRunner.forward`."""
        output = self.run_forward(_Given(microbatch, payload, inputs))
        if self.is_last:
            self.shared.end_forward(microbatch)
        return output

    def run_forward(self, given: _Given) -> State | Pending:
        """Return the state behind the part."""
        raise NotImplementedError

    def backward(self, microbatch: int, gradients: State) -> State | Pending:
        """Compute input and weight gradients (op B)."""
        return self.run_backward(self.runner.backward, microbatch, gradients)

    def backward_input(self, microbatch: int, gradients: State) -> State | Pending:
        """Compute input gradients (op I)."""
        return self.run_backward(self.runner.backward_input, microbatch, gradients)

    def run_backward(self, run: RunBackward, microbatch: int, gradients: State) -> State | Pending:
        return run(microbatch, gradients)

    def backward_weight(self, microbatch: int) -> None:
        """Compute the weight gradients that wait since op I (op W)."""
        self.runner.backward_weight(microbatch)

    def clear(self) -> None:
        """Discard microbatches whose backward will not run."""
        self.runner.clear()
        self.shared.clear()


class _Head(_Part):
    """Final norm, output layer, loss and multi-token prediction, whose experts wait for their all-to-alls."""

    _number: int  # of the microbatch

    def compute(self, *inputs: Any) -> Any:
        (hidden, microbatch), module = inputs, self.shared.module
        given = _Given(self._number, microbatch, ())
        contexts = {} if module.mtp is None else self.shared.contexts(given, hidden)
        return module.run_head(hidden, microbatch, contexts)

    def forward(self, microbatch: int, inputs: State, payload: Any, loss: LossFunction | None) -> Any:
        self.runner.observe, self._number = self.shared.runner.observe, microbatch
        report = self.runner.forward(microbatch, inputs, payload, loss)
        self.shared.end_forward(microbatch)
        return report


class _Elements(_Part):
    """Elements of a layer; in the first part of a stage behind the embedding, where the stage has it."""

    # of the last forward, and of all: the length of the state before it, the places of what has gradients, and of what
    # it leaves alone
    _length: int
    _taken: tuple[int, ...]
    _made: tuple[int, ...]
    _left: frozenset[int]

    def __init__(self, block: Block, part: Part, *place: Any) -> None:
        super().__init__(*place)
        self.block, self.elements = block, elements_of_parts(block)[part]

    def compute(self, *inputs: Any) -> Any:
        *tensors, given = inputs
        before, state, module = given.state, list(given.state), self.shared.module
        for place, tensor in zip(given.taken, tensors, strict=True):
            state[place] = tensor
        if self.is_first:
            state = [module.embed(state[0] if state else None, given.microbatch)]
        stream, *values = state
        context = given.context or self.shared.context(given, self.layer, stream)
        given.state = tuple(map(tensor_of, self.block(stream, context, self.elements, tuple(values))))
        given.made = tuple(
            place
            for place, value in enumerate(given.state)
            if isinstance(value, Tensor) and not (place < len(before) and value is before[place])
        )
        return tuple(given.state[place] for place in given.made)

    def run_forward(self, given: _Given) -> State | Pending:
        return self.run(given)

    def run(self, given: _Given) -> State:
        """Run `compute` with detached inputs."""
        state = given.state
        given.taken = tuple(place for place in self._read(len(state)) if isinstance(state[place], Tensor))
        self._length, self._taken = len(state), _with_gradients(state, given.taken)
        self.runner.observe = self.shared.runner.observe if self.is_last else None
        made = self.runner.forward(given.number, tuple(state[place] for place in given.taken), given, None)
        behind = list(given.state)
        for place, tensor in zip(given.made, made, strict=True):
            behind[place] = tensor
        self._made = _with_gradients(behind, given.made)
        self._left = frozenset(range(min(len(state), len(behind)))) - set(given.made)
        return tuple(behind)

    def run_backward(self, run: RunBackward, microbatch: int, gradients: State) -> Any:
        """Return the gradients of the state before the part; those of what it leaves alone are passed on."""
        found = dict(zip(self._taken, run(microbatch, tuple(gradients[place] for place in self._made)), strict=True))
        passed = {place: gradients[place] for place in self._left}
        return tuple(found.get(place, passed.get(place)) for place in range(self._length))

    def _read(self, length: int) -> list[int]:
        """Return the places that the elements read in a state of this length."""
        values = range(1, length)
        read = {place for element in self.elements for place in values[element.at]}
        if length == 1 or any(isinstance(element, Segment) and element.joins for element in self.elements):
            read.add(0)
        return sorted(read) if length else []


def _with_gradients(state: Sequence[Any], places: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(place for place in places if state[place].is_floating_point())


class _AllToAll(_Elements):
    """The all-to-all that brings rows to the ranks of their experts, or back, and the elements behind it, if any."""

    def __init__(self, block: Block, part: Part, *place: Any) -> None:
        super().__init__(block, part, *place)
        self.returns = part is Part.COMBINE
        self.moved = 1 if self.returns else 2  # results; weights and rows
        self._routes: dict[int, Routes] = {}  # by microbatch

    def run_forward(self, given: _Given) -> State | Pending:
        def finish(state: State) -> State:
            given.state = state
            return self.run(given) if self.elements else state

        # now, since the stage may have ended its forward, and forgotten its contexts, when the rows are there
        given.context = self.shared.context(given, self.layer, given.state[0])
        routes = routes_of(next(each for each in given.state if isinstance(each, Routing)))
        self._routes[given.number] = routes
        exchange, given.state = _exchange(given.state, self.moved, routes, self.returns, finish), ()
        # a norm after the experts reads weights
        is_late = self.returns and self.shared.frees_weights and self.block.post_mlp_layernorm is not None
        return exchange.wait() if is_late else exchange

    def run_backward(self, run: RunBackward, microbatch: int, gradients: State) -> Pending:
        made: State = super().run_backward(run, microbatch, gradients) if self.elements else gradients
        for tensor in made if self.elements else ():
            # autograd makes them on the stream that completed the forward (StreamDeliveries)
            if tensor is not None and tensor.device.type == "cuda":
                tensor.record_stream(torch.cuda.current_stream(tensor.device))
        return _exchange(made, self.moved, self._routes.pop(microbatch), not self.returns, lambda state: state)

    def clear(self) -> None:
        super().clear()
        self._routes.clear()


def _exchange(state: State, moved: int, routes: Routes, returns: bool, finish: Callable[[State], State]) -> Exchange:
    """Start to send the last `moved` values of a state, or their gradients, along routes. returns: the way back."""
    start = routes.start_combine if returns else routes.start_dispatch
    works, fill = zip(*map(start, state[-moved:]), strict=True)
    return Exchange(works, lambda: finish((*state[:-moved], *(make() for make in fill))))


def elements_of_parts(block: Block) -> dict[Part, Elements]:
    """Return the elements of the parts of a layer. Of those behind the exchanges of its experts the shared ones, which
    do not read what comes back, run with the experts.
    """
    if not isinstance(block.mlp, MoE):
        return {Part.ATTENTION: block.attention_branch, Part.MLP: block.mlp_branch}
    elements = block.elements
    places = {each.name: place for place, each in enumerate(elements) if isinstance(each, Operator)}
    dispatch, combine = places["dispatch"], places["combine"]
    behind = elements[combine + 1 :]
    return {
        Part.ATTENTION: Elements(elements[:dispatch]),
        Part.DISPATCH: NOTHING,
        Part.MLP: Elements([*elements[dispatch + 1 : combine], *(each for each in behind if each.at == FIRST)]),
        Part.COMBINE: Elements(each for each in behind if each.at != FIRST),
    }


def part_runners(
    parts: Parts, stage: int, module: GPTStage, runner: StageRunner, frees_weights: bool
) -> dict[int, Stage]:
    """Return the runners of the parts of one stage, by their index in `parts`. Others: as in `StageParts`."""
    shared, indices = StageParts(module, runner, frees_weights), parts.of_stage[stage]
    found: dict[int, Stage] = {}
    for index in indices:
        _, layer, part = parts.sites[index]
        place = shared, index, layer, index == indices[0], index == indices[-1]
        if part is Part.HEAD:
            found[index] = _Head(*place)
            continue
        block = module.decoder.layers[str(layer)]
        assert isinstance(block, Block)
        found[index] = (_AllToAll if part in NETWORK_PARTS else _Elements)(block, part, *place)
    return found
