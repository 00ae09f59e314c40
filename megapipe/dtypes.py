"""The one table of dtypes: their names in the configuration, in torch and in safetensors files, and their sizes.

Also the blocks of 8-bit matrices whose elements share a scale.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Dtype:
    """One floating-point format."""

    name: str  # in flags, configurations, plans and hardware files
    num_bytes: int  # of one element
    torch_name: str  # getattr(torch, torch_name) is the torch.dtype
    safetensors_name: str  # in the headers of safetensors files, and so in checkpoints


FP8 = "fp8"  # of GEMM inputs only; e4m3 here, e5m2 for output gradients has the same size
DTYPES = {
    dtype.name: dtype
    for dtype in (
        Dtype("fp32", 4, "float32", "F32"),
        Dtype("bf16", 2, "bfloat16", "BF16"),
        Dtype("fp16", 2, "float16", "F16"),
        Dtype("fp64", 8, "float64", "F64"),
        Dtype(FP8, 1, "float8_e4m3fn", "F8_E4M3"),
    )
}
TENSOR_DTYPES = {name: dtype for name, dtype in DTYPES.items() if name != FP8}  # of weights, activations, checkpoints
ELEMENT_BYTES = {dtype.name: dtype.num_bytes for dtype in DTYPES.values()}

BLOCK = 128  # elements along a dim that share a scale of 8-bit blocks
MICRO_BLOCK = 32  # likewise in the microscaling formats
FP8_BLOCKS = {"blockwise": BLOCK, "mxfp8": MICRO_BLOCK}  # by --fp8-recipe; the others have one scale for a tensor
SCALES_TILE = (128, 4)  # rows and blocks of a tile of microscaling scales, which kernels read whole
SCALES_MULTIPLE = 4  # of the scales of blocks in a row: fp32 rows that start at multiples of 16 bytes, as kernels want


def blocks_of(count: int, block: int = BLOCK) -> int:
    """Return how many blocks hold `count` elements; the last one may be partial."""
    return -(-count // block)


def micro_scales(rows: int, size: int) -> tuple[int, int]:
    """Return the shape of the scales of [rows, size] in blocks of MICRO_BLOCK, in whole tiles."""
    count = blocks_of(size, MICRO_BLOCK)
    return rows + -rows % SCALES_TILE[0], count + -count % SCALES_TILE[1]
