"""Linears in 8 bits: which layers have them, and what their casts move.

megapipe's own fp8 linears find an operand's largest elements in one pass and cast the operand in another, with its
transpose: a kernel each on CUDA or with --compile-pointwise, else a chain of them over a copy in fp32. Maxima of blocks
take a pass for each layout, and zeros fill the summed dim up to whole blocks. tests/gpu/test_generated_code.py has the
kernels.
Transformer Engine makes both layouts in one pass and casts weights for every microbatch; the copies it keeps are not
known and not counted.
"""

from __future__ import annotations

from dataclasses import dataclass

from megapipe.config.model import PrecisionConfig
from megapipe.dtypes import MICRO_BLOCK
from megapipe.layers.table import RankShape

WIDE = 4  # bytes of fp32


@dataclass(frozen=True)
class Casts:
    """Bytes that fp8 moves in addition to the GEMMs, for each element."""

    inputs: float  # of a linear's input, in F
    gradients: float  # of its output's gradient, in I
    inputs_again: float  # of the input, in W
    gradients_again: float  # of the output's gradient, in W
    weight: float  # in each F
    weight_once: float  # of a weight, once a step
    weight_gradient: float  # that leaves its GEMM before it is added


def casts(shape: RankShape) -> Casts:
    """Return what the fp8 linears of this shape move."""
    element = shape.element
    if shape.transformer_impl == "transformer_engine":
        both_layouts = element + 2.0
        return Casts(both_layouts, both_layouts, 0.0, 0.0, both_layouts, 0.0, 0.0)
    is_fused = shape.compiles_casts
    if shape.fp8_block is not None:  # passes for maxima and cast, or a chain: zeros, fp32, maxima, scale, round
        cast = 2 * element + 1.0 if is_fused else WIDE + element + WIDE + WIDE + 2 * WIDE + WIDE + 1.0
        both = cast + element + 1.0 if is_fused else 2 * cast  # one pass casts to both layouts
        # a weight and its transpose share blocks, unless these are of rows
        weight = both if shape.fp8_block == MICRO_BLOCK else cast + 1.0
        gradients, again = (cast, cast) if shape.splits_backward else (both, 0.0)
        return Casts(cast, gradients, cast, again, 0.0, weight, 3.0 * WIDE)
    # a chain of kernels: read, raise to fp32, scale, clamp, round
    cast = element + 1.0 if is_fused else element + WIDE + 2 * WIDE + 2 * WIDE + WIDE + 1.0
    straight = element + cast  # one more pass finds the largest element
    # the transpose instead of the cast, and in addition to it
    columns, both = (straight, straight + 1.0) if is_fused else (straight + 2.0, straight + 2.0)
    gradients, again = (straight, columns) if shape.splits_backward else (both, 0.0)
    return Casts(straight, gradients, columns, again, 0.0, both, 3.0 * WIDE)


def fp8_layers(precision: PrecisionConfig, num_layers: int) -> range:
    """Return the global numbers of the layers whose linears multiply in 8 bits."""
    if precision.fp8_format is None:
        return range(0)
    if not precision.first_last_layers_bf16:
        return range(num_layers)
    return range(precision.num_layers_at_start_in_bf16, num_layers - precision.num_layers_at_end_in_bf16)
