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

Column-parallel is the papers' conjugate operator f (sp: the all-gather g) before a GEMM, row-parallel is g (sp: g-bar)
after one.

Overlap: the second gather of x in the column's backward runs under dgrad, and the reduction of dx under wgrad. The
other collectives, and the reduction of dx when W is split off, have no other GEMM to hide under: with `CommChunks`
they run in chunks under their own GEMM (gemms.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from megapipe.comm.collectives import Work, all_reduce, reduce_scatter
from megapipe.comm.groups import Group
from megapipe.errors import ConfigError
from megapipe.layers.table import WHOLE, CommChunks
from megapipe.sharding.spec import Fused, ParamSpec
from megapipe.tensor_parallel.gemms import (
    PLAIN_GEMMS,
    Gemms,
    SequenceGather,
    empty_gathered,
    gathered,
    gathered_product,
    leaving_sms,
    slice_length,
    summed,
    summed_product,
)
from megapipe.tensor_parallel.gradients import GradientSlot, InputRecompute, WeightQueue, add_to_grad, collect
from megapipe.tensor_parallel.parameter import declared

Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]  # of x, weight and bias


class ParallelLinear(nn.Module):
    """A linear sharded over tp: weight, bias, their gradient slots, the weight queue, and the arithmetic of its GEMMs.

    Parameters are on the meta device until materialised. sequence_parallel is False in a group of one.
    weight: how [out_features, in_features] is cut and initialized; by default it is cut evenly. Raises ConfigError if
    tp does not divide the features that are sharded.
    """

    split: ClassVar[str]  # the features that are sharded: "input" or "output"

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        tp: Group,
        sequence_parallel: bool,
        queue: WeightQueue | None = None,
        weight: ParamSpec | None = None,
        gemms: Gemms = PLAIN_GEMMS,
        chunks: CommChunks = WHOLE,
        sm_carveout: int = 0,
    ) -> None:
        """sm_carveout: SMs that GEMMs beside a collective over tp leave free."""
        super().__init__()
        is_column = self.split == "output"
        whole = out_features if is_column else in_features
        if weight is None:
            weight = ParamSpec("", (out_features, in_features), 0, Fused(0 if is_column else 1))
        if isinstance(weight.slicing, Fused) and whole % tp.size:
            raise ConfigError(
                f"tensor parallelism of {tp.size} does not divide the {whole} {self.split} features of a linear; use a "
                "divisor of them"
            )
        self.weight = declared(weight, tp.rank, tp.size)
        self.bias: nn.Parameter | None = None
        if bias and is_column:
            own = ParamSpec("", (out_features,), 0, weight.slicing, weight_decay=False)
            self.bias = declared(own, tp.rank, tp.size)
        elif bias:  # added after the sum over tp: each rank sees only the gradient of its tokens
            is_partial = sequence_parallel
            self.bias = declared(ParamSpec("", (out_features,), 0, weight_decay=False, partial_gradient=is_partial))
        self.tp = tp
        self.sequence_parallel = sequence_parallel and tp.size > 1
        self.chunks = chunks if tp.size > 1 else WHOLE
        self.sm_carveout = sm_carveout
        self.gemms = gemms
        self.queue = WeightQueue() if queue is None else queue
        self.slots: dict[str, GradientSlot] = {}
        self.uses = 1  # calls for each microbatch

    def forward(self, x: Tensor, recompute: InputRecompute | None = None) -> Tensor:
        """Return y. recompute: how the backward recomputes x, which is then not saved."""
        return _Linear.apply(x, self.weight, self.bias, self, recompute)

    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Compute y."""
        raise NotImplementedError

    def gradients(self, ctx: Any, grad_output: Tensor, weight: Tensor, inputs: list[Tensor]) -> Gradients:
        """Compute the gradients. ctx: of `_Linear`. inputs: the saved x, or the tensors that recompute it."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        shape, bias = list(self.weight.shape), self.bias is not None
        return f"weight={shape}, bias={bias}, tp={self.tp.size}, sequence_parallel={self.sequence_parallel}"


