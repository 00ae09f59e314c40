"""The GEMMs of a linear in 8 bits (Micikevicius et al. 2022, arXiv:2209.05433), sums in fp32.

    forward   x e4m3, W e4m3      dgrad   dy e4m3 or e5m2 (hybrid), W e4m3      wgrad   dy and x as above

Operands have one scale each (recipe tensorwise) or, as DeepSeek-V3's (blockwise, arXiv:2412.19437, 3.3),
one for each block of 128, so that an outlier costs precision in its own block alone:

    forward   x 1 x 128 along in     W 128 x 128
    dgrad     dy 1 x 128 along out   W 128 x 128, the same values and scales transposed
    wgrad     dy and x 128 x 1 along tokens

Recipe mxfp8, Blackwell's, has blocks of 32 along the summed dim for all operands: a weight and its transpose have
blocks of their own.

Weights are cast once per run of a schedule (`begin`), not once per microbatch; in a stream, once per version. Inputs
are saved for the backward in the model's dtype, as without fp8, and cast when used. A gradient is cast once for both of
its products, unless W waits.

In 8 bits are the linears of attention (latent attention's projections down to latents, too), of MLPs and shared
experts, the experts, and eh_proj of multi-token prediction, whose modules count as the last layer. Embedding, norms,
routers, core attention, the output layer and the gate of shared experts stay in the model's dtype or wider.

By tensor the rows of all experts of a rank have one scale, as have their weights and their output gradients; blocks
never hold rows or weights of two experts. In e4m3 blocks of 32 the forward and the input gradient of all experts are
one kernel each, where torch has it; else, and for weight gradients, which its kernel returns in bf16 only, each
expert's products are GEMMs of their own: torch's grouped kernels have no blocks of 128 and no scale of a tensor.
Where rows are the summed dim, zeros fill an expert's rows up to a multiple of 16, the least that the
matrix units take, or of a block.

Each rank casts the operands of its GEMMs: a gathered x is complete, so all tp ranks cast it alike; of W, and of
tensors split by columns, each tp rank has its own scales, finer than those of a single process. By blocks they are
those of a single process where tp cuts at multiples of a block. Maxima cross ranks only where an operand is multiplied
before it is completely gathered (chunked GEMMs) and has one scale.

On GPUs this needs compute capability 8.9 or higher; for blocks of 128 9.0 and CUDA 12.9, for blocks of 32 10.0 and CUDA
12.8. CPUs emulate it (fp8_matrix.py).
"""

from __future__ import annotations

import shutil

import torch
from torch import Tensor
from torch.utils._triton import has_triton

from megapipe.comm.groups import Group
from megapipe.config.model import PrecisionConfig
from megapipe.dtypes import FP8_BLOCKS
from megapipe.tensor_parallel.fp8_matrix import E4M3, E5M2, Fp8Rows, Fp8Tensor, fp8_matmul
from megapipe.tensor_parallel.fp8_scales import BlockScales, Compiler, MxScales, TensorScale
from megapipe.tensor_parallel.gemms import ChunkProduct, Gemms, RowGroups
from megapipe.tensor_parallel.gradients import GradientSlot

MIN_CAPABILITY = (8, 9)  # Ada; Hopper has 9.0
# recipes of blocks: the GPUs that have a product, by the first number of their compute capability, and the least CUDA
BLOCKS = {
    "blockwise": (9, "Hopper, compute capability 9.0", (12, 9)),
    "mxfp8": (10, "Blackwell, compute capability 10.0", (12, 8)),
}
FNUZ_ARCHITECTURES = "gfx94"  # MI300: e4m3fnuz and e5m2fnuz
C_COMPILERS = ("cc", "gcc", "clang")  # Triton builds its launchers with one


