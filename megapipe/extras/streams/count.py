"""Counts what a rank asks of the fake device: kernels with the bytes and FLOPs of each, collectives, and host waits.

    python -m megapipe.extras.streams.count LIBRARY FLAGS

LIBRARY: what `device.build` returned. Runs two steps of the ranks of a configuration that together hold every kind of
layer, and prints the second of each as JSON (`roofline.Counted`).

Every launch belongs to an element of a layer, in the backward too: autograd numbers its nodes in the order of the
forward, so the number of the node that runs tells the element that made it.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    from megapipe.extras.streams.device import load

    load(Path(sys.argv[1]))

import json
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from megapipe.assembly.runtime import TrainingRuntime
from megapipe.extras.streams.compiled import Graphs, compile_blocks
from megapipe.extras.streams.launches import ATTENTION, ATTENTION_BACKWARD, COLLECTIVE, GEMM, HOST_WAIT, MESSAGE, Launch
from megapipe.extras.streams.order import COMMUNICATOR, HOST
from megapipe.extras.streams.ranks import prepare, recorded
from megapipe.extras.streams.recorder import Recorder, current_queue, where
from megapipe.extras.streams.roofline import counted_plan, written
from megapipe.extras.streams.shapes import tensors
from megapipe.model import block, segments
from megapipe.model.embedding_and_head import Embedding, Loss
from megapipe.model.stage import GPTStage
from megapipe.plan.run_plan import RunPlan
from megapipe.schedule.action import stage_action
from megapipe.tensor_parallel.gradients import WeightQueue
from megapipe.trace.meta import RMSNormOfCuda
from megapipe.trace.recorder import InPlace

# position of the first operand
PRODUCTS = {"mm": 0, "bmm": 0, "addmm": 1, "addmm_": 1, "baddbmm": 1, "_grouped_mm": 0}
PRODUCTS |= {"_scaled_mm": 0, "_scaled_mm_v2": 0, "_scaled_grouped_mm": 0, "_scaled_grouped_mm_v2": 0}
OVERWRITES = ("copy_", "zero_", "fill_")
SPARSE = ("gather", "scatter_add_", "index_put_", "embedding")
NOT_KERNELS = ("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "detach", "record_stream")
FUSED_ATTENTION = ("_scaled_dot_product_", "torch_attn._varlen_attn")
OTHER = "other"
# methods whose launches are a part, where no element of a layer says more
PARTS: tuple[tuple[Any, str, str], ...] = (
    (block.Block, "forward", ""),
    (block.Prediction, "forward", "projection of the prediction"),
    (Embedding, "embed", "embedding"),
    (GPTStage, "run_head", "final norm"),
    (Loss, "__call__", "output layer and loss"),
)


class RMSNormCounted(RMSNormOfCuda):
    """CUDA's fused RMSNorm: one kernel forward, and two backward, of which one sums the weight's gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, counter: Counter) -> Tensor:  # type: ignore[override]
        result = RMSNormOfCuda.forward(ctx, x, weight)
        ctx.counter = counter
        counter.add("rms_norm", [x, weight, result])
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        dx, dw = RMSNormOfCuda.backward(ctx, grad)
        ctx.counter.add("rms_norm_backward", [grad, ctx.saved_tensors[0], dx])
        ctx.counter.add("rms_norm_backward", [grad, ctx.saved_tensors[0]])
        return dx, dw, None


Place = tuple[int | None, str]  # layer, element


