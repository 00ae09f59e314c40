"""The three products of a linear, in the arithmetic of its operands: `PlainGemms`; in 8 bits: `fp8.Fp8Gemms`.

Names as in linear.py's table: x [.., in], weight [out, in], dy [.., out]; leading dims are tokens. All of one rank.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from megapipe.comm.groups import Group
from megapipe.tensor_parallel.gradient_slot import GradientSlot

ChunkProduct = Callable[[Tensor, Tensor], None]
"""(x [ranks, rows, n], out [ranks, rows, m]): out = x M + bias, where the rows of one rank may lie apart from those of the next."""


class Gemms(Protocol):
    """What a linear's Function asks for."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """x W^T + bias, [.., out]; no view of another tensor."""

    def input_gradient(self, grad_output: Tensor, weight: Tensor) -> Tensor:
        """dy W, [.., in]."""

    def forward_chunks(self, x: Tensor, weight: Tensor, bias: Tensor | None, group: Group | None) -> ChunkProduct:
        """`forward` chunk by chunk. x: all of it, or with a group this rank's slice of what is gathered over it."""

    def input_gradient_chunks(self, grad_output: Tensor, weight: Tensor, group: Group | None) -> ChunkProduct:
        """`input_gradient` chunk by chunk; as above."""

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

    def forward_chunks(self, x: Tensor, weight: Tensor, bias: Tensor | None, group: Group | None) -> ChunkProduct:
        return partial(_multiply, weight.t(), bias)

    def input_gradient_chunks(self, grad_output: Tensor, weight: Tensor, group: Group | None) -> ChunkProduct:
        return partial(_multiply, weight, None)

    def weight_gradient(self, grad_output: Tensor, inputs: Tensor) -> Tensor:
        return torch.mm(grad_output.t(), inputs)

    def add_weight_gradient(self, slot: GradientSlot, grad_output: Tensor, inputs: Tensor) -> None:
        slot.add_outer(grad_output, inputs)


def _multiply(matrix: Tensor, bias: Tensor | None, x: Tensor, out: Tensor) -> None:
    """out [ranks, rows, m] = x [ranks, rows, n] matrix [n, m] + bias [m]."""
    if x.shape[0] == 1:
        if bias is None:
            torch.mm(x[0], matrix, out=out[0])
        else:
            torch.addmm(bias, x[0], matrix, out=out[0])
        return
    matrices = matrix.expand(x.shape[0], *matrix.shape)  # one matrix in memory: batched GEMMs take a stride of 0
    if bias is None:
        torch.bmm(x, matrices, out=out)
    else:
        torch.baddbmm(bias, x, matrices, out=out)


PLAIN_GEMMS = PlainGemms()