def fp8_unsupported_reason(device: torch.device, recipe: str = "tensorwise") -> str | None:
    """Return why this GPU cannot multiply these formats, or its casts not be compiled; None if they can, and for a CPU,
    which emulates them. recipe: --fp8-recipe.
    """
    if device.type != "cuda":
        return None
    name, is_hip = torch.cuda.get_device_name(device), torch.version.hip is not None
    if is_hip and torch.cuda.get_device_properties(device).gcnArchName.startswith(FNUZ_ARCHITECTURES):
        return f"{name} has other 8-bit formats (fnuz)"
    major, minor = (0, 0) if is_hip else torch.cuda.get_device_capability(device)
    if not is_hip and (major, minor) < MIN_CAPABILITY:
        return f"{name}, compute capability {major}.{minor}, has no fp8 matrix units (8.9 or higher has)"
    if recipe in BLOCKS:
        capability, generation, least_cuda = BLOCKS[recipe]
        lacking = None if major == capability else f"{name}: only {generation}, has it"
        cuda = torch.version.cuda or ""
        if lacking is None and (not cuda or tuple(map(int, cuda.split(".")[:2])) < least_cuda):
            lacking = f"CUDA {cuda}: it comes with CUDA {'.'.join(map(str, least_cuda))}"
        if lacking is not None:
            others = {"blockwise": "mxfp8", "mxfp8": "blockwise"}[recipe]
            return (
                f"there is no product with scales of blocks of {FP8_BLOCKS[recipe]} for {lacking}; --fp8-recipe "
                f"tensorwise needs none, and {others} is that of {BLOCKS[others][1]}"
            )
    lacking = None if has_triton() else "Triton, which comes with torch's wheels for GPUs (pip install triton)"
    if lacking is None and not any(map(shutil.which, C_COMPILERS)):
        lacking = "a C compiler (apt-get install gcc)"
    if lacking is None:
        return None
    return f"its casts, not fused, would make fp8 slower than bf16, and fusing them needs {lacking}; install it"


