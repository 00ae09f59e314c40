"""Casts to 8 bits, and where the scales of a linear's operand come from: `TensorScale`, `BlockScales` or `MxScales`.

A tensor t is cast to round(t s) with s = largest number of the format / (2^margin amax). By tensor (recipe tensorwise),
amax is max |t|. By blocks (blockwise), amax is that of 128 elements along the summed dim or, of weights, of 128 x 128,
and s is rounded down to a power of two. In the microscaling format (mxfp8) amax is that of 32 elements along the summed
dim, of weights too.

A recipe is one of these classes, and the class of the matrices that it makes, which knows their product. One of two
levels, as NVFP4 (a scale of 16 elements times one of the tensor), finds the outer scale in `common`; torch's products
take both scales as a list, those of groups (`grouped_product`) too.

On CUDA a cast is compiled: one kernel reads x and writes both layouts, others before it find the largest elements. As
a chain of kernels over a copy in fp32 it would move more bytes than fp8 saves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from megapipe.comm.collectives import all_reduce
from megapipe.comm.groups import Group
from megapipe.config.model import PrecisionConfig
from megapipe.dtypes import BLOCK, MICRO_BLOCK, SCALES_MULTIPLE, blocks_of
from megapipe.tensor_parallel.fp8_matrix import (
    E4M3,
    ROW_MULTIPLE,
    Fp8Blocks,
    Fp8Rows,
    Fp8Tensor,
    MxBlocks,
    grouped_tiles,
    rows_as_tiles,
    tile_places,
    why_no_grouped_product,
)
from megapipe.tensor_parallel.gemms import RowGroups

EXPONENT_BITS = 0x7F800000  # of fp32
LARGEST_SCALE = 2.0**126  # its inverse is the smallest normal number of fp32


def fp8_scale(amax: Tensor, dtype: torch.dtype, margin: int = 0) -> Tensor:
    """Return the factor that maps amax to the format's largest number / 2^margin; 1 for a tensor of zeros.

    A non-finite amax gives a non-finite scale, so that an overflow shows in the gradients.
    """
    largest = torch.finfo(dtype).max / 2.0**margin
    return torch.where(amax > 0, largest / amax, torch.ones_like(amax) + 0 * amax)


def block_scale(amax: Tensor, dtype: torch.dtype, margin: int = 0) -> Tensor:
    """Return `fp8_scale` rounded down to a power of two, at most 2^126, and NaN for a non-finite amax."""
    scale = fp8_scale(amax, dtype, margin).clamp(max=LARGEST_SCALE)
    return scale.view(torch.int32).bitwise_and(EXPONENT_BITS).view(torch.float32) + 0 * amax


def cast_to_fp8(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x scale in an 8-bit format, saturating at its largest number."""
    largest = torch.finfo(dtype).max
    # in place: one fp32 copy, not three
    return x.to(torch.float32, copy=True).mul_(scale).clamp_(-largest, largest).to(dtype)


def tensorwise(x: Tensor, dtype: torch.dtype) -> Fp8Tensor:
    """Cast x [rows, k] with the scale from its largest element."""
    scale = fp8_scale(_amax(x), dtype)
    return Fp8Tensor(cast_to_fp8(x, scale, dtype), scale.reciprocal())


