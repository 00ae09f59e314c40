"""What fp8 changes in a plan: copies of the linears' weights in 8 bits, what casts move, what they make and free again.

Counted as tensor_parallel/fp8.py computes: an operand's largest element is found in one pass and the operand cast in another; as written
that is a chain of kernels over a copy in fp32, with --compile-pointwise one kernel. Of Transformer Engine: one pass makes both layouts, and
weights are cast for every microbatch; the copies that it keeps are not known and not counted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megapipe.config.config import Config
from megapipe.config.precision import PrecisionConfig
from megapipe.dtypes import ELEMENT_BYTES
from megapipe.plan.activations import LocalSizes
from megapipe.plan.linears import linear_elements
from megapipe.schedule.partition import StageLayers

COPIES = 2  # of a weight, a byte an element: as it is, and transposed
WIDE = 4  # bytes of fp32


@dataclass(frozen=True)
class Casts:
    """Bytes that memory moves beyond the GEMMs, an element: of a linear's input in F, of its output's gradient in I, of both in W; of a
    weight in F of every microbatch, and once a step; of a weight gradient that leaves its GEMM before it is added."""

    inputs: float
    gradients: float
    both: float
    weight: float
    weight_once: float
    weight_gradient: float

    @classmethod
    def of(cls, config: Config) -> Casts | None:
        """None without fp8."""
        element = ELEMENT_BYTES[config.precision.dtype]
        if config.precision.fp8_format is None:
            return None
        if config.kernels.transformer_impl == "transformer_engine":
            both_layouts = element + 2.0
            return cls(both_layouts, both_layouts, 0.0, both_layouts, 0.0, 0.0)
        largest = element
        # as written: read, raised to fp32, scaled, clamped, rounded
        cast = element + 1.0 if config.kernels.compile_pointwise else element + WIDE + 2 * WIDE + 2 * WIDE + WIDE + 1.0
        transposed = 2.0
        straight = largest + cast
        return cls(straight, straight, straight + transposed, 0.0, straight + transposed, 3.0 * WIDE)


def fp8_layers(precision: PrecisionConfig, num_layers: int) -> range:
    """Global numbers of the layers whose linears multiply in 8 bits, of a model with so many."""
    if precision.fp8_format is None:
        return range(0)
    if not precision.first_last_layers_bf16:
        return range(num_layers)
    return range(precision.num_layers_at_start_in_bf16, num_layers - precision.num_layers_at_end_in_bf16)


def num_fp8_layers(config: Config, layers: StageLayers) -> int:
    """Of a stage."""
    chosen = fp8_layers(config.precision, config.model.num_layers)
    return len(range(max(layers.first_layer, chosen.start), min(layers.last_layer_exclusive, chosen.stop)))


def copies_bytes(config: Config, sizes: LocalSizes, stages: Iterable[StageLayers]) -> int:
    """The 8-bit copies of the linears' weights of some stages, which lie there from the first forward of a step to the next step."""
    if config.kernels.transformer_impl != "local":
        return 0
    return COPIES * linear_elements(config.model, sizes) * sum(num_fp8_layers(config, layers) for layers in stages)


@dataclass(frozen=True)
class LinearBytes:
    """What one linear's backward makes and frees again in 8 bits. raised: bytes an element of the copy that a cast as written makes first;
    0 where it is one kernel. is_cuda: torch._scaled_mm; elsewhere rounded operands are raised to fp32 and multiplied there."""

    raised: int
    is_cuda: bool

    @classmethod
    def of(cls, config: Config, layers: StageLayers, is_cuda: bool) -> LinearBytes | None:
        """None where no linear of the stage multiplies in 8 bits, or where a library does it."""
        if config.kernels.transformer_impl != "local" or not num_fp8_layers(config, layers):
            return None
        return cls(0 if config.kernels.compile_pointwise else WIDE, is_cuda)

    def input_gradient(self, tokens: int, rows: int, columns: int) -> int:
        """Beside the input gradient itself: [tokens, rows] times a weight [rows, columns]."""
        gradient = tokens * rows
        raised = 0 if self.is_cuda else WIDE * (gradient + rows * columns + tokens * columns)
        return max((1 + self.raised) * gradient, gradient + raised)

    def weight_gradient(self, tokens: int, rows: int, columns: int) -> int:
        """The product in fp32, [rows, columns], and its operands [tokens, rows] and [tokens, columns], cast one after the other."""
        gradient, inputs, product = tokens * rows, tokens * columns, WIDE * rows * columns
        cast = max((1 + self.raised) * gradient, gradient + (1 + self.raised) * inputs)
        raised = 0 if self.is_cuda else max(WIDE * (gradient + inputs), product)
        return max(cast, gradient + inputs + raised + product)