class Counter(Recorder):
    """The log of one rank: its launches, in the queues and the order that streams and events give them.

    Also `marks` of the engine, so that every launch has its action.
    """

    def __init__(self) -> None:
        super().__init__()
        self.answers.answers |= {
            F.rms_norm: lambda x, normalized_shape, weight, eps: RMSNormCounted.apply(x, weight, self),
            torch._fused_sgd_: lambda *lists, **options: self.add("_fused_sgd_", tensors(lists)),
        }
        self.log: list[Any] = []  # Launch, Mark, Wait
        self.graphs: Graphs = {}
        self.said = ""
        self._reductions: list[bool] | None = None  # within a compiled kernel
        self._scope: list[Place] = [(None, "")]
        self._action = ("", -1, -1)  # op, stage, microbatch; outside of actions none
        # the place of autograd's nodes from each number on, and the number of the node made next
        self._first: list[int] = []
        self._places: list[Place] = []
        self._next_node = 0
        self._last: Place = (None, "")

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def see(self, func: Any, args: Any, kwargs: Any, outputs: list[Tensor]) -> None:
        """Count an operation that has run."""
        if self._reductions is not None:
            if func is torch.ops.aten.linalg_vector_norm.default:
                self._reductions.append(len(args) < 3 or args[2] is None)
            return
        name, inputs = name_of(func), tensors((args, kwargs))
        if not any(tensor.is_cuda for tensor in (*inputs, *outputs)):
            return
        storages = {id(tensor.untyped_storage()) for tensor in inputs}
        is_view = not func._schema.is_mutable and all(id(t.untyped_storage()) in storages for t in outputs)
        place = self.place()
        if is_view or name in NOT_KERNELS:
            return
        given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | kwargs
        kind, flops, dtype = work_of(name, inputs, outputs, given)
        self.add(name, moved(name, func, inputs, outputs), place=place, kind=kind, flops=flops, dtype=dtype)

    def add(
        self, name: str, used: Iterable[Tensor], file: str | None = None, place: Place | None = None, **work: Any
    ) -> None:
        """Count one kernel. used: what it reads and writes. file: where it is called, if not the current place.

        work: kind, flops and dtype of the launch.
        """
        num_bytes = sum(tensor.nbytes for tensor in used if tensor.is_cuda)
        file = file or where()
        launch = self._launch(current_queue(), name, file, place)
        if not launch.op:  # a part of the step is a package
            launch = launch._replace(part=file.partition("/")[0])
        self.log.append(launch._replace(num_bytes=num_bytes, **work))

    def _launch(self, queue: str, name: str, file: str, place: Place | None = None) -> Launch:
        """Return a launch of the current action and place."""
        (layer, part), (op, stage, microbatch) = place or self.place(), self._action
        return Launch(queue, name, file, layer, part, op, stage, microbatch)

    def launch(self, queue: str, place: str, read: Iterable[Tensor], written: Iterable[Tensor], **message: Any) -> None:
        """Count a collective or message. place: '<operation> in <file>:<function>'."""
        name, _, file = place.partition(" in ")
        if queue.startswith(COMMUNICATOR):
            num_bytes = max((tensor.nbytes for tensor in (*read, *written)), default=0)
            group = queue.removeprefix(COMMUNICATOR).partition(" ")[0]
            kind = MESSAGE if message else COLLECTIVE
            launch = self._launch(queue, name, file)
            self.log.append(launch._replace(num_bytes=num_bytes, kind=kind, group=group))

    def read_by_host(self, tensor: Tensor, function: str) -> None:
        """Count a wait of the host for what the current stream has been given."""
        if tensor.is_cuda:
            self.log.append(self._launch(HOST, "wait", where())._replace(kind=HOST_WAIT))
            self.synchronize([current_queue()])

    def as_kernel(self, name: str, function: Callable[..., Any], *args: Any, where: str | None = None) -> Any:
        """Return function(*args), counted as one kernel that reads its arguments and writes its results.

        Maxima that it scales by are found before: a kernel each that reads the first argument, and for one of all
        elements another, of partial results.
        """
        with self.inside_kernel() as reductions:
            results = function(*args)
        for is_whole in reductions:
            self.add(f"maxima of {name}", args[:1], where)
            if is_whole:
                self.add(f"maximum of {name}", (), where)
        self.add(name, [*tensors(args), *tensors(results)], where)
        return results

    def take(self, runtime: TrainingRuntime) -> None:
        """Compile the blocks if --compile-blocks is on. graphs, said: those of `compile_blocks`."""
        if runtime.plan.config.kernels.compile_blocks == "on":
            self.said = compile_blocks(runtime, self, self.graphs)

    def resize(self, storage: torch.UntypedStorage) -> None:
        """Memory is not followed."""

    def place(self) -> Place:
        """Return the layer and the element to which what is launched now belongs."""
        layer, part = self._scope[-1]
        node = torch._C._current_autograd_node()
        if node is not None and node.name() != "torch::autograd::AccumulateGrad" and self._first:
            of_node = self._places[max(bisect_right(self._first, node._sequence_nr()) - 1, 0)]
        else:  # outside of nodes autograd adds gradients to those before
            of_node = self._last if self._action[0] in ("B", "I") else (None, "")
        found = (of_node[0] if layer is None else layer), part or of_node[1] or OTHER
        self._last = found
        if not self._places or self._places[-1] != found:
            while self._first and self._first[-1] >= self._next_node:
                self._first.pop()
                self._places.pop()
            self._first.append(self._next_node)
            self._places.append(found)
        self._next_node = torch.autograd._get_sequence_nr()
        return found

    @contextmanager
    def within(self, place: Place) -> Iterator[None]:
        """Let what is launched inside belong to this layer and element, where no other is named."""
        self._scope.append(place)
        try:
            yield
        finally:
            self._scope.pop()

    def at(self, place: Place, function: Callable[[], None]) -> None:
        """Call a function within a place."""
        with self.within(place):
            function()

    @contextmanager
    def marks(self, text: str) -> Iterator[None]:
        """Give the engine's action to what is launched inside."""
        action = stage_action(text)
        self._action = action.op.value, action.stage, -1 if action.microbatch is None else action.microbatch
        try:
            yield
        finally:
            self._action, self._last = ("", -1, -1), (None, "")

    def inside_kernel(self) -> AbstractContextManager[list[bool]]:
        """Count nothing inside: it stays in one kernel, but for maxima. Lists them, True for that of a whole tensor."""
        return patch.object(self, "_reductions", [])

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Follow the layers and their elements inside, and weight gradients that wait."""
        run, submit = segments.run, WeightQueue.submit

        def by_element(elements: Any, stream: Any, values: Any, context: Any) -> Any:
            for group in elements.singly if context.compiler is None else elements.merged:
                names = [element.name for element in group if not isinstance(element, segments.Again)]
                layer, part = self._scope[-1]  # the elements within one belong to it
                with self.within((layer, part or " and ".join(names))):
                    stream, values = run(segments.Elements(group), stream, values, context)
            return stream, values

        def within(function: Callable[..., Any], part: str = "") -> Callable[..., Any]:
            def call(owner: Any, *args: Any, **kwargs: Any) -> Any:
                with self.within((getattr(owner, "layer", self._scope[-1][0]), part)):
                    return function(owner, *args, **kwargs)

            return call

        def submitted(queue: WeightQueue, gradient: Any) -> None:
            submit(queue, InPlace(gradient, partial(self.at, self.place())) if queue.is_deferring else gradient)

        with ExitStack() as stack, torch.autograd.set_multithreading_enabled(False):
            for owner, name, function in (
                (segments, "run", by_element),
                (block, "run", by_element),
                (WeightQueue, "submit", submitted),
                *((kind, name, within(getattr(kind, name), part)) for kind, name, part in PARTS),
            ):
                stack.enter_context(patch.object(owner, name, function))
            yield


def name_of(func: Any) -> str:
    """Return the name of an operation, which is torch's if no library is named."""
    return str(func.overloadpacket).removeprefix("aten.")


