"""The three products of a linear, in the arithmetic of its operands: `PlainGemms`; in 8 bits: `fp8.Fp8Gemms`.

Names as in linear.py's table: x [.., in], weight [out, in], dy [.., out]; leading dims are tokens. All of one rank.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from megapipe.tensor_parallel.gradient_slot import GradientSlot


class Gemms(Protocol):
    """What a linear's Function asks for."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x W^T + bias, [.., out]; no view of another tensor."""

    def input_gradient(self, grad_output: Tensor, weight: Tensor) -> Tensor:
        """dy W, [.., in]."""

    def weight_gradient(self, grad_output: Tensor, inputs: Tensor) -> Tensor:
        """dy^T x, [out, in]; grad_output [tokens, out], inputs [tokens, in]."""

    def add_weight_gradient(self, slot: GradientSlot, grad_output: Tensor, inputs: Tensor) -> None:
        """dy^T x, added to the slot's main gradient."""


class PlainGemms:
    """In the operands' own dtype."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        # no view of another tensor: autograd would forbid in-place work on it (rotation, residual sum)
        y = functional.linear(x.reshape(-1, x.shape[-1]), weight, bias)
        return torch.ops.aten._unsafe_view(y, (*x.shape[:-1], weight.shape[0]))

    def input_gradient(self, grad_output: Tensor, weight: Tensor) -> Tensor:
        return torch.mm(grad_output.reshape(-1, weight.shape[0]), weight).view(*grad_output.shape[:-1], weight.shape[1])

    def weight_gradient(self, grad_output: Tensor, inputs: Tensor) -> Tensor:
        return torch.mm(grad_output.t(), inputs)

    def add_weight_gradient(self, slot: GradientSlot, grad_output: Tensor, inputs: Tensor) -> None:
        slot.add_outer(grad_output, inputs)


PLAIN_GEMMS = PlainGemms()
