"""`Recorder`: the bytes that the run of some layers makes and keeps, its products, core attention and messages, each
with the element of a layer that it is of.
"""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count, islice
from typing import Any

import torch
from torch import Tensor

from megapipe.comm.groups import Traffic
from megapipe.layers.table import Kept
from megapipe.model.block import Block
from megapipe.model.context import LayerContext
from megapipe.model.embedding_and_head import Embedding
from megapipe.model.experts import ExpertWeights
from megapipe.model.segments import Again, Element, Elements, Operator
from megapipe.model.stage import GPTStage
from megapipe.schedule.action import Op
from megapipe.tensor_parallel.gemms import Gemms, RowGroups
from megapipe.tensor_parallel.gradients import QueuedGradient, WeightQueue
from megapipe.tensor_parallel.linear import ParallelLinear
from megapipe.trace.attention import CoreAttention
from megapipe.trace.meta import LiveBytes
from megapipe.trace.traced import CORE_ATTENTION, OUTPUT_LAYER, STAGE, AttentionWork, Message, Product

# labels: what is counted, what of it a backward computes again, and what passes between stages or parts
STEP, AGAIN, MESSAGES = "step", "again", "messages"
WEIGHTS = "weights", "fp8 weights"
PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.addmm_)
MULTIPLIES = {  # methods of `Gemms`
    **dict.fromkeys(("forward", "forward_chunks", "forward_groups"), Op.F),
    **dict.fromkeys(("input_gradient", "input_gradient_chunks", "input_gradient_groups"), Op.I),
    **dict.fromkeys(("add_weight_gradient", "add_weight_gradient_groups"), Op.W),
}


