"""The GEMMs of a linear with 8-bit operands (Micikevicius et al. 2022, arXiv:2209.05433): one scale a tensor, sums in fp32.

    forward   x e4m3, W e4m3      dgrad   dy e4m3 or e5m2 (hybrid), W e4m3      wgrad   dy and x as before

A tensor t becomes round(t s) with s = largest number of the format / (2^margin amax). amax is max |t| (tensorwise), or what the steps
before have seen of this tensor (delayed; in a first step tensorwise), so that s is the same for all microbatches of a step: what is
computed again in a backward has the same bits. Weights are cast once a row (`begin`), not once a microbatch. Inputs are kept for the
backward in the model's dtype, as without fp8, and cast when they are used.

Each rank casts what its own GEMMs take: a gathered x is whole, so that all tp ranks cast it alike; of W, and of what is cut by columns,
each tp rank has scales of its own, finer than one process would have. Maxima cross ranks only where an operand is multiplied before all
of it is gathered (chunked_gemm) and its scale is not known from earlier steps.

On GPUs the products are torch._scaled_mm (compute capability 8.9 or higher); elsewhere the rounded operands are multiplied in fp32,
which is the same arithmetic but for the order of sums: slow, for tests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megapipe.comm.collectives import all_reduce
from megapipe.comm.groups import Group
from megapipe.config.precision import PrecisionConfig
from megapipe.tensor_parallel.gemms import ChunkProduct
from megapipe.tensor_parallel.gradient_slot import GradientSlot

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LEAST_CAPABILITY = (8, 9)  # Ada; Hopper has 9.0
OTHER_FORMATS = "gfx94"  # MI300: e4m3fnuz and e5m2fnuz


def why_no_fp8(device: torch.device) -> str | None:
    """What keeps a GPU from multiplying these formats; None where nothing does, and on a CPU, which emulates them."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    if torch.version.hip is not None:
        is_other = torch.cuda.get_device_properties(device).gcnArchName.startswith(OTHER_FORMATS)
        return f"{name} has other 8-bit formats (fnuz)" if is_other else None
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < LEAST_CAPABILITY:
        return f"{name}, compute capability {major}.{minor}, has no fp8 matrix units (8.9 or higher has)"
    return None


@dataclass(frozen=True)
class Rounded:
    """values [rows, k] in 8 bits, contiguous along k, which the GEMM sums over; inverse: fp32 scalar, values x inverse is the tensor."""

    values: Tensor
    inverse: Tensor

    @classmethod
    def of(cls, x: Tensor, dtype: torch.dtype) -> Rounded:
        """x [rows, k], scaled by its own largest element."""
        scale = scale_for(x.float().abs().amax(), dtype)
        return cls(rounded_values(x, scale, dtype), scale.reciprocal())

    def dequantized(self) -> Tensor:
        """[rows, k] fp32."""
        return self.values.float() * self.inverse


def scale_for(amax: Tensor, dtype: torch.dtype, margin: int = 0) -> Tensor:
    """The factor that takes amax to the format's largest number / 2^margin; 1 for a tensor of zeros. An amax that is no number stays one
    that is none, so that an overflow is seen in the gradients."""
    largest = torch.finfo(dtype).max / 2.0**margin
    return torch.where(amax > 0, largest / amax, torch.ones_like(amax) + 0 * amax)