class Fp8Gemms(Gemms):
    """The GEMMs of one linear in 8 bits, with its scales and its 8-bit weight.

    compiler: of the casts. num_matrices: in the weight, one for each group of rows.
    """

    def __init__(
        self, precision: PrecisionConfig, compiler: Compiler = lambda function: function, num_matrices: int = 1
    ) -> None:
        scales = {"blockwise": BlockScales, "mxfp8": MxScales}.get(precision.fp8_recipe, TensorScale)
        of_gradients = E4M3 if precision.fp8_format == "e4m3" else E5M2
        self.x, self.weight, self.gradient = (scales(each, precision, compiler) for each in (E4M3, E4M3, of_gradients))
        self._num_matrices = num_matrices
        self.version = 0  # of the weight that products are given
        self._num_versions = 1
        # of as many versions: the weight and its transpose, in fixed memory
        self._weights: list[list[Fp8Tensor]] = []
        self._cast: dict[int, int] = {}  # place in `_weights` -> version that was cast to it in this run
        self._gradient_columns: Fp8Tensor | None = None  # from `input_gradient` to the weight gradient after it
        self._gradient_rows: Fp8Rows | None = None  # from the weight gradient of groups to the input gradient after

    def begin(self, num_versions: int = 1) -> None:
        """Start a run of a schedule, possibly with new weights. num_versions: that are in use at the same time."""
        self._num_versions, self._cast = num_versions, {}

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        (rows,) = self.x.cast(x.reshape(-1, x.shape[-1]))
        y = fp8_matmul(rows, self.cast_weight(weight)[0].matrix(0), x.dtype, bias, fast=True)
        return torch.ops.aten._unsafe_view(y, (*x.shape[:-1], weight.shape[0]))

    def input_gradient(self, grad_output: Tensor, weight: Tensor, *, then_weight: bool = False) -> Tensor:
        rows = grad_output.reshape(-1, weight.shape[0])
        cast, *columns = self.gradient.cast(rows, columns=then_weight)
        if then_weight:
            self._gradient_columns = columns[0]
        dx = fp8_matmul(cast, self.cast_weight(weight)[1].matrix(0), grad_output.dtype)
        return dx.view(*grad_output.shape[:-1], weight.shape[1])

    def forward_chunks(self, x: Tensor, weight: Tensor, bias: Tensor | None, group: Group | None) -> ChunkProduct:
        return self._chunks(self.x, x, self.cast_weight(weight)[0], bias, group, fast=True)

    def input_gradient_chunks(self, grad_output: Tensor, weight: Tensor, group: Group | None) -> ChunkProduct:
        return self._chunks(self.gradient, grad_output, self.cast_weight(weight)[1], None, group, fast=False)

    def add_weight_gradient(self, slot: GradientSlot, grad_output: Tensor, inputs: Tensor) -> None:
        slot.add(self._outer(grad_output, inputs, torch.float32))

    def forward_groups(self, x: Tensor, weight: Tensor, groups: RowGroups) -> Tensor:
        rows = self.x.groups(x) if len(x) else None
        return self._group_products(rows, x, weight, groups, not groups.inputs_first, fast=True)

    def input_gradient_groups(self, grad_output: Tensor, weight: Tensor, groups: RowGroups) -> Tensor:
        rows, self._gradient_rows = self._gradient_rows, None
        if rows is None and len(grad_output):
            rows = self.gradient.groups(grad_output)
        return self._group_products(rows, grad_output, weight, groups, groups.inputs_first, fast=False)

    def add_weight_gradient_groups(
        self, slot: GradientSlot, grad_output: Tensor, inputs: Tensor, groups: RowGroups, *, then_input: bool = False
    ) -> None:
        if not len(inputs):
            return
        dy = self.gradient.groups(grad_output)
        x = self.x.groups(inputs)
        self._gradient_rows = dy if then_input else None
        outer, inner = (x, dy) if groups.inputs_first else (dy, x)
        matrices = groups.matrices(slot.main_grad)
        for group, rows in groups.slices():
            matrices[group].add_(fp8_matmul(outer.columns(rows), inner.columns(rows), torch.float32))

    def _group_products(
        self, rows: Fp8Rows | None, x: Tensor, weight: Tensor, groups: RowGroups, transpose: bool, fast: bool
    ) -> Tensor:
        """Return the products of each group's rows with its matrix, or with the transpose of it, joined.

        rows: x in 8 bits; None if it has no rows.
        """
        width = weight.shape[0] // len(groups.counts) if transpose else weight.shape[1]
        if rows is None:
            return x.new_empty(x.shape[0], width)
        cast = self.cast_weight(weight)[0 if transpose else 1]
        whole = rows.grouped_product(cast, groups)
        if whole is not None:
            return whole
        output = x.new_empty(x.shape[0], width)
        for group, own in groups.slices():
            fp8_matmul(rows.rows(own), cast.matrix(group), output.dtype, fast=fast, out=output[own])
        return output

    def _outer(self, grad_output: Tensor, inputs: Tensor, dtype: torch.dtype) -> Tensor:
        dy, self._gradient_columns = self._gradient_columns, None
        if dy is None:
            (dy,) = self.gradient.cast(grad_output, rows=False, columns=True)
        (x,) = self.x.cast(inputs, rows=False, columns=True)
        return fp8_matmul(dy, x, dtype)

    def _chunks(
        self,
        operand: TensorScale | BlockScales,
        x: Tensor,
        weight: Fp8Tensor,
        bias: Tensor | None,
        group: Group | None,
        fast: bool,
    ) -> ChunkProduct:
        # each chunk is cast with the scale of all of x
        common, matrix = operand.common(x, group), weight.matrix(0)

        def product(chunk: Tensor, out: Tensor) -> None:
            (rows,) = operand.cast(chunk.reshape(-1, chunk.shape[-1]), common=common)
            out.copy_(fp8_matmul(rows, matrix, out.dtype, bias, fast=fast).view(out.shape))

        return product

    @torch.no_grad()
    def cast_weight(self, weight: Tensor) -> list[Fp8Tensor]:
        """Return the weight and its transpose in 8 bits, cast on the first call of a run with this version.

        The first call of all allocates the memory of every version.
        """
        place = self.version % self._num_versions
        if self._cast.get(place) != self.version:
            matrices = weight.detach().view(self._num_matrices, -1, weight.shape[1])
            if self._weights:
                self.weight.cast_weight(matrices, self._weights[place])
            else:
                self._weights = [self.weight.cast_weight(matrices, None) for _ in range(self._num_versions)]
            self._cast[place] = self.version
        return self._weights[place]