@dataclass
class LinearWeightGradient:
    """The weight and bias gradient of one use of a linear: dW = dy^T x, db = sum of dy over its positions."""

    linear: ParallelLinear
    weight: Tensor | None  # None: needs no gradient
    bias: Tensor | None
    # (x,), [s, b, in] or, with gather_input, [s / tp, b, in]; with recompute, the arguments that recompute x
    inputs: tuple[Tensor, ...]
    recompute: Callable[..., Tensor] | None
    gather_input: Group | None
    grad_output: SequenceGather  # to [s, b, out]
    # the output gradient that the bias sums, at this rank's positions only ([s / tp, b, out] in a row-parallel linear
    # under sequence parallelism: a partial gradient, declared so in the ParamSpec)
    bias_grad_output: Tensor
    full_input: SequenceGather | None = None  # set by `launch`

    @torch.no_grad()
    def launch(self) -> None:
        """Recompute the input if it was not saved, and start the gathers."""
        if self.weight is not None:
            self.grad_output.launch()
            x = self.inputs[0] if self.recompute is None else self.recompute(*self.inputs)
            self.full_input = SequenceGather(x, self.gather_input)
            self.full_input.launch()

    def compute(self) -> tuple[Tensor | None, Tensor | None]:
        """Add to the slots, after `launch`; return the (weight, bias) gradients without a slot, for autograd."""
        slots, weight_gradient, bias_gradient = self.linear.slots, None, None
        if self.weight is not None:
            assert self.full_input is not None, "launch() must be called before compute()"
            inputs, grad_output = self.full_input.full().flatten(0, -2), self.grad_output.full().flatten(0, -2)
            add = self.linear.gemms.add_weight_gradient
            weight_gradient = collect(slots.get("weight"), self.weight, lambda slot: add(slot, grad_output, inputs))
        if self.bias is not None:
            bias_gradient = collect(slots.get("bias"), self.bias, self._add_bias)
        return weight_gradient, bias_gradient

    def _add_bias(self, slot: GradientSlot) -> None:
        # in main_grad's dtype: in bf16 256 + 1 == 256, so a long sum stops growing
        slot.add(self.bias_grad_output.flatten(0, -2).sum(0, dtype=slot.main_grad.dtype))

    @torch.no_grad()
    def accumulate(self) -> None:
        """Add to the slots, and gradients without a slot to .grad, as autograd would."""
        weight_gradient, bias_gradient = self.compute()
        add_to_grad(self.weight, weight_gradient)
        add_to_grad(self.bias, bias_gradient)


def _weight_gradient(
    ctx: Any, saved: list[Tensor], grad_output: SequenceGather, bias_grad_output: Tensor, gather_input: Group | None
) -> LinearWeightGradient | None:
    """Build the weight gradient, if the weight or the bias needs one, and launch it unless it is to be queued."""
    linear, recompute, (weight, bias) = ctx.linear, ctx.recompute, ctx.parameters
    if not ctx.needs_input_grad[1]:
        weight = None
        if bias is None:
            return None
    inputs = tuple(tensor.detach() for tensor in saved)  # a queued gradient must not hold the graph
    if recompute is not None and recompute.in_backward and linear.queue.is_deferring:
        inputs = ()
    function = None if recompute is None else recompute.function
    pending = LinearWeightGradient(linear, weight, bias, inputs, function, gather_input, grad_output, bias_grad_output)
    if not linear.queue.is_deferring:
        pending.launch()
    return pending


def _compute_or_queue(pending: LinearWeightGradient | None) -> tuple[Tensor | None, Tensor | None]:
    """Compute the (weight, bias) gradients now, or queue them for W and return None for both."""
    if pending is None:
        return None, None
    if not pending.linear.queue.is_deferring:
        return pending.compute()
    pending.linear.queue.submit(pending)
    return None, None


