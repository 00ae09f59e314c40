"""A layer as one list of elements, in the order of a forward, and `run`, which walks it.

    Segment    a pure function of tensors: norm, heads, rotation, activation, residual sum. No collectives, nothing
               recorded, no weight gradients that wait. What it reads besides (parameters, tables, masks) are arguments.
    Operator   the rest: linears with their collectives, core attention, routing, exchanges between ranks, the products
               of experts, kernels of libraries and functions of extensions
    Again      a range that the backward runs again instead of keeping its output for the linear after it

A layer's state is the residual stream, [s, b, h], and the values of the branch at hand, which starts with the stream
alone. The segment that ends a branch adds to the stream (`joins`).

With a `Compiler` adjacent segments, the same functions, run as one graph of torch.compile without breaks. Operators
stay outside: what they queue, record and send are side effects that a graph must not contain. Layers whose segments are
equal share graphs: parameters are arguments, and no address of one is captured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property, partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from megapipe.gpu.kernels import own_code
from megapipe.model.recompute import KeptResults, RecomputedSegment
from megapipe.tensor_parallel.gradients import InputRecompute

Values = tuple[Any, ...]  # of a branch: tensors, `Remade` tensors, and what operators pass to each other
Compile = Callable[..., Callable[..., Any]]  # (function, dynamic=...) -> the compiled function
ALL = slice(None)
FIRST = slice(0, 1)


class Context(Protocol):
    """The part of a `LayerContext` that `run` reads."""

    @property
    def compiler(self) -> Compiler | None:
        """Compiles segments; None: they run as written."""


class Remade(NamedTuple):
    """A tensor of a branch that a linear need not keep. again: how its backward makes the tensor again."""

    tensor: Tensor
    again: Callable[[], InputRecompute]


class Segment(NamedTuple):
    """A pure function of tensors.

    function: (values, operands) -> values, one value as a tensor; equal for segments that may share a graph.
    operands: (context, a tensor like the stream) -> parameters, tables, masks. at: the values of the branch that it
    takes and replaces. joins: takes the stream first, and returns the new one. module: is called instead where nothing
    is compiled, for its hooks. has_rows: the first dimension, of rows, changes from call to call.
    """

    name: str
    function: Callable[..., Any]
    operands: Callable[[Any, Tensor], tuple[Tensor | None, ...]] = lambda context, like: ()
    at: slice = ALL
    joins: bool = False
    module: nn.Module | None = None
    has_rows: bool = False


class Operator(NamedTuple):
    """Any other element. function: (context, values) -> values, one value as itself."""

    name: str
    function: Callable[..., Any]
    at: slice = ALL


class Again(NamedTuple):
    """A range of a branch that the backward runs again. Its one output goes to a linear, which does not save it; or,
    with `kept`, to anything.

    kept: makes the results that the forward keeps for the recompute; `give` puts them into the context.
    """

    elements: Elements
    at: slice = ALL
    kept: Callable[[], KeptResults] | None = None
    give: Callable[[Any, Any], Any] = lambda context, kept: context


Element = Segment | Operator | Again


class Elements(tuple[Element, ...]):
    """Elements in the order of a forward."""

    @cached_property
    def singly(self) -> tuple[tuple[Element, ...], ...]:
        """Each element on its own."""
        return tuple((element,) for element in self)

    @cached_property
    def merged(self) -> tuple[tuple[Element, ...], ...]:
        """Adjacent segments of a whole branch together, other elements on their own."""
        groups: list[list[Element]] = []
        for element in self:
            may_merge = isinstance(element, Segment) and element.at == ALL and not element.has_rows
            if groups and may_merge and isinstance(groups[-1][0], Segment) and groups[-1][0].at == ALL:
                groups[-1].append(element)
            else:
                groups.append([element])
        return tuple(map(tuple, groups))

    @cached_property
    def is_pure(self) -> bool:
        """True if all elements are segments, which keep their inputs anyway."""
        return all(isinstance(element, Segment) for element in self)


NOTHING = Elements()


def again_if(recomputes: bool, elements: Elements, at: slice = ALL) -> Elements:
    """Return elements, as one range that is run again if `recomputes`. at: the values that it takes."""
    return Elements([Again(elements, at)]) if recomputes and elements else elements


class Compiler:
    """torch.compile for the segments of a stage, one graph for adjacent ones.

    shapes: of the hidden states of training and evaluation, several with slices; others, as in generation, run as
    written. compile: torch.compile with its options.
    """

    def __init__(self, shapes: Iterable[tuple[int, ...]], compile: Compile | None = None) -> None:
        self.shapes = frozenset(shapes)
        # fullgraph: a graph break is an error
        self._compile = compile or partial(torch.compile, fullgraph=True)
        # by (function, joins) of each segment, has_rows, and the shapes of the values, without the number of rows
        self._functions: dict[tuple[Any, ...], Callable[..., Any]] = {}

    def accepts(self, hidden: Tensor) -> bool:
        """Return True for hidden states of training and evaluation."""
        return tuple(hidden.shape) in self.shapes

    def function(self, segments: tuple[Segment, ...], values: tuple[Tensor, ...]) -> Callable[..., Any]:
        """Return (stream or None, values, operands of each segment) -> (stream, values), compiled for such values."""
        steps = tuple((segment.function, segment.joins) for segment in segments)
        # another shape is another function, since kernels for any size are slow; but rows have any number
        has_rows = segments[0].has_rows
        key = steps, has_rows, tuple(value.shape[has_rows:] for value in values)
        if key not in self._functions:

            def fused(stream: Tensor | None, values: Values, operands: tuple[Values, ...]) -> tuple[Any, Values]:
                for (function, joins), own in zip(steps, operands, strict=True):
                    if joins:
                        stream, values = function(stream, *values, *own), ()
                    else:
                        made = function(*(values or (stream,)), *own)
                        values = made if type(made) is tuple else (made,)
                return stream, values

            for value in values * has_rows:
                torch._dynamo.maybe_mark_dynamic(value, 0)  # type: ignore[attr-defined]
            fused.__name__ = "_and_".join(segment.name for segment in segments)
            self._functions[key] = self._compile(own_code(fused, key[1:]), dynamic=None if has_rows else False)
        return self._functions[key]


def run(elements: Elements, stream: Tensor | None, values: Values, context: Context) -> tuple[Tensor | None, Values]:
    """Run elements; return the stream and the values of the branch. stream: None within a branch."""
    state, compiler = list(values), context.compiler
    for group in elements.singly if compiler is None else elements.merged:
        element = group[0]
        taken = state[element.at]
        if isinstance(element, Operator):
            made = element.function(context, *taken)
        elif isinstance(element, Again):
            made = _run_again(element, tuple(map(tensor_of, taken)), context)
        else:
            stream, made = _run_segments(group, stream, tuple(map(tensor_of, taken)), context)  # type: ignore[arg-type]
        del taken  # what an element has consumed is not held while the next one runs
        state[element.at] = made if type(made) is tuple else (made,)
    return stream, tuple(state)


def run_branch(elements: Elements, values: Values, context: Context) -> Values:
    """Run elements within a branch; return its values."""
    return run(elements, None, values, context)[1]


def _run_segments(
    segments: tuple[Segment, ...], stream: Tensor | None, values: tuple[Tensor, ...], context: Context
) -> tuple[Tensor | None, Values]:
    """Return the stream and the values that segments replace; after a join the stream alone."""
    joins, compiler, segment = any(each.joins for each in segments), context.compiler, segments[0]
    like = values[0] if stream is None else stream
    # torch makes graphs of their own for no row and for one
    if compiler is not None and not (segment.has_rows and values[0].shape[0] < 2):
        operands = tuple(each.operands(context, like) for each in segments)
        joined, made = compiler.function(segments, values)(stream if joins else None, values, operands)
        return (joined, made or (joined,)) if joins else (stream, made)
    for segment in segments:
        if segment.module is not None:
            made = segment.module(*values)
        elif segment.joins:
            made = stream = segment.function(stream, *values, *segment.operands(context, like))
        else:
            made = segment.function(*values, *segment.operands(context, like))
        values = made if type(made) is tuple else (made,)
    return stream, values


def _run_again(element: Again, inputs: tuple[Tensor, ...], context: Context) -> Tensor | Remade:
    kept = None if element.kept is None else element.kept()
    within = context if kept is None else element.give(context, kept)

    def again(*inputs: Tensor) -> Tensor:
        (output,) = run_branch(element.elements, inputs, within)
        return tensor_of(output)  # type: ignore[no-any-return]

    if element.elements.is_pure:
        return Remade(again(*inputs), lambda: InputRecompute(again, inputs))
    segment = RecomputedSegment(again, kept)
    output = segment(*inputs)
    return output if kept is not None else Remade(output, lambda: segment.input_recompute(*inputs))


def tensor_of(value: Any) -> Any:
    """Return the tensor of a `Remade` one, other values as they are."""
    return value.tensor if isinstance(value, Remade) else value


def input_recompute(value: Any) -> InputRecompute | None:
    """Return how a value is made again; None if it is to be saved."""
    return value.again() if isinstance(value, Remade) else None


def linear(module: nn.Module, x: Tensor | Remade) -> Tensor:
    """Return module(x); a linear that can recompute its input does not save a `Remade` one."""
    if isinstance(x, Remade) and getattr(module, "can_recompute_input", True):
        return module(x.tensor, x.again())  # type: ignore[no-any-return]
    return module(tensor_of(x))  # type: ignore[no-any-return]


def linear_element(name: str, module: nn.Module, at: slice = ALL) -> Operator:
    """Return the operator of a linear of one value."""
    return Operator(name, lambda context, x: linear(module, x), at)
