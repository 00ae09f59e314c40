"""The GEMMs of a linear in 8 bits (Micikevicius et al. 2022, arXiv:2209.05433): one scale per tensor, sums in fp32.

    forward   x e4m3, W e4m3      dgrad   dy e4m3 or e5m2 (hybrid), W e4m3      wgrad   dy and x as above

A tensor t is cast to round(t s) with s = largest number of the format / (2^margin amax). amax is max |t| (recipe
tensorwise), or comes from this tensor's history over previous steps (delayed; tensorwise in the first step), so that
s is the same for all microbatches of a step and recomputed values have the same bits. Weights are cast once per run
of a schedule (`begin`), not once per microbatch. Inputs are saved for the backward in the model's dtype, as without
fp8, and cast when used. A gradient is cast once for both of its products, unless W waits. On CUDA a cast is compiled,
with its transpose and (delayed) its amax: as a chain of kernels it would move more bytes than fp8 saves.

In 8 bits are the linears of attention (latent attention's projections down to latents, too), of MLPs and shared
experts, the experts, and eh_proj of multi-token prediction, whose modules count as the last layer. Embedding, norms,
routers, core attention, the output layer and the gate of shared experts stay in the model's dtype or wider.

The rows of all experts of a rank are one tensor with one scale, as are their weights and their output gradients; each
expert's products are GEMMs of their own. Where rows are the summed dim, zeros fill an expert's rows up to a multiple
of 16, the least that the matrix units take.

Each rank casts the operands of its GEMMs: a gathered x is complete, so all tp ranks cast it alike; of W, and of
tensors split by columns, each tp rank has its own scales, finer than those of a single process. Maxima cross ranks
only where an operand is multiplied before it is completely gathered (chunked GEMMs) and its scale is not known from
earlier steps.

On GPUs the products are torch._scaled_mm (compute capability 8.9 or higher). On CPUs the rounded operands are
multiplied in fp32, which differs only in the order of sums; this is slow and meant for tests.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.utils._triton import has_triton

from megapipe.comm.collectives import all_reduce
from megapipe.comm.groups import Group
from megapipe.config.model import PrecisionConfig
from megapipe.tensor_parallel.gemms import ChunkProduct, Gemms, RowGroups
from megapipe.tensor_parallel.gradients import GradientSlot

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MIN_CAPABILITY = (8, 9)  # Ada; Hopper has 9.0
FNUZ_ARCHITECTURES = "gfx94"  # MI300: e4m3fnuz and e5m2fnuz
ROW_MULTIPLE = 16  # of the summed dim of a GEMM
C_COMPILERS = ("cc", "gcc", "clang")  # Triton builds its launchers with one


def fp8_unsupported_reason(device: torch.device) -> str | None:
    """Return why this GPU cannot multiply these formats, or its casts not be compiled; None if they can, and for a CPU,
    which emulates them.
    """
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    if torch.version.hip is not None:
        is_fnuz = torch.cuda.get_device_properties(device).gcnArchName.startswith(FNUZ_ARCHITECTURES)
        return f"{name} has other 8-bit formats (fnuz)" if is_fnuz else _uncompilable_reason()
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < MIN_CAPABILITY:
        return f"{name}, compute capability {major}.{minor}, has no fp8 matrix units (8.9 or higher has)"
    return _uncompilable_reason()


def _uncompilable_reason() -> str | None:
    """Return why torch.compile cannot fuse casts on this machine's GPU, or None."""
    lacking = None if has_triton() else "Triton, which comes with torch's wheels for GPUs (pip install triton)"
    if lacking is None and not any(map(shutil.which, C_COMPILERS)):
        lacking = "a C compiler (apt-get install gcc)"
    if lacking is None:
        return None
    return f"its casts, not fused, would make fp8 slower than bf16, and fusing them needs {lacking}; install it"


@dataclass(frozen=True)
class Fp8Tensor:
    """A matrix in 8 bits, values x scale_inverse. values: [rows, k], contiguous along k, which the GEMM sums over."""

    values: Tensor
    scale_inverse: Tensor  # fp32 scalar

    @classmethod
    def of(cls, x: Tensor, dtype: torch.dtype) -> Fp8Tensor:
        """Cast x [rows, k] with the scale from its largest element."""
        scale = fp8_scale(x.float().abs().amax(), dtype)
        return cls(cast_to_fp8(x, scale, dtype), scale.reciprocal())