def rounded_values(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """x scale in an 8-bit format, what lies beyond its largest number at that (a delayed scale can be too large)."""
    largest = torch.finfo(dtype).max
    return (
        x.to(torch.float32, copy=True).mul_(scale).clamp_(-largest, largest).to(dtype)
    )  # in place: one copy in fp32, not three


def multiply(
    a: Rounded, b: Rounded, out_dtype: torch.dtype, bias: Tensor | None = None, *, fast: bool = False
) -> Tensor:
    """a [m, k] times b [n, k] transposed, plus bias [n]: [m, n]. fast: sums may be kept in less than fp32 for a while, as is usual in
    forwards."""
    if not a.values.is_cuda:
        product = emulated(a, b, out_dtype)
        return product if bias is None else product.add_(bias)
    inside = bias if out_dtype in (torch.bfloat16, torch.float16) else None  # the kernel adds no fp32 bias
    product = torch._scaled_mm(
        a.values,
        b.values.t(),
        scale_a=a.inverse,
        scale_b=b.inverse,
        bias=inside,
        out_dtype=out_dtype,
        use_fast_accum=fast,
    )
    return product if bias is None or bias is inside else product.add_(bias)


def emulated(a: Rounded, b: Rounded, out_dtype: torch.dtype) -> Tensor:
    """`multiply` by an fp32 GEMM: what its result is compared with."""
    return (torch.mm(a.values.float(), b.values.float().t()) * (a.inverse * b.inverse)).to(out_dtype)


class TensorScale:
    """The scale of one operand of one linear. Its state is on the device, where it lies for good (a graph goes on with it), and is never
    waited for."""

    def __init__(self, dtype: torch.dtype, precision: PrecisionConfig) -> None:
        self.dtype, self._margin = dtype, precision.fp8_margin
        self._length = precision.fp8_amax_history_len if precision.fp8_recipe == "delayed" else 0
        self._by_maximum = precision.fp8_amax_compute_algo == "max"
        self._history: list[Tensor] = []  # amax of past steps, the newest first
        self._seen: Tensor | None = None  # amax of this step so far
        self._fixed: Tensor | None = None  # the scale that the history gives

    def of(self, x: Tensor, records: bool) -> Tensor:
        """The scale for x, an fp32 scalar. records: x counts for the steps to come, if scales are delayed."""
        records = records and self._length > 0
        if self._fixed is not None and not records:
            return self._fixed
        amax = torch.linalg.vector_norm(x, torch.inf, dtype=torch.float32)
        if records:
            self._record(amax)
        return scale_for(amax, self.dtype, self._margin) if self._fixed is None else self._fixed

    def of_whole(self, x: Tensor, records: bool, group: Group | None) -> Callable[[Tensor], Tensor]:
        """The scale of all of x for each of its chunks. group: x is this rank's slice; where the history gives no scale its ranks agree on
        the largest element."""
        if self._fixed is not None:
            return lambda chunk: self.of(chunk, records)
        amax = torch.linalg.vector_norm(x, torch.inf, dtype=torch.float32)
        if group is not None:
            all_reduce(amax, group, "max")
        if records and self._length > 0:
            self._record(amax)
        scale = scale_for(amax, self.dtype, self._margin)
        return lambda chunk: scale

    def _record(self, amax: Tensor) -> None:
        if self._seen is None:
            self._seen = torch.zeros_like(amax)
        torch.maximum(self._seen, amax, out=self._seen)

    def step(self) -> None:
        """A step is over: what was seen in it becomes the newest of the history."""
        if self._seen is None:
            return
        self._history = [self._seen.clone(), *self._history][: self._length]
        self._seen.zero_()
        amax = torch.stack(self._history).amax() if self._by_maximum else self._history[0]
        scale = scale_for(amax, self.dtype, self._margin)
        self._fixed = scale if self._fixed is None else self._fixed.copy_(scale)


class Fp8Gemms:
    """`gemms.Gemms` of one linear in 8 bits, with its scales and its weights in 8 bits. pointwise: compiles the casts, or does not."""

    def __init__(self, precision: PrecisionConfig, pointwise: Callable[[Any], Any] = lambda function: function) -> None:
        self._round = pointwise(rounded_values)
        self.x = TensorScale(E4M3, precision)
        self.weight = TensorScale(E4M3, precision)
        self.gradient = TensorScale(E4M3 if precision.fp8_format == "e4m3" else E5M2, precision)
        self._weight: tuple[Rounded, Rounded] | None = None  # and its transpose, where they lie for good
        self._is_cast = False  # in this row
        self._trains = True

    def begin(self, trains: bool) -> None:
        """A row of the schedule begins, with other weights than the last one, perhaps. trains: what it sees counts for scales to come."""
        self._is_cast, self._trains = False, trains
        if trains:
            for scale in (self.x, self.weight, self.gradient):
                scale.step()

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        y = multiply(self._cast(self.x, rows), self.cast_weight(weight)[0], x.dtype, bias, fast=True)
        return torch.ops.aten._unsafe_view(y, (*x.shape[:-1], weight.shape[0]))

    def input_gradient(self, grad_output: Tensor, weight: Tensor) -> Tensor:
        rows = grad_output.reshape(-1, weight.shape[0])
        dx = multiply(self._cast(self.gradient, rows), self.cast_weight(weight)[1], grad_output.dtype)
        return dx.view(*grad_output.shape[:-1], weight.shape[1])

    def forward_chunks(self, x: Tensor, weight: Tensor, bias: Tensor | None, group: Group | None) -> ChunkProduct:
        return self._chunks(self.x, x, self.cast_weight(weight)[0], bias, group, fast=True)

    def input_gradient_chunks(self, grad_output: Tensor, weight: Tensor, group: Group | None) -> ChunkProduct:
        return self._chunks(self.gradient, grad_output, self.cast_weight(weight)[1], None, group, fast=False)

    def weight_gradient(self, grad_output: Tensor, inputs: Tensor) -> Tensor:
        return self._outer(grad_output, inputs, inputs.dtype)

    def add_weight_gradient(self, slot: GradientSlot, grad_output: Tensor, inputs: Tensor) -> None:
        slot.add(self._outer(grad_output, inputs, torch.float32))

    def _outer(self, grad_output: Tensor, inputs: Tensor, dtype: torch.dtype) -> Tensor:
        return multiply(
            self._cast(self.gradient, grad_output, transposed=True), self._cast(self.x, inputs, transposed=True), dtype
        )

    def _chunks(
        self, scale_of: TensorScale, x: Tensor, matrix: Rounded, bias: Tensor | None, group: Group | None, *, fast: bool
    ) -> ChunkProduct:
        scale_of_chunk = scale_of.of_whole(x, self._trains, group)

        def product(chunk: Tensor, out: Tensor) -> None:
            scale, rows = scale_of_chunk(chunk), chunk.reshape(-1, chunk.shape[-1])
            operand = Rounded(self._round(rows, scale, scale_of.dtype), scale.reciprocal())
            out.copy_(multiply(operand, matrix, out.dtype, bias, fast=fast).view(out.shape))

        return product

    @torch.no_grad()
    def _cast(self, scale_of: TensorScale, x: Tensor, transposed: bool = False) -> Rounded:
        """[rows, k] or, transposed, [k, rows]: the matrix units of Hopper take both operands with the summed dim last."""
        scale = scale_of.of(x, records=self._trains)
        values = self._round(x, scale, scale_of.dtype)
        return Rounded(values.t().contiguous() if transposed else values, scale.reciprocal())

    @torch.no_grad()
    def cast_weight(self, weight: Tensor) -> tuple[Rounded, Rounded]:
        """The weight and its transpose in 8 bits; made once a row, by whoever asks first."""
        if self._weight is None or not self._is_cast:
            whole = self._cast(self.weight, weight.detach())
            both = whole, Rounded(whole.values.t().contiguous(), whole.inverse)
            if self._weight is None:
                self._weight = both
            for kept, new in zip(self._weight, both, strict=True):
                kept.values.copy_(new.values)
                kept.inverse.copy_(new.inverse)
            self._is_cast = True
        return self._weight
