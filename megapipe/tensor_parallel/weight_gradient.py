"""The weight's half of a backward as an object: computed at once under the input gradient's communication, or queued until W.

It holds only the layer's input (or the recipe to make it again) and its output gradient, both still scattered over the sequence under
sequence parallelism: what waits costs 1 / tp of its bytes and is gathered when it is used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megapipe.comm.collectives import Work, all_gather
from megapipe.comm.groups import Group
from megapipe.tensor_parallel.gemms import PLAIN_GEMMS, Gemms
from megapipe.tensor_parallel.gradient_slot import GradientSlot

Slots = Mapping[str, GradientSlot]


class Remake(NamedTuple):
    """How a linear's input, which was not kept, is made again: function(*arguments), bit for bit.

    is_made_in_backward: the backward makes it anyway, right behind the linear's own (the output of a replay); what waits for W then asks
    the function without arguments, and holds none.
    """

    function: Callable[..., Tensor]
    arguments: tuple[Any, ...]
    is_made_in_backward: bool = False


class Gathering:
    """A tensor that will be needed whole: [s / tp, b, n] now, [s, b, n] after an asynchronous all-gather along the sequence."""

    __slots__ = ("_group", "_tensor", "_whole", "_work")

    def __init__(self, tensor: Tensor, group: Group | None) -> None:
        """group None: the tensor is whole already."""
        self._tensor = tensor
        self._group = group
        self._whole: Tensor | None = None
        self._work: Work | None = None

    def launch(self) -> None:
        """Start the all-gather, once."""
        if self._group is not None and self._work is None:
            tensor = self._tensor = self._tensor.contiguous()
            self._whole = tensor.new_empty((tensor.shape[0] * self._group.size, *tensor.shape[1:]))
            self._work = all_gather(self._whole, tensor, self._group, async_op=True)

    def whole(self) -> Tensor:
        """The whole tensor; waits for the all-gather."""
        if self._group is None:
            return self._tensor
        self.launch()
        assert self._work is not None and self._whole is not None
        self._work.wait()
        return self._whole


class LinearWeightGradient:
    """weight += grad_output^T @ input, bias += sum of grad_output over its positions, for one use of one linear.

    inputs: [s, b, in] or, with gather_input, [s / tp, b, in]; with remake, None: made again by fn(*args) when launched.
    grad_output: Gathering to [s, b, out]. grad_bias_from: the output gradient to sum for the bias, this rank's positions only
    ([s / tp, b, out] in a row-parallel linear under sequence parallelism: a partial gradient, declared as such in the ParamSpec).
    """

    def __init__(
        self,
        weight: Tensor | None,
        bias: Tensor | None,
        slots: Slots,
        inputs: Tensor | None,
        remake: Remake | None,
        gather_input: Group | None,
        grad_output: Gathering,
        grad_bias_from: Tensor,
        gemms: Gemms = PLAIN_GEMMS,
    ) -> None:
        """weight, bias: None where no gradient is wanted."""
        self.weight, self.bias, self.slots = weight, bias, slots
        self.inputs, self.remake, self.gather_input = inputs, remake, gather_input
        self.grad_output, self.grad_bias_from, self.gemms = grad_output, grad_bias_from, gemms
        self._gathered_input: Gathering | None = None

    @torch.no_grad()
    def launch(self) -> None:
        """Make the input again if it was not kept, and start the gathers."""
        if self.weight is not None:
            self.grad_output.launch()
            if self.inputs is None:
                assert self.remake is not None
                self.inputs = self.remake.function(*self.remake.arguments)
            self._gathered_input = Gathering(self.inputs, self.gather_input)
            self._gathered_input.launch()

    def compute(self) -> tuple[Tensor | None, Tensor | None]:
        """Accumulate into the slots; (weight, bias) gradients for autograd where there is no slot, None where there is."""
        return self._weight_gradient(), self._bias_gradient()

    @torch.no_grad()
    def accumulate(self) -> None:
        """As `compute`, but what has no slot goes to .grad, as autograd would have done."""
        weight_gradient, bias_gradient = self.compute()
        add_to_grad(self.weight, weight_gradient)
        add_to_grad(self.bias, bias_gradient)

    def _weight_gradient(self) -> Tensor | None:
        if self.weight is None:
            return None
        assert self._gathered_input is not None, "launch() comes before compute()"
        inputs, grad_output = self._gathered_input.whole(), self.grad_output.whole()
        inputs = inputs.reshape(-1, inputs.shape[-1])
        grad_output = grad_output.reshape(-1, grad_output.shape[-1])
        slot = self.slots.get("weight")
        if slot is None:
            return self.gemms.weight_gradient(grad_output, inputs)
        self.gemms.add_weight_gradient(slot, grad_output, inputs)
        slot.ready()
        return None

    def _bias_gradient(self) -> Tensor | None:
        if self.bias is None:
            return None
        grad_output = self.grad_bias_from.reshape(-1, self.grad_bias_from.shape[-1])
        slot = self.slots.get("bias")
        if slot is None:
            return grad_output.sum(0)
        slot.add_column_sum(grad_output)
        slot.ready()
        return None


def add_to_grad(parameter: Tensor | None, gradient: Tensor | None) -> None:
    """parameter.grad += gradient, for a deferred gradient without a slot. Raises RuntimeError for a tensor that is not a leaf."""
    if parameter is None or gradient is None:
        return
    if not parameter.is_leaf:
        raise RuntimeError(
            "a deferred weight gradient needs a GradientSlot or a leaf parameter; this weight is the result of an operation"
        )
    parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
