"""Linears of a part: their parameters, and what their gradients make and free again on the way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megapipe.layers import fp8
from megapipe.layers.shape import RankShape
from megapipe.layers.table import ALL_REDUCE, Collectives, Gemm
from megapipe.sharding.slicing import Slicing
from megapipe.sharding.spec import Init, ParamSpec


@dataclass(frozen=True)
class Linear:
    """The parameters of one linear: weight [outputs, inputs], cut over tp as `slicing` says, and a bias where
    has_bias.
    """

    name: str
    outputs: int
    inputs: int
    slicing: Slicing
    has_bias: bool
    std: float

    def parameters(self, prefix: str, owner: int, sequence_parallel: bool) -> Iterator[ParamSpec]:
        """Yield weight and bias.

        A row-parallel bias is added after the sum over tp: each rank sees only the gradient of its tokens.
        """
        name, is_column = f"{prefix}{self.name}", self.slicing.dim == 0
        yield ParamSpec(f"{name}.weight", (self.outputs, self.inputs), owner, self.slicing, Init("normal", self.std))
        if self.has_bias and is_column:
            yield ParamSpec(f"{name}.bias", (self.outputs,), owner, self.slicing, weight_decay=False)
        elif self.has_bias:
            yield ParamSpec(
                f"{name}.bias", (self.outputs,), owner, weight_decay=False, partial_gradient=sequence_parallel
            )


def collectives(gemm: Gemm, shape: RankShape) -> Collectives:
    """Return the collectives of a linear over tp (Megatron's f and g).

    Column parallel: the input is gathered in F and again in W, and its gradient reduce-scattered in I. Row parallel:
    the output is reduce-scattered in F, and its gradient gathered in I. Without sequence parallelism only the sums
    remain, as all-reduces.
    """
    if not shape.sequence_parallel:
        return Collectives(inputs=ALL_REDUCE) if gemm.is_column else Collectives(forward=ALL_REDUCE)
    return Collectives(1, 1, 1 if gemm.is_column else 0)


def column_gradient_bytes(gemm: Gemm, shape: RankShape) -> int:
    """Return what the backward of a column-parallel linear holds: the input gradient before and after its reduction,
    the gathered input and the weight gradient.
    """
    whole = shape.tokens * gemm.inputs * shape.element
    reduced = shape.hidden_bytes(gemm.inputs) if shape.sequence_parallel else 0
    gathered = 0 if shape.splits_backward else shape.gathered_bytes(gemm.inputs)
    return whole + reduced + gathered + weight_gradient_bytes(gemm, shape)


def row_gradient_bytes(gemm: Gemm, shape: RankShape) -> int:
    """Return what the backward of a row-parallel linear holds: the gathered output gradient and the weight gradient.

    Chunked all-gathers hold two chunks at a time; the whole gathered gradient is held too, unless the backward is split
    and W gathers it separately.
    """
    weight, gathered = weight_gradient_bytes(gemm, shape), shape.gathered_bytes(gemm.outputs)
    if not shape.sequence_parallel or shape.chunks.gather == 1:
        return gathered + weight
    two = 2 * -(-gathered // shape.chunks.gather)
    return max(two, weight) + (0 if shape.splits_backward else gathered)


def weight_gradient_bytes(gemm: Gemm, shape: RankShape) -> int:
    """Return what a weight gradient [outputs, inputs] takes before it is added to the main gradients: fp32 on CUDA,
    the model's dtype elsewhere; nothing in fp32 and fp64, which are added in place, and in I. Operands in 8 bits come
    on top.
    """
    if gemm.is_fp8 and shape.transformer_impl == "local":
        make = fp8.input_gradient_bytes if shape.splits_backward else fp8.weight_gradient_bytes
        return make(shape, gemm.outputs, gemm.inputs)
    if shape.splits_backward or shape.element == shape.wide:
        return 0
    return gemm.num_weights * (shape.wide if shape.is_cuda else shape.element)