def work_of(
    name: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor], given: dict[str, Any]
) -> tuple[str, float, str]:
    """Return the kind of a kernel, its FLOPs, and the dtype of the operands; ('', 0, '') if it only moves memory."""
    if name in PRODUCTS:
        a, b = inputs[PRODUCTS[name] :][:2]
        shared = b.shape[0] if a.dim() == 3 and b.dim() == 2 else 1  # columns of all experts
        return GEMM, 2.0 * a.numel() * b.shape[-1] / shared, str(a.dtype).removeprefix("torch.")
    if not name.startswith(FUSED_ATTENTION):
        return "", 0.0, ""
    is_backward = name.endswith("_backward")
    q, k, v = inputs[is_backward:][:3]
    dtype = str(q.dtype).removeprefix("torch.")
    if q.dim() == 3:  # [tokens, heads, channels] of sequences one after the other
        seen = mean_keys(given["max_q"], given["max_k"], given.get("is_causal"), given.get("window_size"))
        pairs = q.shape[0] * q.shape[1] * seen
    else:
        pairs = q.shape[0] * q.shape[1] * q.shape[2] * mean_keys(q.shape[2], k.shape[2], given.get("is_causal"))
    flops = 2.0 * pairs * (q.shape[-1] + v.shape[-1])
    return (ATTENTION_BACKWARD, 2.5 * flops, dtype) if is_backward else (ATTENTION, flops, dtype)


def mean_keys(queries: int, keys: int, is_causal: bool | None, window: Sequence[int] | None = None) -> float:
    """Return how many keys a query sees in the mean; the last query sees the last key. window: (keys before, after)."""
    before = window[0] if window and window[0] >= 0 else keys
    if not is_causal and not window:
        return float(keys)
    last = range(keys - queries + 1, keys + 1) if is_causal else [keys] * queries
    return sum(min(max(seen, 0), before + 1) for seen in last) / queries


def moved(name: str, func: Any, inputs: list[Tensor], outputs: list[Tensor]) -> list[Tensor]:
    """Return the tensors that a kernel reads and those that it writes, one that it does both with twice."""
    if name in SPARSE:  # reads or writes few rows of the first, as many as there are indices
        return [tensor for tensor in (*inputs[1:], *outputs) if tensor.shape != inputs[0].shape]
    if name in OVERWRITES or func._overloadname == "out":  # the result is among the inputs and not read
        inputs = [tensor for tensor in inputs if all(tensor is not result for result in outputs)]
    if not outputs:  # kernels over lists of tensors; only AdamW's gradients and states are large
        outputs = inputs
    return [*inputs, *outputs]


def count(plan: RunPlan, ranks: Iterable[int], num_steps: int = 2) -> dict[int, list[Any]]:
    """Return the last step of these ranks."""
    logs = {}
    for rank in ranks:
        counter = recorded(plan, rank, num_steps, kind=Counter)
        logs[rank] = counter.log[counter.last_step :]
    return logs


if __name__ == "__main__":
    prepare(sys.argv[1])
    print(json.dumps(written(count(*counted_plan(sys.argv[2:])))))