def cast_tensor(
    x: Tensor, scale: Tensor, dtype: torch.dtype, rows: bool, columns: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Return x [..., rows, k] in 8 bits, and its transpose [..., k, rows], each if asked for.

    Compiled it is one pass. Hopper's matrix units take the summed dim last, hence the transpose.
    """
    values = cast_to_fp8(x, scale, dtype)
    return values if rows else None, values.mT.contiguous() if columns else None


def cast_blocks(x: Tensor, dtype: torch.dtype, rows: bool, columns: bool, margin: int) -> tuple[Tensor, ...]:
    """Return x [rows, k] with a scale for each 1 x 128 and, or, its transpose [k, rows] likewise: values and inverse
    scales of each, in the layout of `Fp8Blocks`.
    """
    made: list[Tensor] = []
    for matrix in (x,) * rows + (x.t(),) * columns:
        values, inverse = _scaled(matrix, dtype, margin, BLOCK)
        made += [values, inverse.t().contiguous()]
    return tuple(made)


def cast_micro(x: Tensor, dtype: torch.dtype, rows: bool, columns: bool, margin: int) -> tuple[Tensor, ...]:
    """Return x [..., rows, k] with a scale for each 1 x 32 and, or, its transpose [..., k, rows] likewise: values, and
    inverse scales [..., rows, k / 32] as uint8, their exponents plus 127.
    """
    made: list[Tensor] = []
    for matrix in (x,) * rows + (x.mT,) * columns:
        values, inverse = _scaled(matrix, dtype, margin, MICRO_BLOCK)
        made += [values, inverse.view(torch.int32).bitwise_right_shift(23).to(torch.uint8)]
    return tuple(made)


def _scaled(matrix: Tensor, dtype: torch.dtype, margin: int, block: int) -> tuple[Tensor, Tensor]:
    """Return a matrix [..., rows, k] with a scale for each 1 x block: values, where zeros fill k, and inverse scales
    [..., rows, k / block] in fp32.
    """
    size = matrix.shape[-1]
    wide = matrix.new_zeros(*matrix.shape[:-1], blocks_of(size, block) * block, dtype=torch.float32)
    wide[..., :size].copy_(matrix)
    blocks = wide.unflatten(-1, (-1, block))
    scales = block_scale(_amax(blocks, -1), dtype, margin)
    blocks.mul_(scales.unsqueeze(-1))
    return wide.to(dtype), scales.reciprocal()


def cast_squares(x: Tensor, dtype: torch.dtype, margin: int) -> tuple[Tensor, ...]:
    """Return the matrices x [matrices, m, n] with a scale for each 128 x 128, and their transposes with the same
    scales: values and inverse scales of each, in the layout of `Fp8Blocks`.
    """
    matrices, m, n = x.shape
    wide = x.new_zeros(matrices, blocks_of(m) * BLOCK, blocks_of(n) * BLOCK, dtype=torch.float32)
    wide[:, :m, :n].copy_(x)
    blocks = wide.unflatten(2, (-1, BLOCK)).unflatten(1, (-1, BLOCK))
    scales = block_scale(_amax(blocks, (2, 4)), dtype, margin)
    blocks.mul_(scales[:, :, None, :, None])
    values, inverse = wide.to(dtype), scales.reciprocal()
    of_both: list[Tensor] = []
    for each, scale in ((values[:, :m], inverse), (values.mT[:, :n], inverse.mT)):
        rows, size = scale.shape[1:]
        padded = scale.new_ones(matrices, rows, size + -size % SCALES_MULTIPLE)
        padded[:, :, :size].copy_(scale)
        of_both += [each.contiguous(), padded]
    return tuple(of_both)


def _amax(x: Tensor, dim: int | tuple[int, ...] | None = None) -> Tensor:
    return torch.linalg.vector_norm(x, torch.inf, dim, dtype=torch.float32)


Compiler = Callable[[Any], Any]


class TensorScale:
    """The scale of each tensor that is one operand of one linear, without a state. compiler: of its casts."""

    def __init__(
        self, dtype: torch.dtype, precision: PrecisionConfig, compiler: Compiler = lambda function: function
    ) -> None:
        self._dtype, self._margin = dtype, precision.fp8_margin
        self._kernel = compiler(cast_tensor)

    @torch.no_grad()
    def cast(
        self, x: Tensor, *, rows: bool = True, columns: bool = False, common: Tensor | None = None
    ) -> list[Fp8Tensor]:
        """Cast x to [rows, k] and, or, to [k, rows]. common: the scale, if x is a part of a tensor (`common`)."""
        scale = self.common(x) if common is None else common
        made, inverse = self._kernel(x, scale, self._dtype, rows, columns), scale.reciprocal()
        return [Fp8Tensor(values, inverse) for values in made if values is not None]

    def cast_weight(self, matrices: Tensor, kept: list[Fp8Tensor] | None) -> list[Fp8Tensor]:
        """Cast [matrices, m, n] as it is, and transposed, with one scale. kept: an earlier result, overwritten."""
        cast = self.cast(matrices, columns=True)
        if kept is None:
            inverse = cast[0].scale_inverse.clone()
            return [Fp8Tensor(each.values, inverse) for each in cast]
        for old, new in zip(kept, cast, strict=True):
            old.values.copy_(new.values)
        kept[0].scale_inverse.copy_(cast[0].scale_inverse)
        return kept

    def groups(self, x: Tensor) -> Fp8Rows:
        """Cast the rows of all groups with one scale."""
        return self.cast(x.contiguous())[0]

    def common(self, x: Tensor, group: Group | None = None) -> Tensor:
        """Return the scale of a tensor, an fp32 scalar. group: x is this rank's slice of it, and the ranks of the group
        agree on the largest element.
        """
        amax = _amax(x)
        if group is not None:
            all_reduce(amax, group, "max")
        return fp8_scale(amax, self._dtype, self._margin)


class BlockScales:
    """The scales of one operand of one linear, one for each block of each tensor, without a state.

    Powers of two are Transformer Engine's default, and what DeepSeek-V3 takes for tensors that it casts along both dims
    (arXiv:2412.19437, 3.3.3): scaling rounds nothing, and fp32 multiplies scaled values exactly.
    """

    _matrix: type[Fp8Blocks] = Fp8Blocks
    _function = staticmethod(cast_blocks)
    _layout: Callable[[Tensor], Tensor] = staticmethod(lambda scales: scales)  # what is not compiled of it

    def __init__(
        self, dtype: torch.dtype, precision: PrecisionConfig, compiler: Compiler = lambda function: function
    ) -> None:
        self._options = dtype, precision.fp8_margin
        self._kernel = cache(compiler)

    @torch.no_grad()
    def cast(
        self, x: Tensor, *, rows: bool = True, columns: bool = False, common: Tensor | None = None
    ) -> list[Fp8Tensor]:
        """Cast x to [rows, k] and, or, to [k, rows], each with scales of its own."""
        return self._made(self._function, x, rows, columns)

    def cast_weight(self, matrices: Tensor, kept: list[Fp8Tensor] | None) -> list[Fp8Tensor]:
        """Cast [matrices, m, n] as it is, and transposed. kept: an earlier result, overwritten."""
        cast = self._both(matrices)
        for old, new in zip(kept or (), cast, strict=kept is not None):
            old.values.copy_(new.values)
            old.scale_inverse.copy_(new.scale_inverse)
        return cast if kept is None else kept

    def _both(self, matrices: Tensor) -> list[Fp8Tensor]:
        """Return the matrices and their transposes."""
        return self._made(cast_squares, matrices, is_square=True)

    def _made(
        self, function: Callable[..., Any], x: Tensor, *layouts: bool, is_square: bool = False
    ) -> list[Fp8Tensor]:
        dtype, margin = self._options
        made = self._kernel(function)(x, dtype, *layouts, margin)
        pairs = zip(made[::2], made[1::2], strict=True)
        return [self._matrix(values, self._layout(scales), is_square) for values, scales in pairs]

    def groups(self, x: Tensor) -> Fp8Rows:
        """Cast the rows of each group when they are used: no block holds rows of two."""
        return _RowsByBlocks(x, self)

    def grouped_product(self, x: Tensor, matrices: Fp8Tensor, groups: RowGroups) -> Tensor | None:
        """Return the products of the rows x of groups in one kernel, as `Fp8Rows.grouped_product`."""
        return None

    def common(self, x: Tensor, group: Group | None) -> None:
        """Return None: blocks are scaled alike in a part of a tensor."""


class MxScales(BlockScales):
    """Scales of blocks of 32 along the summed dim: a weight and its transpose have scales of their own.

    They are rounded so that no element overflows, as Mishra et al. 2025 ("Recipes for Pre-training LLMs with MXFP8",
    arXiv:2506.08027) and Transformer Engine do, not as the format's specification suggests.
    """

    _matrix = MxBlocks
    _function = staticmethod(cast_micro)
    # one small kernel: compiled with the cast, it would be another graph for each way in which rows fill tiles
    _layout = staticmethod(rows_as_tiles)

    def _both(self, matrices: Tensor) -> list[Fp8Tensor]:
        return self._made(self._function, matrices, True, True)

    def grouped_product(self, x: Tensor, matrices: Fp8Tensor, groups: RowGroups) -> Tensor | None:
        dtype, margin = self._options
        takes = x.dtype == torch.bfloat16 and dtype == E4M3 and matrices.values.shape[1] % ROW_MULTIPLE == 0
        if groups.ends is None or x.is_meta or not takes or why_no_grouped_product(x.device) is not None:
            return None
        assert isinstance(matrices, MxBlocks)
        values, scales = self._kernel(self._function)(x, dtype, True, False, margin)
        tiles = grouped_tiles(scales, self._kernel(tile_places)(scales, groups.ends), groups.counts)
        return MxBlocks(values, tiles).product_of_groups(matrices, groups.ends)


@dataclass(frozen=True)
class _RowsByBlocks:
    """Rows of groups, to be cast by `scales`."""

    x: Tensor
    scales: BlockScales

    def rows(self, rows: slice) -> Fp8Tensor:
        return self.scales.cast(self.x[rows])[0]

    def columns(self, rows: slice) -> Fp8Tensor:
        return self.scales.cast(self.x[rows], rows=False, columns=True)[0]

    def grouped_product(self, matrices: Fp8Tensor, groups: RowGroups) -> Tensor | None:
        return self.scales.grouped_product(self.x, matrices, groups)