class _Linear(Function):
    """Saves the parameters and, if the weight needs a gradient, the input or the tensors that recompute it."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        linear: ParallelLinear,
        recompute: InputRecompute | None,
    ) -> Tensor:
        ctx.linear = linear
        ctx.recompute = None if recompute is None else recompute._replace(inputs=())  # tensors only through autograd
        # The parameters themselves, besides the saved ones: under hooks that pack saved tensors (offload), unpacking
        # yields another tensor, whose .grad is not read.
        ctx.parameters = weight, bias if ctx.needs_input_grad[2] else None
        inputs: tuple[Tensor, ...] = ()
        if ctx.needs_input_grad[1]:
            inputs = (x,) if recompute is None else recompute.inputs
        ctx.save_for_backward(*ctx.parameters, *inputs)
        return linear.output(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        weight, _, *inputs = ctx.saved_tensors
        return *ctx.linear.gradients(ctx, grad_output, weight, inputs), None, None


class ColumnParallelLinear(ParallelLinear):
    """y = x W^T + b with the rows of W split over tp; the module's docstring has the shapes and the backward."""

    split = "output"

    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self.sequence_parallel and self.chunks.gather > 1:
            product = self.gemms.forward_chunks(x, weight, bias, self.tp)
            count, carveout = self.chunks.gather, self.sm_carveout
            return gathered_product(x, product, weight.shape[0], self.tp, count, carveout=carveout)
        return self.gemms.forward(gathered(x, self.tp) if self.sequence_parallel else x, weight, bias)

    def gradients(self, ctx: Any, grad_output: Tensor, weight: Tensor, inputs: list[Tensor]) -> Gradients:
        gemms, tp, scatters = self.gemms, self.tp, self.sequence_parallel
        # unless it is queued, the gather of x runs under dgrad
        gather = SequenceGather(grad_output, None)
        pending = _weight_gradient(ctx, inputs, gather, grad_output, tp if scatters else None)
        grad_input: Tensor | None = None
        work: Work | None = None
        if ctx.needs_input_grad[0] and self.queue.is_deferring and self.chunks.reduce > 1:
            product, count = gemms.input_gradient_chunks(grad_output, weight, None), self.chunks.reduce
            width, carveout = weight.shape[1], self.sm_carveout
            grad_input = summed_product(grad_output, product, width, tp, scatters, count, carveout)
        elif ctx.needs_input_grad[0]:
            then_weight = ctx.needs_input_grad[1] and not self.queue.is_deferring
            with leaving_sms(self.sm_carveout if then_weight and scatters else 0, grad_output):
                grad_input = partial = gemms.input_gradient(grad_output, weight, then_weight=then_weight)
            if scatters:
                grad_input = partial.new_empty((slice_length(partial, tp), *partial.shape[1:]))
                work = reduce_scatter(grad_input, partial, tp, async_op=True)
            elif tp.size > 1:
                work = all_reduce(partial, tp, async_op=True)
        with leaving_sms(0 if work is None else self.sm_carveout, grad_output):
            grad_weight, grad_bias = _compute_or_queue(pending)
        if work is not None:
            work.wait()
        return grad_input, grad_weight, grad_bias


class RowParallelLinear(ParallelLinear):
    """y = x W^T + b with the columns of W split over tp; the module's docstring has the shapes and the backward.

    Raises ConfigError if tp does not divide s under sequence parallelism.
    """

    split = "input"

    def output(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        gemms, tp, scatters = self.gemms, self.tp, self.sequence_parallel
        if tp.size == 1:
            return gemms.forward(x, weight, bias)
        if self.chunks.reduce > 1:
            product = gemms.forward_chunks(x, weight, None, None)
            y = summed_product(x, product, weight.shape[0], tp, scatters, self.chunks.reduce, self.sm_carveout)
        else:
            y = summed(gemms.forward(x, weight, None), tp, scatters)
        return y if bias is None else y.add_(bias)

    def gradients(self, ctx: Any, grad_output: Tensor, weight: Tensor, inputs: list[Tensor]) -> Gradients:
        gemms, deferring = self.gemms, self.queue.is_deferring
        tp = self.tp if self.sequence_parallel else None
        full_grad = SequenceGather(grad_output, tp)
        grad_input: Tensor | None = None
        if ctx.needs_input_grad[0] and tp is not None and self.chunks.gather > 1:
            product = gemms.input_gradient_chunks(grad_output, weight, tp)
            # wgrad, if it follows, reads the gathered gradient that the chunks leave behind
            full = empty_gathered(grad_output, tp) if ctx.needs_input_grad[1] and not deferring else None
            count, carveout = self.chunks.gather, self.sm_carveout
            grad_input = gathered_product(grad_output, product, weight.shape[1], tp, count, full, carveout)
            if full is not None:
                full_grad = SequenceGather(full, None)
        elif ctx.needs_input_grad[0]:
            then_weight = ctx.needs_input_grad[1] and not deferring
            grad_input = gemms.input_gradient(full_grad.full(), weight, then_weight=then_weight)
        # a queued gradient keeps this rank's slice of grad_output, not the gathered one
        gather = SequenceGather(grad_output, tp) if deferring else full_grad
        pending = _weight_gradient(ctx, inputs, gather, grad_output, None)
        return grad_input, *_compute_or_queue(pending)
