"""Matrices in 8 bits, with one scale (`Fp8Tensor`) or one for each block of 128 (`Fp8Blocks`) or 32 (`MxBlocks`), and
their product.

On GPUs the products are torch._scaled_mm and, of blocks, torch.nn.functional.scaled_mm; for groups of rows in blocks of
32 torch.nn.functional.scaled_grouped_mm, where torch was built with its kernel. On CPUs the rounded operands are
multiplied in fp32, which differs only in the order of sums (the scales of blocks are powers of two, with which fp32
multiplies exactly); this is slow and meant for tests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from megapipe.dtypes import BLOCK, MICRO_BLOCK, SCALES_MULTIPLE, SCALES_TILE, micro_scales
from megapipe.tensor_parallel.gemms import RowGroups

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ROW_MULTIPLE = 16  # of the summed dim of a GEMM
ONE = 127  # 2^0 as an exponent of E8M0


class Fp8Rows(Protocol):
    """Rows of several groups, in 8 bits or to be cast."""

    def rows(self, rows: slice) -> Fp8Tensor:
        """Return these rows [m, k] as an operand of a product that sums over k."""

    def columns(self, rows: slice) -> Fp8Tensor:
        """Return these rows as [k, m], an operand of a product that sums over them, with zeros behind them."""

    def grouped_product(self, matrices: Fp8Tensor, groups: RowGroups) -> Tensor | None:
        """Return the products [rows, n] of each group's rows with its matrix [n, k] transposed in one kernel; None if
        there is none.
        """


@dataclass(frozen=True)
class Fp8Tensor:
    """A matrix in 8 bits, values x scale_inverse. values: [rows, k], contiguous along k, which the GEMM sums over; of
    weights [matrices, rows, k].
    """

    values: Tensor
    scale_inverse: Tensor  # fp32 scalar

    def rows(self, rows: slice) -> Fp8Tensor:
        """Return some rows."""
        return Fp8Tensor(self.values[rows], self.scale_inverse)

    def grouped_product(self, matrices: Fp8Tensor, groups: RowGroups) -> Tensor | None:
        """Return None: torch's grouped kernels have no scale of a tensor."""
        return None

    def columns(self, rows: slice) -> Fp8Tensor:
        """Return these rows of [n, k] as [k, m], filled with zeros to a multiple of ROW_MULTIPLE."""
        count = rows.stop - rows.start
        columns = self.values.new_zeros(self.values.shape[1], count + -count % ROW_MULTIPLE)
        columns[:, :count].copy_(self.values[rows].t())
        return Fp8Tensor(columns, self.scale_inverse)

    def matrix(self, index: int) -> Fp8Tensor:
        """Return one matrix of a weight."""
        return Fp8Tensor(self.values[index], self.scale_inverse)

    def emulated_product(self, other: Fp8Tensor) -> Tensor:
        """Return self [m, k] times other [n, k] transposed, in fp32, without a kernel for 8 bits."""
        product = torch.mm(self.values.float(), other.values.float().t())
        return product * (self.scale_inverse * other.scale_inverse)

    def product(
        self, other: Fp8Tensor, dtype: torch.dtype, bias: Tensor | None, fast: bool, out: Tensor | None
    ) -> Tensor:
        """Return self [m, k] times other [n, k] transposed on a GPU; arguments as in `fp8_matmul`."""
        if out is not None and out.is_meta:  # torch has no such kernel
            return out
        return torch._scaled_mm(
            self.values,
            other.values.t(),
            scale_a=self.scale_inverse,
            scale_b=other.scale_inverse,
            bias=bias,
            out_dtype=dtype,
            use_fast_accum=fast,
            **({} if out is None else {"out": out}),
        )


