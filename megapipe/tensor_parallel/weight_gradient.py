"""Weight gradients as objects: computed at once, under the input gradient's communication, or queued until W.

An autograd Function does not know which half of a split backward it runs in, and would compute both GEMMs twice. So the
whole autograd backward runs at I (input gradient), where linears and embeddings put their weight gradients into the
`WeightQueue`, and W (weight gradient) runs the queue. A queued gradient holds the layer's input (or what recomputes
it) and the output gradient, both still split over the sequence under sequence parallelism: it costs 1 / tp of the
bytes, and gathers when used.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megapipe.comm.collectives import Work, all_gather
from megapipe.comm.groups import Group
from megapipe.tensor_parallel.gemms import Gemms
from megapipe.tensor_parallel.gradient_slot import Slots
from megapipe.tensor_parallel.mappings import empty_gathered


class InputRecompute(NamedTuple):
    """How to recompute the input of a linear, bit for bit, instead of saving it: function(*inputs).

    in_backward: the backward recomputes the input anyway, right after the linear's own backward (a
    `RecomputedSegment`); a gradient that waits for W then calls the function without inputs and holds none.
    """

    function: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]
    in_backward: bool = False


class SequenceGather:
    """An asynchronous all-gather of a tensor along the sequence: [s / tp, b, n] -> [s, b, n].

    group None: already complete.
    """

    __slots__ = ("_full", "_group", "_work", "tensor")

    def __init__(self, tensor: Tensor, group: Group | None) -> None:
        self.tensor = tensor
        self._group = group
        self._full: Tensor | None = None
        self._work: Work | None = None

    @property
    def is_launched(self) -> bool:
        return self._work is not None

    def launch(self) -> None:
        """Start the all-gather, once."""
        if self._group is not None and self._work is None:
            self.tensor = self.tensor.contiguous()
            self._full = empty_gathered(self.tensor, self._group)
            self._work = all_gather(self._full, self.tensor, self._group, async_op=True)

    def full(self) -> Tensor:
        """Wait for the all-gather and return the full tensor."""
        if self._group is None:
            return self.tensor
        self.launch()
        assert self._work is not None and self._full is not None
        self._work.wait()
        return self._full


class LinearWeightGradient:
    """The weight and bias gradient of one use of a linear: dW = dy^T x, db = sum of dy over its positions.

    inputs: (x,), [s, b, in] or, with gather_input, [s / tp, b, in]; with recompute, the arguments that recompute x.
    grad_output: gathers to [s, b, out]. bias_grad_output: the output gradient that the bias sums, at this rank's
    positions only ([s / tp, b, out] in a row-parallel linear under sequence parallelism: a partial gradient, declared
    so in the ParamSpec).
    """

    def __init__(
        self,
        weight: Tensor | None,
        bias: Tensor | None,
        slots: Slots,
        gemms: Gemms,
        inputs: tuple[Tensor, ...],
        recompute: Callable[..., Tensor] | None,
        gather_input: Group | None,
        grad_output: SequenceGather,
        bias_grad_output: Tensor,
    ) -> None:
        """weight, bias: None if they need no gradient."""
        self.weight, self.bias, self.slots, self.gemms = weight, bias, slots, gemms
        self.inputs, self.recompute, self.gather_input = inputs, recompute, gather_input
        self.grad_output, self.bias_grad_output = grad_output, bias_grad_output
        self._input: SequenceGather | None = None

    @torch.no_grad()
    def launch(self) -> None:
        """Recompute the input if it was not saved, and start the gathers."""
        if self.weight is not None:
            self.grad_output.launch()
            x = self.inputs[0] if self.recompute is None else self.recompute(*self.inputs)
            self._input = SequenceGather(x, self.gather_input)
            self._input.launch()

    def compute(self) -> tuple[Tensor | None, Tensor | None]:
        """Add to the slots; return the (weight, bias) gradients without a slot, for autograd."""
        return self._weight_gradient(), self._bias_gradient()

    @torch.no_grad()
    def accumulate(self) -> None:
        """Add to the slots, and gradients without a slot to .grad, as autograd would."""
        weight_gradient, bias_gradient = self.compute()
        add_to_grad(self.weight, weight_gradient)
        add_to_grad(self.bias, bias_gradient)

    def _weight_gradient(self) -> Tensor | None:
        if self.weight is None:
            return None
        assert self._input is not None, "launch() must be called before compute()"
        inputs, grad_output = self._input.full().flatten(0, -2), self.grad_output.full().flatten(0, -2)
        slot = self.slots.get("weight")
        if slot is None:
            return self.gemms.weight_gradient(grad_output, inputs)
        self.gemms.add_weight_gradient(slot, grad_output, inputs)
        slot.ready()
        return None

    def _bias_gradient(self) -> Tensor | None:
        if self.bias is None:
            return None
        grad_output = self.bias_grad_output.flatten(0, -2)
        slot = self.slots.get("bias")
        if slot is None:
            return grad_output.sum(0)
        slot.add_column_sum(grad_output)
        slot.ready()
        return None


def add_to_grad(parameter: Tensor | None, gradient: Tensor | None) -> None:
    """Add a deferred gradient without a slot to parameter.grad. Raises RuntimeError for a tensor that is not a leaf."""
    if parameter is None or gradient is None:
        return
    if not parameter.is_leaf:
        raise RuntimeError(
            "a deferred weight gradient needs a GradientSlot or a leaf parameter; "
            "this weight is the result of an operation"
        )
    parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)


class QueuedGradient(Protocol):
    """A weight gradient that waits for W."""

    def launch(self) -> None:
        """Start the communication it needs."""

    def accumulate(self) -> None:
        """Finish the communication, compute the gradient and add it to its parameter."""


class WeightQueue:
    """First-in, first-out lists of weight gradients of one stage, one list per key (the microbatch).

    Gradients submitted between `defer` and `immediate` wait; outside, `is_deferring` is False and a linear computes
    its weight gradient inside its own backward.
    """

    def __init__(self) -> None:
        self.is_deferring = False
        self._current: list[QueuedGradient] = []
        self._waiting: dict[Hashable, list[QueuedGradient]] = {}

    def defer(self, key: Hashable) -> None:
        """Start to queue under `key`.

        Raises RuntimeError if the queue defers already or still holds gradients of `key`.
        """
        if self.is_deferring or key in self._waiting:
            reason = "the queue is deferring already" if self.is_deferring else "its previous ones are still waiting"
            raise RuntimeError(f"weight gradients of {key!r} cannot be deferred: {reason}")
        self._current = self._waiting[key] = []
        self.is_deferring = True

    def immediate(self) -> None:
        """Stop queueing: compute at once what is submitted from now on."""
        self._current = []
        self.is_deferring = False

    def submit(self, gradient: QueuedGradient) -> None:
        """Queue a weight gradient while deferring, otherwise compute it at once."""
        if self.is_deferring:
            self._current.append(gradient)
        else:
            gradient.launch()
            gradient.accumulate()

    def run(self, key: Hashable) -> None:
        """Compute the gradients queued under `key` in order, each one's communication under the GEMM of the one before.

        Raises RuntimeError if nothing was deferred under `key`.
        """
        gradients = self._waiting.pop(key, None)
        if gradients is None:
            raise RuntimeError(f"no weight gradients are queued under {key!r}; queued: {list(self._waiting)!r}")
        gradients.reverse()
        if gradients:
            gradients[-1].launch()
        while gradients:
            current = gradients.pop()  # popped, so that its tensors are freed as soon as it is done
            if gradients:
                gradients[-1].launch()
            current.accumulate()

    @property
    def keys(self) -> tuple[Hashable, ...]:
        """Keys with queued gradients, oldest first; empty between steps."""
        return tuple(self._waiting)

    def clear(self) -> None:
        """Drop everything queued, after an error for example."""
        self.immediate()
        self._waiting.clear()
