"""Column- and row-parallel linears (Shoeybi et al. 2019, arXiv:1909.08053) with hand-written backwards.

Shapes per rank. sp: with sequence parallelism (Korthikanti et al. 2022, arXiv:2205.05198). full(t): t gathered over
the sequence.

    column   weight W [out / tp, in], bias [out / tp]; saves x
             forward   y = full(x) W^T + bias            x [s, b, in], sp: [s / tp, b, in], gathered; y [s, b, out / tp]
             dgrad     dx = sum over tp of dy W          all-reduce, sp: reduce-scatter to [s / tp, b, in]
             wgrad     dW = dy^T full(x)                 sp: x is gathered again
    row      weight W [out, in / tp], bias [out]; saves x
             forward   y = (sum over tp of x W^T) + bias  x [s, b, in / tp]; y [s, b, out], sp: [s / tp, b, out]
             dgrad     dx = full(dy) W                    sp: dy is gathered
             wgrad     dW = full(dy)^T x; dbias = sum of dy over this rank's positions (sp: a partial gradient)

Column-parallel is f (sp: the all-gather g) before a GEMM, row-parallel is g (sp: g-bar) after one; see mappings.py.

Overlap: the second gather of x in the column's backward runs under dgrad, and the reduction of dx under wgrad. The
other collectives, and the reduction of dx when W is split off, have no other GEMM to hide under: with `CommChunks`
they run in chunks under their own GEMM (gemms.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megapipe.comm.collectives import Work, all_reduce, reduce_scatter
from megapipe.comm.groups import Group
from megapipe.errors import ConfigError
from megapipe.layers.table import WHOLE, CommChunks
from megapipe.tensor_parallel.gemms import PLAIN_GEMMS, Gemms, gathered_product, summed_product
from megapipe.tensor_parallel.gradient_slot import GradientSlot
from megapipe.tensor_parallel.mappings import empty_gathered, gathered, reduce_scattered, slice_length
from megapipe.tensor_parallel.weight_gradient import (
    InputRecompute,
    LinearWeightGradient,
    SequenceGather,
    WeightQueue,
)


class _ParallelLinear(nn.Module):
    """A linear sharded over tp: weight, bias, their gradient slots, the weight queue, and the arithmetic of its GEMMs.

    Parameters are on the meta device until materialised. sequence_parallel is False in a group of one.
    """

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
        self.sequence_parallel = sequence_parallel and tp.size > 1
        self.chunks = chunks if tp.size > 1 else WHOLE
        self.gemms = gemms
        self.queue = WeightQueue() if queue is None else queue
        self.slots: dict[str, GradientSlot] = {}
        self.weight = nn.Parameter(torch.empty(weight_shape, device="meta"))
        self.bias = nn.Parameter(torch.empty(bias_size, device="meta")) if bias_size is not None else None

    def extra_repr(self) -> str:
        shape, bias = list(self.weight.shape), self.bias is not None
        return f"weight={shape}, bias={bias}, tp={self.tp.size}, sequence_parallel={self.sequence_parallel}"


class ColumnParallelLinear(_ParallelLinear):
    """y = x W^T + b with the rows of W split over tp; see the module's docstring for the backward.

    x: [s, b, in], with sequence parallelism [s / tp, b, in]. Returns [s, b, out / tp].
    local_out_features: this rank's rows where they are not out_features / tp (replicated key/value heads).
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
        rows = _divide(out_features, tp, "output") if local_out_features is None else local_out_features
        super().__init__((rows, in_features), rows if bias else None, tp, sequence_parallel, queue, gemms, chunks)

    def forward(self, x: Tensor, recompute: InputRecompute | None = None) -> Tensor:
        """recompute: how the backward recomputes x, which is then not saved."""
        return _ColumnParallel.apply(x, self.weight, self.bias, self, recompute)