@dataclass(frozen=True)
class Fp8Blocks(Fp8Tensor):
    """A matrix in 8 bits with a scale for each 1 x 128 elements along k or, of weights, for each 128 x 128.

    values: [rows, k], where zeros fill k up to a multiple of 128. scale_inverse: powers of two in fp32, in the layout
    that torch.nn.functional.scaled_mm reads transposed: [k / 128, rows], or [rows / 128, k / 128] with ones behind each
    row up to a multiple of 4; of weights with the number of matrices in front.
    """

    is_square: bool = False  # blocks are 128 x 128

    def matrix(self, index: int) -> Fp8Blocks:
        return replace(self, values=self.values[index], scale_inverse=self.scale_inverse[index])

    def dequantized(self) -> Tensor:
        """Return the matrix in fp32, exactly: values [rows, k]."""
        wide = self.values.float()
        rows, size = wide.shape
        scales = self.scale_inverse.t()
        if self.is_square:
            scales = self.scale_inverse[:, : size // BLOCK].repeat_interleave(BLOCK, 0)[:rows]
        wide.unflatten(1, (-1, BLOCK)).mul_(scales.unsqueeze(-1))
        return wide

    def emulated_product(self, other: Fp8Tensor) -> Tensor:
        assert isinstance(other, Fp8Blocks)
        return torch.mm(self.dequantized(), other.dequantized().t())

    def product(
        self, other: Fp8Tensor, dtype: torch.dtype, bias: Tensor | None, fast: bool, out: Tensor | None
    ) -> Tensor:
        # the kernel has no fast sums; DeepSeek-V3's recipe excludes them
        assert isinstance(other, Fp8Blocks)
        rows, width = self.values.shape[0], other.values.shape[0]
        if self.values.is_meta:  # torch's own function for them refuses partial blocks
            product = self.values.new_empty(rows, width, dtype=dtype)
        else:
            product = self._scaled_mm(other, dtype, bias)[:rows]
        return product if out is None else out.copy_(product)

    def _scaled_mm(self, other: Fp8Blocks, dtype: torch.dtype, bias: Tensor | None) -> Tensor:
        """Return the product on a GPU, with zeros behind its rows up to a multiple of 4."""
        scaling, values, scales = functional.ScalingType, self.values, self.scale_inverse
        if spare := -values.shape[0] % SCALES_MULTIPLE:
            values = functional.pad(values.view(torch.uint8), (0, 0, 0, spare)).view(values.dtype)
            scales = functional.pad(scales, (0, spare))
        return functional.scaled_mm(
            values,
            other.values.t(),
            scales.t(),
            scaling.BlockWise1x128,
            other.scale_inverse.t(),
            scaling.BlockWise128x128 if other.is_square else scaling.BlockWise1x128,
            bias=bias,
            output_dtype=dtype,
        )


@dataclass(frozen=True)
class MxBlocks(Fp8Blocks):
    """A matrix in the microscaling format MXFP8 (OCP Microscaling Formats 1.0): a scale for each 1 x 32 along k.

    values: [rows, k], where zeros fill k up to a multiple of 32. scale_inverse: powers of two as uint8, their exponents
    plus 127 (E8M0), in cuBLAS' layout: tiles of 128 rows x 4 blocks, row r and block c of one at 16 (r % 32) +
    4 (r // 32) + c, tile after tile; filled with 2^0.
    """

    def dequantized(self) -> Tensor:
        wide = self.values.float()
        rows, size = wide.shape
        of_tiles = micro_scales(rows, size)
        scales = tiles_as_rows(self.scale_inverse.view(torch.float8_e8m0fnu).float(), *of_tiles)
        wide.unflatten(1, (-1, MICRO_BLOCK)).mul_(scales[:rows, : size // MICRO_BLOCK, None])
        return wide

    def _scaled_mm(self, other: Fp8Blocks, dtype: torch.dtype, bias: Tensor | None) -> Tensor:
        scaling, swizzle = functional.ScalingType.BlockWise1x32, functional.SwizzleType.SWIZZLE_32_4_4
        return functional.scaled_mm(
            self.values,
            other.values.t(),
            self.scale_inverse.view(torch.float8_e8m0fnu),
            scaling,
            other.scale_inverse.view(torch.float8_e8m0fnu),
            scaling,
            swizzle,
            swizzle,
            bias=bias,
            output_dtype=dtype,
        )

    def product_of_groups(self, matrices: MxBlocks, ends: Tensor) -> Tensor:
        """Return the products [m, n] in bf16 of the rows of each group with its matrix [n, k] transposed, on a GPU.

        self: rows [m, k] in e4m3, with scales as `grouped_tiles` returns them. ends: the last row of each group + 1.
        """
        scaling, swizzle = functional.ScalingType.BlockWise1x32, functional.SwizzleType.SWIZZLE_32_4_4
        return functional.scaled_grouped_mm(  # type: ignore[attr-defined, no-any-return]
            self.values,
            matrices.values.mT,
            self.scale_inverse.view(torch.float8_e8m0fnu),
            scaling,
            matrices.scale_inverse.view(torch.float8_e8m0fnu),
            scaling,
            swizzle,
            swizzle,
            offs=ends,
            output_dtype=torch.bfloat16,
        )


@cache
def why_no_grouped_product(device: torch.device) -> str | None:
    """Return why torch has no product of groups in blocks of 32 on this device, tried once; None if it has.

    Its kernel is one of another library, with which torch may have been built.
    """
    if device.type != "cuda":
        return f"{device.type} has no kernel for it"
    if not hasattr(functional, "scaled_grouped_mm"):
        return f"torch {torch.__version__} has no scaled_grouped_mm"
    height, width = SCALES_TILE
    values = torch.zeros(height, width * MICRO_BLOCK, dtype=E4M3, device=device)
    scales = torch.full((height, width), ONE, dtype=torch.uint8, device=device)
    ends = torch.full((1,), height, dtype=torch.int32, device=device)
    try:
        MxBlocks(values, scales).product_of_groups(MxBlocks(values[None], scales.view(1, -1)), ends)
    except (RuntimeError, ValueError) as error:
        return f"torch {torch.__version__} has none here: {str(error).splitlines()[0]}"
    return None


def tile_places(scales: Tensor, ends: Tensor) -> Tensor:
    """Return the place of each row of scales [rows, blocks] where every group begins at a tile. ends: the last row of
    each group + 1.
    """
    spare = -torch.diff(ends, prepend=ends.new_zeros(1)) % SCALES_TILE[0]
    rows = torch.arange(scales.shape[0], dtype=ends.dtype, device=scales.device)
    return rows + (spare.cumsum(0) - spare)[torch.searchsorted(ends, rows, right=True)]


def grouped_tiles(scales: Tensor, places: Tensor, counts: Sequence[int]) -> Tensor:
    """Return scales [rows, blocks] as scaled_grouped_mm reads them: tiles as in `MxBlocks`, a group's first row at the
    start of a tile; [rows of whole tiles, blocks of whole tiles]. places: `tile_places`. counts: rows of each group.
    """
    height, width = SCALES_TILE
    filled = scales.new_full(
        (sum(count + -count % height for count in counts), scales.shape[1] + -scales.shape[1] % width), ONE
    )
    filled[:, : scales.shape[1]].index_copy_(0, places, scales)
    return rows_as_tiles(filled).view(filled.shape)


def rows_as_tiles(scales: Tensor) -> Tensor:
    """Return scales [..., rows, blocks] in the layout of `MxBlocks`, [..., rows x blocks of whole tiles]."""
    height, width = SCALES_TILE
    *_, rows, blocks = scales.shape
    if rows % height or blocks % width:
        scales = functional.pad(scales, (0, -blocks % width, 0, -rows % height), value=ONE)
    tiles = scales.unflatten(-1, (-1, width)).unflatten(-3, (-1, height // 32, 32))  # [..., i, r // 32, r % 32, j, c]
    return tiles.movedim(-2, -4).transpose(-3, -2).flatten(-5)


def tiles_as_rows(tiles: Tensor, rows: int, blocks: int) -> Tensor:
    """Return `rows_as_tiles` the other way round."""
    height, width = SCALES_TILE
    split = tiles.unflatten(-1, (rows // height, blocks // width, 32, height // 32, width))
    return split.transpose(-3, -2).movedim(-4, -2).flatten(-2).flatten(-4, -2)


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
    if not a.values.is_cuda:
        product = a.emulated_product(b).to(out_dtype)
        if out is not None:
            return out.copy_(product)
        return product if bias is None else product.add_(bias)
    fused_bias = bias if out_dtype in (torch.bfloat16, torch.float16) else None  # the kernel adds no fp32 bias
    product = a.product(b, out_dtype, fused_bias, fast, out)
    return product if bias is None or bias is fused_bias else product.add_(bias)
