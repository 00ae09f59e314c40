"""Column- and row-parallel linears (Shoeybi et al. 2019, arXiv:1909.08053) with hand-written backwards. Used by model/.

Shapes per rank; sp = sequence parallelism (Korthikanti et al. 2022, arXiv:2205.05198), [.] = what is kept for the backward.

    column     weight [out / tp, in]    bias [out / tp]
               forward   y [s, b, out / tp] = whole(x) W^T + bias              x [s, b, in], sp: [s / tp, b, in], gathered; [x as it came]
               dgrad     dx = sum over tp of dy W                             all-reduce, sp: reduce-scatter to [s / tp, b, in]
               wgrad     dW = dy^T whole(x)                                   sp: x gathered again
    row        weight [out, in / tp]    bias [out]
               forward   y = (sum over tp of x W^T) + bias                    [x [s, b, in / tp]]; y [s, b, out], sp: [s / tp, b, out]
               dgrad     dx = whole(dy) W                                     sp: dy gathered
               wgrad     dW = whole(dy)^T x; bias: sum of dy over this rank's positions (sp: a partial gradient)

Under the GEMMs: column's second gather of x runs under dgrad, its all-reduce or reduce-scatter of dx under wgrad. The others, and that of
dx where W is split off, have no GEMM beside them: with `CommChunks` they run under their own, chunk by chunk (chunked_gemm).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megapipe.comm.collectives import all_reduce, reduce_scatter
from megapipe.comm.groups import Group
from megapipe.errors import ConfigError
from megapipe.plan.comm_chunks import WHOLE, CommChunks
from megapipe.tensor_parallel.chunked_gemm import gathered_product, summed_product
from megapipe.tensor_parallel.gemms import PLAIN_GEMMS, Gemms
from megapipe.tensor_parallel.gradient_slot import GradientSlot
from megapipe.tensor_parallel.mappings import empty_whole, gathered, reduce_scattered, slice_length
from megapipe.tensor_parallel.weight_gradient import Gathering, LinearWeightGradient, Remake, Slots
from megapipe.tensor_parallel.weight_queue import WeightQueue

NO_SLOTS: Slots = {}


class _Kept:
    """What a linear's Function keeps besides tensors: its options, its arithmetic, and the recipe to make its input again."""

    __slots__ = ("chunks", "gemms", "parameters", "queue", "remake", "sequence_parallel", "slots", "tensors_at", "tp")

    def __init__(
        self,
        tp: Group,
        sequence_parallel: bool,
        slots: Slots,
        queue: WeightQueue | None,
        remake: Remake | None,
        gemms: Gemms = PLAIN_GEMMS,
        chunks: CommChunks = WHOLE,
    ) -> None:
        self.tp = tp
        self.sequence_parallel = sequence_parallel and tp.size > 1
        self.chunks = chunks if tp.size > 1 else WHOLE
        self.slots = slots
        self.queue = queue
        self.remake = remake
        self.gemms = gemms
        self.tensors_at: tuple[int, ...] = ()
        self.parameters: tuple[Tensor | None, Tensor | None] = (None, None)

    def save(self, ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        """Save the input, or instead of it the tensors of its recipe; only where the weight wants a gradient."""
        ctx.kept = self
        ctx.has_bias = bias is not None
        inputs: list[Tensor | None] = []
        if ctx.needs_input_grad[1]:
            if self.remake is None:
                inputs = [x]
            else:
                arguments = self.remake.arguments
                self.tensors_at = tuple(i for i, argument in enumerate(arguments) if isinstance(argument, Tensor))
                inputs = [arguments[i] for i in self.tensors_at]
                rest = tuple(None if isinstance(argument, Tensor) else argument for argument in arguments)
                self.remake = self.remake._replace(arguments=rest)
        # themselves, besides what is saved: where hooks pack saved tensors (offloading), what they unpack is another tensor, with a .grad
        # that nobody reads
        self.parameters = weight, bias if ctx.needs_input_grad[2] else None
        ctx.save_for_backward(*self.parameters, *inputs)

    def weight_gradient(
        self, ctx: Any, grad_output: Gathering, grad_bias_from: Tensor, gather_input: Group | None
    ) -> LinearWeightGradient:
        """The weight's half of the backward, over what was saved."""
        (weight, bias), (_, _, *inputs) = self.parameters, ctx.saved_tensors
        inputs = [tensor.detach() for tensor in inputs]  # what waits for W must not hold the graph
        remake = None
        if self.remake is not None and ctx.needs_input_grad[1]:
            arguments = list(self.remake.arguments)
            for i, tensor in zip(self.tensors_at, inputs, strict=True):
                arguments[i] = tensor
            if self.defers and self.remake.is_made_in_backward:
                arguments = []
            remake, inputs = self.remake._replace(arguments=tuple(arguments)), []
        return LinearWeightGradient(
            weight if ctx.needs_input_grad[1] else None,
            bias,
            self.slots,
            inputs[0] if inputs else None,
            remake,
            gather_input,
            grad_output,
            grad_bias_from,
            self.gemms,
        )

    @property
    def defers(self) -> bool:
        return self.queue is not None and self.queue.is_deferring


class _ColumnParallel(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, kept: _Kept) -> Tensor:
        kept.save(ctx, x, weight, bias)
        if kept.sequence_parallel and kept.chunks.gather > 1:
            product = kept.gemms.forward_chunks(x, weight, bias, kept.tp)
            return gathered_product(x, product, weight.shape[0], kept.tp, kept.chunks.gather)
        return kept.gemms.forward(gathered(x, kept.tp) if kept.sequence_parallel else x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        kept: _Kept = ctx.kept
        wants_input, wants_weight, wants_bias, _ = ctx.needs_input_grad
        waiting = None
        if wants_weight or wants_bias:
            waiting = kept.weight_gradient(
                ctx, Gathering(grad_output, None), grad_output, kept.tp if kept.sequence_parallel else None
            )
            if not kept.defers:
                waiting.launch()
        grad_input = work = None
        if wants_input and kept.defers and kept.chunks.reduce > 1:
            weight = ctx.saved_tensors[0]
            product = kept.gemms.input_gradient_chunks(grad_output, weight, None)
            grad_input = summed_product(
                grad_output, product, weight.shape[1], kept.tp, kept.sequence_parallel, kept.chunks.reduce
            )
        elif wants_input:
            grad_input = partial = kept.gemms.input_gradient(grad_output, ctx.saved_tensors[0])
            if kept.sequence_parallel:
                grad_input = partial.new_empty((slice_length(partial, kept.tp), *partial.shape[1:]))
                work = reduce_scatter(grad_input, partial, kept.tp, async_op=True)
            elif kept.tp.size > 1:
                work = all_reduce(partial, kept.tp, async_op=True)
        weight_gradient = _finish(kept, waiting)
        if work is not None:
            work.wait()
        return grad_input, *weight_gradient, None


class _RowParallel(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, kept: _Kept) -> Tensor:
        kept.save(ctx, x, weight, bias)
        if kept.tp.size == 1:
            return kept.gemms.forward(x, weight, bias)
        if kept.chunks.reduce > 1:
            product = kept.gemms.forward_chunks(x, weight, None, None)
            y = summed_product(x, product, weight.shape[0], kept.tp, kept.sequence_parallel, kept.chunks.reduce)
        else:
            y = kept.gemms.forward(x, weight, None)
            if kept.sequence_parallel:
                y = reduce_scattered(y, kept.tp)
            else:
                all_reduce(y, kept.tp)
        return y if bias is None else y.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        kept: _Kept = ctx.kept
        wants_input, wants_weight, wants_bias, _ = ctx.needs_input_grad
        whole = Gathering(grad_output, kept.tp if kept.sequence_parallel else None)
        grad_input = waiting = None
        if wants_input and kept.sequence_parallel and kept.chunks.gather > 1:
            weight = ctx.saved_tensors[0]
            product = kept.gemms.input_gradient_chunks(grad_output, weight, kept.tp)
            put_together = empty_whole(grad_output, kept.tp) if wants_weight and not kept.defers else None
            grad_input = gathered_product(
                grad_output, product, weight.shape[1], kept.tp, kept.chunks.gather, put_together
            )
            whole = whole if put_together is None else Gathering(put_together, None)
        elif wants_input:
            grad_input = kept.gemms.input_gradient(whole.whole(), ctx.saved_tensors[0])
        if wants_weight or wants_bias:
            # what waits for W keeps this rank's slice of grad_output, not the gathered one
            gathering = Gathering(grad_output, kept.tp) if kept.defers and kept.sequence_parallel else whole
            waiting = kept.weight_gradient(ctx, gathering, grad_output, None)
            if not kept.defers:
                waiting.launch()
        return grad_input, *_finish(kept, waiting), None


def _finish(kept: _Kept, waiting: LinearWeightGradient | None) -> tuple[Tensor | None, Tensor | None]:
    """Compute the weight's half now, or leave it to the queue."""
    if waiting is None:
        return None, None
    if kept.defers:
        assert kept.queue is not None
        kept.queue.submit(waiting)
        return None, None
    return waiting.compute()


def column_parallel_linear(
    x: Tensor,  # [s, b, in]; sequence parallel: [s / tp, b, in]
    weight: Tensor,  # [out / tp, in]
    bias: Tensor | None = None,  # [out / tp]
    *,
    tp: Group,
    sequence_parallel: bool = False,
    slots: Slots = NO_SLOTS,
    queue: WeightQueue | None = None,
    remake: Remake | None = None,
) -> Tensor:
    """A column-parallel linear over a given weight (the tied head's is the embedding's). Returns [s, b, out / tp]; see the module's table.

    slots: keys "weight" and "bias"; without one the gradient goes through autograd. remake: fn(*args) equals x bit
    for bit: x is not kept, its maker's arguments are.
    """
    return _ColumnParallel.apply(x, weight, bias, _Kept(tp, sequence_parallel, slots, queue, remake))


def row_parallel_linear(
    x: Tensor,  # [s, b, in / tp]
    weight: Tensor,  # [out, in / tp]
    bias: Tensor | None = None,  # [out]
    *,
    tp: Group,
    sequence_parallel: bool = False,
    slots: Slots = NO_SLOTS,
    queue: WeightQueue | None = None,
    remake: Remake | None = None,
) -> Tensor:
    """A row-parallel linear. Returns [s, b, out], sequence parallel: [s / tp, b, out]. slots, remake: as in `column_parallel_linear`.

    Raises ConfigError if tp does not divide s under sequence parallelism.
    """
    return _RowParallel.apply(x, weight, bias, _Kept(tp, sequence_parallel, slots, queue, remake))


class _ParallelLinear(nn.Module):
    """Weight, bias, slots, queue and arithmetic of a linear cut over tp. Parameters stand on the meta device until materialised."""

    def __init__(
        self,
        weight_shape: tuple[int, int],
        bias_size: int | None,
        tp: Group,
        sequence_parallel: bool,
        queue: WeightQueue | None,
        gemms: Gemms,
        chunks: CommChunks,
    ) -> None:
        super().__init__()
        self.tp = tp
        self.gemms = gemms
        self.chunks = chunks
        self.sequence_parallel = sequence_parallel
        self.queue = queue
        self.slots: dict[str, GradientSlot] = {}
        self.weight = nn.Parameter(torch.empty(weight_shape, device="meta"))
        self.bias = nn.Parameter(torch.empty(bias_size, device="meta")) if bias_size is not None else None

    def extra_repr(self) -> str:
        rows, columns = self.weight.shape
        return f"weight=[{rows}, {columns}], bias={self.bias is not None}, tp={self.tp.size}, sequence_parallel={self.sequence_parallel}"


class ColumnParallelLinear(_ParallelLinear):
    """y = x W^T + bias with the rows of W cut over tp: [s(/ tp), b, in] -> [s, b, out / tp]; see the module's table.

    local_out_features: this rank's rows where they are not out_features / tp (query-key-value weights with replicated KV heads).
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        tp: Group,
        sequence_parallel: bool,
        queue: WeightQueue | None = None,
        local_out_features: int | None = None,
        gemms: Gemms = PLAIN_GEMMS,
        chunks: CommChunks = WHOLE,
    ) -> None:
        rows = _share(out_features, tp, "output") if local_out_features is None else local_out_features
        super().__init__((rows, in_features), rows if bias else None, tp, sequence_parallel, queue, gemms, chunks)

    def forward(self, x: Tensor, remake: Remake | None = None) -> Tensor:
        kept = _Kept(self.tp, self.sequence_parallel, self.slots, self.queue, remake, self.gemms, self.chunks)
        return _ColumnParallel.apply(x, self.weight, self.bias, kept)


class RowParallelLinear(_ParallelLinear):
    """y = x W^T + bias with the columns of W cut over tp: [s, b, in / tp] -> [s(/ tp), b, out]; see the module's table."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        tp: Group,
        sequence_parallel: bool,
        queue: WeightQueue | None = None,
        gemms: Gemms = PLAIN_GEMMS,
        chunks: CommChunks = WHOLE,
    ) -> None:
        columns = _share(in_features, tp, "input")
        super().__init__(
            (out_features, columns), out_features if bias else None, tp, sequence_parallel, queue, gemms, chunks
        )

    def forward(self, x: Tensor, remake: Remake | None = None) -> Tensor:
        kept = _Kept(self.tp, self.sequence_parallel, self.slots, self.queue, remake, self.gemms, self.chunks)
        return _RowParallel.apply(x, self.weight, self.bias, kept)


def _share(features: int, tp: Group, side: str) -> int:
    if features % tp.size:
        raise ConfigError(f"tensor parallelism of {tp.size} does not divide the {features} {side} features of a linear")
    return features // tp.size