def fp8_scale(amax: Tensor, dtype: torch.dtype, margin: int = 0) -> Tensor:
    """Return the factor that maps amax to the format's largest number / 2^margin; 1 for a tensor of zeros.

    A non-finite amax gives a non-finite scale, so that an overflow shows in the gradients.
    """
    largest = torch.finfo(dtype).max / 2.0**margin
    return torch.where(amax > 0, largest / amax, torch.ones_like(amax) + 0 * amax)


def cast_to_fp8(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x scale in an 8-bit format, saturating at its largest number (a delayed scale can be too large)."""
    largest = torch.finfo(dtype).max
    # in place: one fp32 copy, not three
    return x.to(torch.float32, copy=True).mul_(scale).clamp_(-largest, largest).to(dtype)


def cast_layouts(
    x: Tensor, scale: Tensor, dtype: torch.dtype, rows: bool, columns: bool, measures: bool
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return x [rows, k] in 8 bits, its transpose [k, rows], and its amax in fp32, each if asked for.

    Compiled it is one pass. Hopper's matrix units take the summed dim last, hence the transpose.
    """
    values = cast_to_fp8(x, scale, dtype)
    transposed = values.t().contiguous() if columns else None
    return values if rows else None, transposed, _amax(x) if measures else None


@cache
def cast_variant(dtype: torch.dtype, rows: bool, columns: bool, measures: bool) -> Callable[..., Any]:
    """Return cast_layouts (x, scale) with these options, as a function with a separate code object.

    torch.compile keeps 8 graphs for a code object, and with fullgraph a ninth is an error: options, shapes and strides
    of all linears would be more.
    """

    def cast(x: Tensor, scale: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        return cast_layouts(x, scale, dtype, rows, columns, measures)

    return FunctionType(cast.__code__.replace(), globals(), "cast_layouts", None, cast.__closure__)


def _amax(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, torch.inf, dtype=torch.float32)


def fp8_matmul(
    a: Fp8Tensor,
    b: Fp8Tensor,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
    *,
    fast: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Return a [m, k] times b [n, k] transposed, plus bias [n]: [m, n]. Rows of b need not be adjacent in memory.

    fast: sums may be kept in less than fp32 for some terms, as is usual in forwards. out: where to, without a bias.
    """
    if not a.values.is_cuda:  # emulated by an fp32 GEMM
        product = torch.mm(a.values.float(), b.values.float().t()) * (a.scale_inverse * b.scale_inverse)
        product = product.to(out_dtype)
        if out is not None:
            return out.copy_(product)
        return product if bias is None else product.add_(bias)
    if out is not None and out.is_meta:  # torch has no such kernel
        return out
    fused_bias = bias if out_dtype in (torch.bfloat16, torch.float16) else None  # the kernel adds no fp32 bias
    product = torch._scaled_mm(
        a.values,
        b.values.t(),
        scale_a=a.scale_inverse,
        scale_b=b.scale_inverse,
        bias=fused_bias,
        out_dtype=out_dtype,
        use_fast_accum=fast,
        **({} if out is None else {"out": out}),
    )
    return product if bias is None or bias is fused_bias else product.add_(bias)


def transposed_rows(x: Fp8Tensor, rows: slice) -> Fp8Tensor:
    """Return these rows of x [n, k] as [k, m], filled with zeros to a multiple of ROW_MULTIPLE."""
    count = rows.stop - rows.start
    columns = x.values.new_zeros(x.values.shape[1], count + -count % ROW_MULTIPLE)
    columns[:, :count].copy_(x.values[rows].t())
    return Fp8Tensor(columns, x.scale_inverse)


class TensorScale:
    """The scale of one operand of one linear.

    Its state stays in fixed device memory (CUDA graphs update it), and the host never waits for it.
    """

    def __init__(self, dtype: torch.dtype, precision: PrecisionConfig) -> None:
        self.dtype, self._margin = dtype, precision.fp8_margin
        self._length = precision.fp8_amax_history_len if precision.fp8_recipe == "delayed" else 0
        self._uses_maximum = precision.fp8_amax_compute_algo == "max"
        self._history: list[Tensor] = []  # amax of past steps, newest first
        self._seen: Tensor | None = None  # amax of this step so far
        self.delayed: Tensor | None = None  # the scale from the history
        self.delayed_inverse: Tensor | None = None

    @property
    def has_history(self) -> bool:
        """True if scales come from the amax of earlier steps."""
        return self._length > 0

    def scale_for(self, x: Tensor, records: bool, group: Group | None = None) -> Tensor:
        """Return the scale for x, an fp32 scalar. records: x enters the history, if scales are delayed.

        group: x is this rank's slice; without a delayed scale, the ranks of the group agree on the largest element.
        """
        records = records and self.has_history
        if self.delayed is not None and not records:
            return self.delayed
        amax = _amax(x)
        if self.delayed is None and group is not None:
            all_reduce(amax, group, "max")
        if records:
            self.record(amax)
        return fp8_scale(amax, self.dtype, self._margin) if self.delayed is None else self.delayed

    def record(self, amax: Tensor) -> None:
        """Add the amax of a tensor of this step."""
        if self._seen is None:
            self._seen = torch.zeros_like(amax)
        torch.maximum(self._seen, amax, out=self._seen)

    def step(self) -> None:
        """Finish a step: move what it saw into the history and update the delayed scale.

        A step that saw nothing but zeros, or nothing (experts without rows), counts as the one before.
        """
        if self._seen is None:
            return
        seen = torch.where(self._seen == 0, self._history[0], self._seen) if self._history else self._seen.clone()
        self._history = [seen, *self._history][: self._length]
        self._seen.zero_()
        amax = torch.stack(self._history).amax() if self._uses_maximum else self._history[0]
        scale = fp8_scale(amax, self.dtype, self._margin)
        inverse = scale.reciprocal()
        self.delayed = scale if self.delayed is None else self.delayed.copy_(scale)
        self.delayed_inverse = inverse if self.delayed_inverse is None else self.delayed_inverse.copy_(inverse)


class Fp8Gemms(Gemms):
    """The GEMMs of one linear in 8 bits, with its scales and its 8-bit weight. compiler: of the casts."""

    def __init__(self, precision: PrecisionConfig, compiler: Callable[[Any], Any] = lambda function: function) -> None:
        self._cast_kernel = cache(lambda *options: compiler(cast_variant(*options)))
        self.x = TensorScale(E4M3, precision)
        self.weight = TensorScale(E4M3, precision)
        self.gradient = TensorScale(E4M3 if precision.fp8_format == "e4m3" else E5M2, precision)
        self._weight: tuple[Fp8Tensor, Fp8Tensor] | None = None  # and its transpose, in fixed memory
        self._weight_is_current = False
        self._trains = True
        self._gradient_columns: Fp8Tensor | None = None  # from `input_gradient` to the weight gradient after it
        self._gradient_rows: Fp8Tensor | None = None  # from the weight gradient of groups to the input gradient after

    def begin(self, trains: bool) -> None:
        """Start a run of a schedule, possibly with new weights. trains: what it sees enters the history."""
        self._weight_is_current, self._trains = False, trains
        if trains:
            for scale in (self.x, self.weight, self.gradient):
                scale.step()

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        y = fp8_matmul(self._cast(self.x, rows)[0], self.cast_weight(weight)[0], x.dtype, bias, fast=True)
        return torch.ops.aten._unsafe_view(y, (*x.shape[:-1], weight.shape[0]))

    def input_gradient(self, grad_output: Tensor, weight: Tensor, *, then_weight: bool = False) -> Tensor:
        rows = grad_output.reshape(-1, weight.shape[0])
        cast, *columns = self._cast(self.gradient, rows, columns=then_weight)
        if then_weight:
            self._gradient_columns = columns[0]
        dx = fp8_matmul(cast, self.cast_weight(weight)[1], grad_output.dtype)
        return dx.view(*grad_output.shape[:-1], weight.shape[1])

    def forward_chunks(self, x: Tensor, weight: Tensor, bias: Tensor | None, group: Group | None) -> ChunkProduct:
        return self._chunks(self.x, x, self.cast_weight(weight)[0], bias, group, fast=True)

    def input_gradient_chunks(self, grad_output: Tensor, weight: Tensor, group: Group | None) -> ChunkProduct:
        return self._chunks(self.gradient, grad_output, self.cast_weight(weight)[1], None, group, fast=False)

    def weight_gradient(self, grad_output: Tensor, inputs: Tensor) -> Tensor:
        return self._outer(grad_output, inputs, inputs.dtype)

    def add_weight_gradient(self, slot: GradientSlot, grad_output: Tensor, inputs: Tensor) -> None:
        slot.add(self._outer(grad_output, inputs, torch.float32))

    def forward_groups(self, x: Tensor, weight: Tensor, groups: RowGroups) -> Tensor:
        rows = self._cast(self.x, x.contiguous())[0] if len(x) else None
        return self._group_products(rows, x, weight, groups, not groups.inputs_first, fast=True)

    def input_gradient_groups(self, grad_output: Tensor, weight: Tensor, groups: RowGroups) -> Tensor:
        rows, self._gradient_rows = self._gradient_rows, None
        if rows is None and len(grad_output):
            (rows,) = self._cast(self.gradient, grad_output.contiguous())
        return self._group_products(rows, grad_output, weight, groups, groups.inputs_first, fast=False)

    def add_weight_gradient_groups(
        self, slot: GradientSlot, grad_output: Tensor, inputs: Tensor, groups: RowGroups, *, then_input: bool = False
    ) -> None:
        if not len(inputs):
            return
        (dy,) = self._cast(self.gradient, grad_output.contiguous())
        (x,) = self._cast(self.x, inputs.contiguous(), records=False)  # the forward has recorded it
        self._gradient_rows = dy if then_input else None
        outer, inner = (x, dy) if groups.inputs_first else (dy, x)
        matrices = groups.matrices(slot.main_grad)
        for group, rows in groups.slices():
            matrices[group].add_(fp8_matmul(transposed_rows(outer, rows), transposed_rows(inner, rows), torch.float32))

    def _group_products(
        self, rows: Fp8Tensor | None, x: Tensor, weight: Tensor, groups: RowGroups, transpose: bool, fast: bool
    ) -> Tensor:
        """Return the products of each group's rows with its matrix, or with the transpose of it, joined.

        rows: x in 8 bits; None if it has no rows.
        """
        size = weight.shape[0] // len(groups.counts)
        output = x.new_empty(x.shape[0], size if transpose else weight.shape[1])
        if rows is None:
            return output
        cast, transposed = self.cast_weight(weight)
        for group, own in groups.slices():
            part = slice(group * size, (group + 1) * size)
            matrix = cast.values[part] if transpose else transposed.values[:, part]
            of_group, other = Fp8Tensor(rows.values[own], rows.scale_inverse), Fp8Tensor(matrix, cast.scale_inverse)
            fp8_matmul(of_group, other, output.dtype, fast=fast, out=output[own])
        return output

    def _outer(self, grad_output: Tensor, inputs: Tensor, dtype: torch.dtype) -> Tensor:
        dy, self._gradient_columns = self._gradient_columns, None
        if dy is None:
            (dy,) = self._cast(self.gradient, grad_output, rows=False, columns=True)
        (x,) = self._cast(self.x, inputs, rows=False, columns=True, records=False)  # the forward has recorded it
        return fp8_matmul(dy, x, dtype)

    def _chunks(
        self, operand: TensorScale, x: Tensor, matrix: Fp8Tensor, bias: Tensor | None, group: Group | None, fast: bool
    ) -> ChunkProduct:
        # without a delayed scale, each chunk is cast with the scale of all of x
        common = operand.scale_for(x, self._trains, group) if operand.delayed is None else None

        def product(chunk: Tensor, out: Tensor) -> None:
            (rows,) = self._cast(operand, chunk.reshape(-1, chunk.shape[-1]), scale=common)
            out.copy_(fp8_matmul(rows, matrix, out.dtype, bias, fast=fast).view(out.shape))

        return product

    @torch.no_grad()
    def _cast(
        self,
        operand: TensorScale,
        x: Tensor,
        *,
        rows: bool = True,
        columns: bool = False,
        scale: Tensor | None = None,
        records: bool = True,
    ) -> list[Fp8Tensor]:
        """Cast x to [rows, k] and, or, to [k, rows]. records: x enters the history in training."""
        records, measures, inverse = records and self._trains, False, None
        if scale is None and operand.delayed is not None:
            scale, inverse, measures = operand.delayed, operand.delayed_inverse, records and operand.has_history
        elif scale is None:
            scale = operand.scale_for(x, records)
        *made, amax = self._cast_kernel(operand.dtype, rows, columns, measures)(x, scale)
        if measures:
            operand.record(amax)
        inverse = scale.reciprocal() if inverse is None else inverse
        return [Fp8Tensor(values, inverse) for values in made if values is not None]

    @torch.no_grad()
    def cast_weight(self, weight: Tensor) -> tuple[Fp8Tensor, Fp8Tensor]:
        """Return the weight and its transpose in 8 bits, cast on the first call of a run."""
        if self._weight is None or not self._weight_is_current:
            cast, transposed = self._cast(self.weight, weight.detach(), columns=True)
            if self._weight is None:
                inverse = cast.scale_inverse.clone()
                self._weight = Fp8Tensor(cast.values, inverse), Fp8Tensor(transposed.values, inverse)
            else:
                for kept, new in zip(self._weight, (cast, transposed), strict=True):
                    kept.values.copy_(new.values)
                self._weight[0].scale_inverse.copy_(cast.scale_inverse)
            self._weight_is_current = True
        return self._weight