class Recorder(LiveBytes):
    """Counts live bytes; those with other labels than these (weights, masks, the microbatch) aside.

    phase: F, B, I or W. In a whole B the products of weight gradients are W's.
    """

    def __init__(self, *labels: str) -> None:
        super().__init__()
        self._labels = labels
        self.phase = Op.F
        self._levels: list[int] = []  # after each new tensor, since `watch`
        self.replayed: list[int] = []  # likewise, of what a backward computes again
        self._element = self._here = STAGE  # the element that runs, and within it perhaps a linear
        # the elements that make autograd's nodes, each with the number of its first one
        self._first: list[int] = [0]
        self._watched, self._outer = 0, STAGE  # the first node since `watch`, and the element of the last one before
        self._elements: list[str] = [STAGE]
        self._products: dict[Product, tuple[int, int]] = {}  # without their sizes -> these
        self._messages: dict[Message, tuple[int, int]] = {}  # likewise
        self._attention: dict[AttentionWork, tuple[int, int]] = {}  # likewise
        self._core: CoreAttention | None = None  # of the layer that has run last
        self._multiplies = False  # within a method of `Gemms`
        self._copies: set[int] = set()  # addresses of storages with the values of one weight
        self.reads_weights = False  # in W
        # of every storage, by the address that only live ones have: its number, element, bytes of one of its values
        self._made: dict[int, tuple[int, str, int]] = {}
        self._numbers = count()

    @property
    def is_backward(self) -> bool:
        return self.phase is not Op.F

    @property
    def products(self) -> tuple[Product, ...]:
        return tuple(each._replace(times=times, tokens=tokens) for each, (times, tokens) in self._products.items())

    @property
    def messages(self) -> tuple[Message, ...]:
        return tuple(each._replace(times=times, num_bytes=size) for each, (times, size) in self._messages.items())

    @property
    def attention(self) -> tuple[AttentionWork, ...]:
        return tuple(each._replace(flops=flops, moved_bytes=size) for each, (flops, size) in self._attention.items())

    def begin_forward(self) -> None:
        """Forget products, attention and messages of the past."""
        self._products, self._attention, self._messages = {}, {}, {}

    @property
    def level(self) -> int:
        """Bytes that are counted and alive."""
        return sum(self.by_label[label] for label in self._labels)

    def watch(self) -> int:
        """Return the level, and note it whenever a tensor is made from now on."""
        self._levels, self.replayed = [self.level], []
        self._make_nodes(self._here)
        self._watched, self._outer = self._first[-1], STAGE
        return self.level

    def levels_over(self, level: int) -> tuple[int, ...]:
        """Return the levels since `watch`, over this one."""
        return tuple(each - level for each in self._levels)

    def alive(self) -> dict[int, Kept]:
        """Return the tensors that are counted and alive, in the order in which they were made, by number."""
        found = {}
        for address, (_, size, label) in self._live.items():
            if label in self._labels:
                number, element, element_bytes = self._made[address]
                found[number] = Kept(element, size // element_bytes, element_bytes)
        return found

    def number_of(self, tensor: Tensor) -> int | None:
        """Return the number of a tensor that is counted, None for others."""
        address = tensor.untyped_storage()._cdata
        return self._made[address][0] if address in self._live and self._live[address][2] in self._labels else None

    def follow_elements(self, stage: GPTStage, fp8: tuple[str, ...]) -> None:
        """Let every element of the stage's layers, and every linear, give its name to what it makes. fp8: the layers
        whose linears multiply in 8 bits.
        """
        for path, layer in stage.named_modules():
            name, is_fp8 = path, path.startswith(fp8)
            if path.startswith("decoder.layers."):
                name = ".".join(path.split(".")[3:])
            if isinstance(layer, Embedding):
                layer.embed = partial(self.at, name, layer.embed)  # type: ignore[method-assign]
            elif isinstance(layer, ParallelLinear):
                name = OUTPUT_LAYER if path.startswith("embedding.") else name  # tied
                layer.output = partial(self.at, name, layer.output)  # type: ignore[method-assign]
                layer.gradients = partial(self.at, name, layer.gradients)  # type: ignore[method-assign]
                layer.gemms = self._recorded(layer.gemms, name, is_fp8)
            elif isinstance(layer, ExpertWeights):
                for each, gemms in layer.gemms.items():
                    layer.gemms[each] = self._recorded(gemms, f"{name}.{each}", is_fp8)
            elif isinstance(layer, Block):
                layer.attention_branch = self._named(layer.attention_branch)
                layer.mlp_branch = self._named(layer.mlp_branch)
                layer.elements = Elements([*layer.attention_branch, *layer.mlp_branch])

    def _named(self, elements: Elements) -> Elements:
        def named(each: Element) -> Element:
            if isinstance(each, Again):
                return each._replace(elements=self._named(each.elements))
            within = partial(partial, self._within, each.name)
            if each.name == CORE_ATTENTION:
                return each._replace(function=within(partial(self._attend, each.function)))
            if isinstance(each, Operator):
                return each._replace(function=within(each.function))
            run: dict[str, Any] = {"operands": within(each.operands)}
            run |= {"function": within(each.function)} if each.module is None else {"module": within(each.module)}
            return each._replace(**run)

        return Elements(map(named, elements))

    def _within(self, name: str, function: Callable[..., Any], *args: Any) -> Any:
        before = self._element, self.label
        self._element, self.label = name, AGAIN if self.is_backward else self.label
        try:
            return self.at(name, function, *args)
        finally:
            self._element, self.label = before

    def _attend(self, function: Callable[..., Any], context: LayerContext, q: Tensor, *others: Any) -> Any:
        """Run core attention, and record what has computed it."""
        assert context.seen is not None
        self._core = core = CoreAttention(q.numel() // q.shape[-1], q.shape[-1], context.seen)
        made = function(context, q, *others)
        self._see_attention(*core.forward())
        return made

    def _see_attention(self, kernel: str, keys: float, flops: int, moved_bytes: int) -> None:
        if self._core is None or not (flops or moved_bytes):
            return
        again = self.is_backward and self._element != STAGE
        op = Op.I if self.is_backward and not again else Op.F
        work = AttentionWork(CORE_ATTENTION, op, again, kernel, keys, self._core.head_size, 0, 0)
        before = self._attention.get(work, (0, 0))
        self._attention[work] = before[0] + flops, before[1] + moved_bytes

    def _make_nodes(self, name: str) -> None:
        self._first.append(torch.autograd._get_sequence_nr())
        self._elements.append(name)

    def at(self, name: str, function: Callable[..., Any], *args: Any) -> Any:
        """Return function(*args), whose products and messages are of a linear or an element."""
        before, self._here = self._here, name
        self._make_nodes(name)
        try:
            return function(*args)
        finally:
            self._here = before
            self._make_nodes(before)

    @property
    def place(self) -> str:
        """The linear or the element that runs, or in a backward that has made the node which does."""
        node = torch._C._current_autograd_node()
        if self._here != STAGE or node is None:
            return self._here
        number = node._sequence_nr()
        found = self._elements[bisect_right(self._first, number) - 1]
        if number < self._watched:
            self._outer = found
        elif found == STAGE:  # of a backward within that of an older node
            return self._outer
        return found

    def _recorded(self, gemms: Gemms, name: str, is_fp8: bool) -> Gemms:
        """Return the GEMMs of a linear with their products recorded."""
        recorded = copy.copy(gemms)
        for method, op in MULTIPLIES.items():
            setattr(recorded, method, partial(self._multiply, name, op, is_fp8, getattr(gemms, method)))
        return recorded

    def _multiply(
        self, name: str, op: Op, is_fp8: bool, function: Callable[..., Any], *args: Any, **options: Any
    ) -> Any:
        """Return what a method of `Gemms` does, or the product that it returns for chunks."""
        args = tuple(_FirstGroup(**vars(each)) if isinstance(each, RowGroups) else each for each in args)
        self._multiplies = True
        try:
            made = function(*args, **options)
        finally:
            self._multiplies = False
        if callable(made):
            return partial(self._multiply, name, op, is_fp8, made)
        first, second = [each for each in args if isinstance(each, Tensor)][:2]
        matrices = next((len(each.counts) for each in args if isinstance(each, RowGroups)), 1)
        width = (second if made is None else made).shape[-1]
        self._see_product(name, op, is_fp8, first.numel() // first.shape[-1], first.shape[-1], width, matrices)
        return made

    def _see_product(
        self, name: str, op: Op, is_fp8: bool, tokens: int, inputs: int, outputs: int, matrices: int = 1
    ) -> None:
        again = self.is_backward and self._element != STAGE
        product = Product(name, op, again, is_fp8, inputs, outputs, matrices, 0, 0)
        times, before = self._products.get(product, (0, 0))
        self._products[product] = times + 1, before + tokens

    def see_message(self, group: str, operation: str, num_bytes: int) -> None:
        """Record a message of a rank of a group, of which the fake backend counts so many bytes."""
        phase = Op.I if self.phase is Op.B else self.phase
        again = self.is_backward and self._element != STAGE
        message = Message(self.place, phase, again, group, operation, 0, 0)
        times, before = self._messages.get(message, (0, 0))
        self._messages[message] = times + 1, before + num_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = super().__torch_dispatch__(func, types, args, kwargs)
        operands = [each for each in args if isinstance(each, Tensor)]
        if self._multiplies or not operands:
            return made
        core = self._core
        if core is not None and self._element == CORE_ATTENTION:
            core.see(func, args, made)
        elif core is not None and self.is_backward and not core.kernels and self.place == CORE_ATTENTION:
            self._see_attention("", core.keys, *core.written(func, args, made))
        if func.overloadpacket in PRODUCTS:
            rows, matrix = operands[-2:]
            op = Op.F if self.phase is Op.F or self._element != STAGE else Op.I if self._is_weight(matrix) else Op.W
            tokens, inputs = rows.shape if op is not Op.W else rows.shape[::-1]
            self._see_product(self.place, op, False, tokens, inputs, matrix.shape[-1])
        elif self._is_weight(operands[0]) and isinstance(made, Tensor) and made.shape == operands[0].shape:
            self._copies.add(made.untyped_storage()._cdata)
        if self.phase is Op.W and any(map(self._is_weight, operands)):
            self.reads_weights = True
        return made

    def _is_weight(self, tensor: Tensor) -> bool:
        """Return True for a weight, and for a copy of one."""
        address = tensor.untyped_storage()._cdata
        return address in self._copies or (address in self._live and self._live[address][2] in WEIGHTS)

    def _see(self, tensor: Tensor) -> bool:
        is_new = super()._see(tensor)
        if is_new:
            address = tensor.untyped_storage()._cdata
            self._copies.discard(address)
            self._made[address] = next(self._numbers), self._element, tensor.element_size()
            self._levels.append(self.level)
            self.replayed.append(self.by_label[AGAIN])
        return is_new


class _FirstGroup(RowGroups):
    """Groups of rows of which the first is multiplied: the others make tensors of the same sizes, and free them."""

    def slices(self) -> Iterator[tuple[int, slice]]:
        return islice(super().slices(), 1)


class RecordedTraffic(Traffic):
    """Tells a recorder the messages of a rank."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def record(self, kind: str, operation: str, num_bytes: int) -> None:
        self._recorder.see_message(kind, operation, num_bytes)


class RecordedQueue(WeightQueue):
    """Runs what waits for W under the name of the linear or the element that it is of."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def submit(self, gradient: QueuedGradient) -> None:
        super().submit(InPlace(gradient, partial(self._recorder.at, self._recorder.place)))


class InPlace(QueuedGradient):
    """A weight gradient that is computed in the place that has queued it. run: calls a function there."""

    def __init__(self, gradient: QueuedGradient, run: Callable[[Callable[[], None]], None]) -> None:
        self._gradient, self._run = gradient, run

    def launch(self) -> None:
        self._run(self._gradient.launch)

    def accumulate(self) -> None:
        self._run(self._gradient.accumulate)
