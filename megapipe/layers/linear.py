"""Linears of a part: their parameters, what their gradients make and free again, and what multiplying in 8 bits adds.

megapipe's own fp8 linears find an operand's largest elements in one pass and cast the operand in another, with its
transpose: a kernel each on CUDA or with --compile-pointwise, else a chain of them over a copy in fp32. Maxima of blocks
take a pass for each layout, and zeros fill the summed dim up to whole blocks. tests/gpu/test_generated_code.py has the
kernels.
Transformer Engine makes both layouts in one pass and casts weights for every microbatch; the copies it keeps are not
known and not counted.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from megapipe.config.model import ModelConfig, PrecisionConfig
from megapipe.dtypes import BLOCK, MICRO_BLOCK, SCALES_MULTIPLE, blocks_of, micro_scales
from megapipe.layers.table import (
    ALL_REDUCE,
    Backward,
    Collectives,
    Gemm,
    Operation,
    RankShape,
    Table,
    total_bytes,
)
from megapipe.sharding.spec import Init, ParamSpec, Slicing

COPIES = 2  # of a weight, one byte an element: as it is, and transposed
WIDE = 4  # bytes of fp32


def output_std(model: ModelConfig) -> float:
    """Return the standard deviation of the initial weights of the last linear of each residual branch."""
    return model.init_method_std / math.sqrt(2 * model.num_layers)


@dataclass(frozen=True)
class LinearTable:
    """The parameters of one linear: weight [outputs, inputs], cut over tp as `slicing` says, and perhaps a bias."""

    name: str
    outputs: int
    inputs: int
    slicing: Slicing
    has_bias: bool
    std: float

    def parameters(self, owner: int, sequence_parallel: bool) -> Iterator[ParamSpec]:
        """Yield weight and bias.

        A row-parallel bias is added after the sum over tp: each rank sees only the gradient of its tokens.
        """
        name, is_column = self.name, self.slicing.dim == 0
        shape, init = (self.outputs, self.inputs), Init("normal", self.std)
        yield ParamSpec(f"{name}.weight", shape, owner, self.slicing, init, matrix="outputs x inputs")
        if self.has_bias and is_column:
            yield ParamSpec(f"{name}.bias", (self.outputs,), owner, self.slicing, weight_decay=False)
        elif self.has_bias:
            is_partial = sequence_parallel
            yield ParamSpec(f"{name}.bias", (self.outputs,), owner, weight_decay=False, partial_gradient=is_partial)


def collectives(gemm: Gemm, shape: RankShape) -> Collectives:
    """Return the collectives of a linear over tp (Megatron's f and g).

    Column parallel: the input is gathered in F and again in W, and its gradient reduce-scattered in I. Row parallel:
    the output is reduce-scattered in F, and its gradient gathered in I, where the backward is split again in W. Without
    sequence parallelism only the sums remain, as all-reduces.
    """
    if not shape.sequence_parallel:
        return Collectives(inputs=ALL_REDUCE) if gemm.is_column else Collectives(forward=ALL_REDUCE)
    return Collectives(1, 1, int(gemm.is_trained and (gemm.is_column or shape.splits_backward)))


# linear -> what is kept as its input and, but for routers, read by its weight gradient alone
INPUTS = {"linear_qkv": "norm outputs", "linear_fc1": "norm outputs", "linear_fc2": "mlp activation"}


def without_weight_gradients(table: Table, frozen: Collection[str], shape: RankShape, hidden: int) -> Table:
    """Return a table in which the linears `frozen` have no weight gradient: nothing of them waits for W, and inputs
    that nothing else reads are not kept. hidden: bytes of the gradient of the part's input.

    Experts and linears of latents keep their inputs here, which is at least what they take.
    """
    operations, start = {operation.name: operation for operation in table.operations}, table.operations[0].name
    less_left = less_at_start = 0
    for name in [name for name, operation in operations.items() if name in frozen and operation.gemm is not None]:
        operation, held = operations[name], 0
        gemm, gradient = operation.gemm, operation.deferred_bytes
        assert gemm is not None
        if not gemm.is_fp8 and not shape.splits_backward:
            gathered = shape.gathered_bytes(gemm.inputs) if gemm.is_column else 0
            held = weight_gradient_bytes(gemm, shape) + gathered
        sent = replace(operation.collectives, weights=0)
        operations[name] = _without(replace(operation, deferred_bytes=0, collectives=sent), "", held)
        for keeper in (name, start) if name in INPUTS and "router" not in operations else ():
            before = total_bytes(operations[keeper].keeps)
            operations[keeper] = _without(operations[keeper], INPUTS[name], frees=not shape.splits_backward)
            gradient -= before - total_bytes(operations[keeper].keeps)
        less_left += gradient
        less_at_start += 0 if name == "linear_proj" else gradient
    left = table.left_bytes
    if shape.splits_backward:  # output gradients do not wait while the first operation's backward runs, nor after it
        operations[start], left = _without(operations[start], "", less_at_start), max(hidden, left - less_left)
    return replace(table, operations=tuple(operations.values()), left_bytes=left)


def _without(operation: Operation, kept: str, held: int = 0, frees: bool = False) -> Operation:
    """Return an operation that does not keep tensors of this name, whose backward holds so much less. frees: it is this
    backward that would free them.
    """
    keeps, backward = tuple(each for each in operation.keeps if each.name != kept), operation.backward
    if backward is not None:
        freed = frees * (total_bytes(operation.keeps) - total_bytes(keeps))
        backward = Backward(max(0, backward.held - held), max(0, backward.frees - freed))
    return replace(operation, keeps=keeps, backward=backward)


def column_gradient_bytes(gemm: Gemm, shape: RankShape) -> int:
    """Return what a column-parallel linear's backward holds: the input gradient before and after its reduction, the
    gathered input and the weight gradient.
    """
    whole = shape.tokens * gemm.inputs * shape.element
    reduced = shape.hidden_bytes(gemm.inputs) if shape.sequence_parallel else 0
    gathered = shape.gathered_bytes(gemm.inputs) if gemm.is_trained and not shape.splits_backward else 0
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
    """Return what a weight gradient [outputs, inputs] takes before it is added to the main gradients: fp32 on CUDA if
    they are, else the model's dtype; nothing if they have the model's dtype, to which GEMMs add in place, and in I.
    Operands in 8 bits come on top.
    """
    if gemm.is_fp8 and shape.transformer_impl == "local":
        return fp8_gradient_bytes(gemm, shape)
    is_wide = shape.element == shape.wide
    adds_in_place = is_wide if shape.gradient_dtype is None else shape.gradient_dtype == shape.dtype
    if shape.splits_backward or adds_in_place or not gemm.is_trained:
        return 0
    return gemm.num_weights * (shape.wide if shape.is_cuda and shape.gradient == shape.wide else shape.element)


@dataclass(frozen=True)
class Cast:
    """The cast of a matrix [rows, k] to 8 bits, in bytes. raised: as fp32 again, for a product without a kernel."""

    kept: int
    made: int  # while it is made, with `kept`
    raised: int

    @classmethod
    def of(cls, rows: int, k: int, shape: RankShape) -> Cast:
        """Count the values, and the scales of blocks. A cast that is several kernels copies to fp32 first."""
        block = shape.fp8_block
        elements = rows * (k if block is None else blocks_of(k, block) * block)
        wide = 0 if block is None else WIDE * elements // block
        scales = math.prod(micro_scales(rows, k)) if block == MICRO_BLOCK else wide
        kept, raised = elements + scales, WIDE * elements
        return cls(kept, kept if shape.compiles_casts else kept + raised + 2 * wide, raised)


def fp8_weight_bytes(gemm: Gemm, shape: RankShape) -> int:
    """Return the bytes of a weight in 8 bits and of its transpose, with the scales of blocks."""
    if shape.fp8_block is None:
        return COPIES * gemm.num_weights
    if shape.fp8_block == MICRO_BLOCK:
        return sum(Cast.of(*sizes, shape).kept for sizes in ((gemm.outputs, gemm.inputs), (gemm.inputs, gemm.outputs)))
    rows, columns = blocks_of(gemm.outputs), blocks_of(gemm.inputs)
    scales = rows * (columns + -columns % SCALES_MULTIPLE) + columns * (rows + -rows % SCALES_MULTIPLE)
    return BLOCK * (gemm.outputs * columns + gemm.inputs * rows) + WIDE * scales


def fp8_gradient_bytes(gemm: Gemm, shape: RankShape) -> int:
    """Return what a product in 8 bits of the backward allocates: in I in addition to the input gradient, else a weight
    gradient in fp32 and its operands, cast in turn.

    Without a kernel on CUDA the rounded operands are raised to fp32 and multiplied there.
    """
    tokens = shape.own_tokens if gemm.is_replicated else shape.tokens
    gradient = Cast.of(tokens, gemm.outputs, shape)
    if shape.splits_backward:
        matrix = Cast.of(gemm.inputs, gemm.outputs, shape)
        raised = 0 if shape.is_cuda else gradient.raised + matrix.raised + WIDE * tokens * gemm.inputs
        return max(gradient.made, gradient.kept + raised)
    columns, inputs = Cast.of(gemm.outputs, tokens, shape), Cast.of(gemm.inputs, tokens, shape)
    product = WIDE * gemm.num_weights
    # both layouts of the gradient while that of the inputs is computed; blocks are cast for each
    second = columns.made if shape.fp8_block is not None else columns.kept
    cast = max(gradient.made, gradient.kept + second, columns.kept + inputs.made)
    raised = 0 if shape.is_cuda else columns.raised + inputs.raised
    if not shape.is_cuda and shape.fp8_block is None:  # scaled afterwards, as another tensor
        raised = max(raised, product)
    return max(cast, columns.kept + inputs.kept + raised + product)


def fp8_group_bytes(gemm: Gemm, rows: int, groups: int, shape: RankShape) -> tuple[int, int]:
    """Return what products in 8 bits of rows in groups, of a matrix each, allocate in the backward: a weight gradient,
    and an input gradient besides its result. 0 for others.

    By tensor, gradient and inputs are cast whole, and transposed and multiplied group by group; blocks of the rows of a
    group are cast when it is multiplied. Input gradients in blocks of 32 may be one grouped product on CUDA.
    """
    if not gemm.is_fp8:
        return 0, 0
    of_group = -(-rows // groups)
    product, is_emulated = WIDE * gemm.num_weights, not shape.is_cuda
    outer, inner = Cast.of(gemm.outputs, of_group, shape), Cast.of(gemm.inputs, of_group, shape)
    operands = outer.kept + inner.kept
    multiplied = operands + product + (outer.raised + inner.raised if is_emulated else 0)
    if shape.fp8_block is not None:
        own, matrix = Cast.of(of_group, gemm.outputs, shape), Cast.of(gemm.inputs, gemm.outputs, shape)
        raised = of_group * gemm.inputs * shape.element  # the product, before it is copied to its rows
        if is_emulated:
            raised = own.raised + matrix.raised + WIDE * of_group * gemm.inputs
        casts = max(outer.made + inner.kept, outer.kept + inner.made)
        # a grouped product, where torch has one, takes all rows at once
        whole = Cast.of(rows, gemm.outputs, shape).made if shape.fp8_block == MICRO_BLOCK and shape.is_cuda else 0
        return max(casts, multiplied), max(own.made, own.kept + raised, whole)
    if is_emulated:
        multiplied = max(multiplied, operands + 2 * product)
    gradient, inputs = Cast.of(rows, gemm.outputs, shape), Cast.of(rows, gemm.inputs, shape)
    cast = max(gradient.made, gradient.kept + inputs.made)
    raised = outer.raised + inner.raised + product if is_emulated else 0
    weight = max(cast, gradient.kept + inputs.kept + multiplied)
    return weight, max(gradient.made, gradient.kept + raised)


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