class RowParallelLinear(_ParallelLinear):
    """y = x W^T + b with the columns of W split over tp; see the module's docstring for the backward.

    x: [s, b, in / tp]. Returns [s, b, out], with sequence parallelism [s / tp, b, out].
    Raises ConfigError if tp does not divide s under sequence parallelism.
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
        gemms: Gemms = PLAIN_GEMMS,
        chunks: CommChunks = WHOLE,
    ) -> None:
        shape = (out_features, _divide(in_features, tp, "input"))
        super().__init__(shape, out_features if bias else None, tp, sequence_parallel, queue, gemms, chunks)

    def forward(self, x: Tensor, recompute: InputRecompute | None = None) -> Tensor:
        """recompute: how the backward recomputes x, which is then not saved."""
        return _RowParallel.apply(x, self.weight, self.bias, self, recompute)


def _divide(features: int, tp: Group, side: str) -> int:
    if features % tp.size:
        raise ConfigError(f"tensor parallelism of {tp.size} does not divide the {features} {side} features of a linear")
    return features // tp.size


class _ColumnParallel(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        linear: _ParallelLinear,
        recompute: InputRecompute | None,
    ) -> Tensor:
        _save(ctx, x, weight, bias, linear, recompute)
        gemms, tp = linear.gemms, linear.tp
        if linear.sequence_parallel and linear.chunks.gather > 1:
            product = gemms.forward_chunks(x, weight, bias, tp)
            return gathered_product(x, product, weight.shape[0], tp, linear.chunks.gather)
        return gemms.forward(gathered(x, tp) if linear.sequence_parallel else x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        linear: _ParallelLinear = ctx.linear
        gemms, tp, deferring = linear.gemms, linear.tp, linear.queue.is_deferring
        needs_input, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        weight, _, *saved = ctx.saved_tensors
        pending = None
        if needs_weight or needs_bias:
            gather_input = tp if linear.sequence_parallel else None
            pending = _weight_gradient(ctx, saved, SequenceGather(grad_output, None), grad_output, gather_input)
            if not deferring:
                pending.launch()  # the gather of x runs under dgrad
        grad_input: Tensor | None = None
        work: Work | None = None
        if needs_input and deferring and linear.chunks.reduce > 1:
            product = gemms.input_gradient_chunks(grad_output, weight, None)
            grad_input = summed_product(
                grad_output, product, weight.shape[1], tp, linear.sequence_parallel, linear.chunks.reduce
            )
        elif needs_input:
            grad_input = partial = gemms.input_gradient(grad_output, weight)
            if linear.sequence_parallel:
                grad_input = partial.new_empty((slice_length(partial, tp), *partial.shape[1:]))
                work = reduce_scatter(grad_input, partial, tp, async_op=True)
            elif tp.size > 1:
                work = all_reduce(partial, tp, async_op=True)
        grad_weight, grad_bias = _compute_or_queue(linear, pending)
        if work is not None:
            work.wait()
        return grad_input, grad_weight, grad_bias, None, None


class _RowParallel(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        linear: _ParallelLinear,
        recompute: InputRecompute | None,
    ) -> Tensor:
        _save(ctx, x, weight, bias, linear, recompute)
        gemms, tp = linear.gemms, linear.tp
        if tp.size == 1:
            return gemms.forward(x, weight, bias)
        if linear.chunks.reduce > 1:
            product = gemms.forward_chunks(x, weight, None, None)
            y = summed_product(x, product, weight.shape[0], tp, linear.sequence_parallel, linear.chunks.reduce)
        else:
            y = gemms.forward(x, weight, None)
            if linear.sequence_parallel:
                y = reduce_scattered(y, tp)
            else:
                all_reduce(y, tp)
        return y if bias is None else y.add_(bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        linear: _ParallelLinear = ctx.linear
        gemms, deferring = linear.gemms, linear.queue.is_deferring
        needs_input, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        weight, _, *saved = ctx.saved_tensors
        tp = linear.tp if linear.sequence_parallel else None
        full_grad = SequenceGather(grad_output, tp)
        grad_input = pending = None
        if needs_input and tp is not None and linear.chunks.gather > 1:
            product = gemms.input_gradient_chunks(grad_output, weight, tp)
            # wgrad, if it follows, reads the gathered gradient that the chunks leave behind
            full = empty_gathered(grad_output, tp) if needs_weight and not deferring else None
            grad_input = gathered_product(grad_output, product, weight.shape[1], tp, linear.chunks.gather, full)
            if full is not None:
                full_grad = SequenceGather(full, None)
        elif needs_input:
            grad_input = gemms.input_gradient(full_grad.full(), weight)
        if needs_weight or needs_bias:
            # a queued gradient keeps this rank's slice of grad_output, not the gathered one
            gather = SequenceGather(grad_output, tp) if deferring else full_grad
            pending = _weight_gradient(ctx, saved, gather, grad_output, None)
            if not deferring:
                pending.launch()
        return grad_input, *_compute_or_queue(linear, pending), None, None


def _save(
    ctx: Any,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    linear: _ParallelLinear,
    recompute: InputRecompute | None,
) -> None:
    """Save the parameters and, if the weight needs a gradient, the input or the tensors that recompute it."""
    ctx.linear = linear
    ctx.recompute = None if recompute is None else recompute._replace(inputs=())  # tensors only through autograd
    # The parameters themselves, besides the saved ones: under hooks that pack saved tensors (offload), unpacking yields
    # another tensor, whose .grad is not read.
    ctx.parameters = weight, bias if ctx.needs_input_grad[2] else None
    inputs: tuple[Tensor, ...] = ()
    if ctx.needs_input_grad[1]:
        inputs = (x,) if recompute is None else recompute.inputs
    ctx.save_for_backward(*ctx.parameters, *inputs)


def _weight_gradient(
    ctx: Any, saved: list[Tensor], grad_output: SequenceGather, bias_grad_output: Tensor, gather_input: Group | None
) -> LinearWeightGradient:
    """Build the weight gradient. saved: the input, or the tensors that recompute it."""
    linear, recompute = ctx.linear, ctx.recompute
    weight, bias = ctx.parameters
    inputs = tuple(tensor.detach() for tensor in saved)  # a queued gradient must not hold the graph
    if recompute is not None and recompute.in_backward and linear.queue.is_deferring:
        inputs = ()
    return LinearWeightGradient(
        weight if ctx.needs_input_grad[1] else None,
        bias,
        linear.slots,
        linear.gemms,
        inputs,
        None if recompute is None else recompute.function,
        gather_input,
        grad_output,
        bias_grad_output,
    )


def _compute_or_queue(
    linear: _ParallelLinear, pending: LinearWeightGradient | None
) -> tuple[Tensor | None, Tensor | None]:
    """Compute the (weight, bias) gradients now, or queue them for W and return None for both."""
    if pending is None:
        return None, None
    if linear.queue.is_deferring:
        linear.queue.submit(pending)
        return None, None
    return pending.compute()
