"""The extra cost of linears that multiply in 8 bits: bytes that casts move, and copies and operands in 8 bits.

megapipe's own fp8 linears find an operand's largest element in one pass and cast the operand in another; without
--compile-pointwise that is a chain of kernels over a copy in fp32, with it one kernel. Transformer Engine makes both
layouts in one pass and casts weights for every microbatch; the copies it keeps are not known and not counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from megapipe.config.model import PrecisionConfig
from megapipe.layers.shape import RankShape

COPIES = 2  # of a weight, one byte an element: as it is, and transposed
WIDE = 4  # bytes of fp32


@dataclass(frozen=True)
class Casts:
    """Bytes that fp8 moves in addition to the GEMMs, for each element.

    inputs: of a linear's input, in F. gradients: of its output's gradient, in I. both: of these two, in W. weight: of
    a weight, in each F. weight_once: of a weight, once a step. weight_gradient: of a weight gradient that leaves its
    GEMM before it is added.
    """

    inputs: float
    gradients: float
    both: float
    weight: float
    weight_once: float
    weight_gradient: float


def casts(shape: RankShape) -> Casts:
    """Return what the fp8 linears of this shape move."""
    element = shape.element
    if shape.transformer_impl == "transformer_engine":
        both_layouts = element + 2.0
        return Casts(both_layouts, both_layouts, 0.0, both_layouts, 0.0, 0.0)
    largest = element
    # a chain of kernels: read, raise to fp32, scale, clamp, round
    cast = element + 1.0 if shape.compile_pointwise else element + WIDE + 2 * WIDE + 2 * WIDE + WIDE + 1.0
    transposed = 2.0
    straight = largest + cast
    return Casts(straight, straight, straight + transposed, 0.0, straight + transposed, 3.0 * WIDE)


def fp8_layers(precision: PrecisionConfig, num_layers: int) -> range:
    """Return the global numbers of the layers whose linears multiply in 8 bits."""
    if precision.fp8_format is None:
        return range(0)
    if not precision.first_last_layers_bf16:
        return range(num_layers)
    return range(precision.num_layers_at_start_in_bf16, num_layers - precision.num_layers_at_end_in_bf16)


def input_gradient_bytes(shape: RankShape, rows: int, columns: int) -> int:
    """Return the bytes allocated in addition to the input gradient: [tokens, rows] in 8 bits, times a weight
    [rows, columns].

    Without CUDA's torch._scaled_mm the rounded operands are raised to fp32 and multiplied there.
    """
    gradient = shape.tokens * rows
    raised = 0 if shape.is_cuda else WIDE * (gradient + rows * columns + shape.tokens * columns)
    return max((1 + _cast_copy(shape)) * gradient, gradient + raised)


def weight_gradient_bytes(shape: RankShape, rows: int, columns: int) -> int:
    """Return the bytes of a product in fp32, [rows, columns], and of its operands [tokens, rows] and [tokens,
    columns], cast in turn.
    """
    gradient, inputs, product = shape.tokens * rows, shape.tokens * columns, WIDE * rows * columns
    cast = max((1 + _cast_copy(shape)) * gradient, gradient + (1 + _cast_copy(shape)) * inputs)
    raised = 0 if shape.is_cuda else max(WIDE * (gradient + inputs), product)
    return max(cast, gradient + inputs + raised + product)


def _cast_copy(shape: RankShape) -> int:
    """Return the bytes an element of the fp32 copy that a cast makes first; 0 where the cast is one kernel."""
    return 0 if shape.compile_pointwise else WIDE
