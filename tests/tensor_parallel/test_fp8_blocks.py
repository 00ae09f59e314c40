"""fp8 with a scale for each tensor or block of 128 or 32: casts and products against a definition by single blocks."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import megapipe.tensor_parallel.fp8 as fp8
from megapipe.comm.groups import Group
from megapipe.config.model import PrecisionConfig
from megapipe.extras.streams.shapes import grouped_product_of_blocks
from megapipe.gpu import kernels
from megapipe.gpu.kernels import compiled
from megapipe.tensor_parallel import fp8_scales
from megapipe.tensor_parallel.fp8 import Fp8Gemms
from megapipe.tensor_parallel.fp8_matrix import (
    E4M3,
    E5M2,
    Fp8Blocks,
    MxBlocks,
    rows_as_tiles,
    tiles_as_rows,
    why_no_grouped_product,
)
from megapipe.tensor_parallel.fp8_scales import BlockScales, MxScales, block_scale, cast_to_fp8, fp8_scale
from megapipe.tensor_parallel.gemms import RowGroups
from megapipe.tensor_parallel.gradients import GradientSlot
from megapipe.tensor_parallel.linear import ColumnParallelLinear

BLOCKWISE = PrecisionConfig(fp8_format="e4m3", fp8_recipe="blockwise")
OF_SUMS = 64  # `closeness` of sums in fp32, in any order; rounding in other blocks is above 1000
HYBRID = PrecisionConfig(fp8_format="hybrid", fp8_recipe="blockwise")
MX = PrecisionConfig(fp8_format="e4m3", fp8_recipe="mxfp8")
MX_HYBRID = PrecisionConfig(fp8_format="hybrid", fp8_recipe="mxfp8")
TENSORWISE = PrecisionConfig(fp8_format="hybrid", fp8_recipe="tensorwise")
BLOCK = {"blockwise": 128, "mxfp8": 32, "tensorwise": 0}
all_recipes = pytest.mark.parametrize(
    "precision", [BLOCKWISE, MX, TENSORWISE], ids=["blockwise", "mxfp8", "tensorwise"]
)
Part = slice | int
both_recipes = pytest.mark.parametrize("precision", [BLOCKWISE, MX], ids=["blockwise", "mxfp8"])


def rounded_weight(weight: Tensor, precision: PrecisionConfig, transposed: bool, part: Part = slice(None)) -> Tensor:
    """Return a part [out, in] of weights as the forward sees it, or, transposed, as the input gradient does."""
    block = BLOCK[precision.fp8_recipe]
    if precision.fp8_recipe != "mxfp8":
        return rounded(weight, E4M3, block, block, part)
    return rounded(weight, E4M3, *((block, 1) if transposed else (1, block)), part)


def rounded(x: Tensor, dtype: torch.dtype, height: int, width: int, part: Part = slice(None)) -> Tensor:
    """Return a part [m, n] of x as a product sees it.

    Each block of height x width has a power of two as its scale; without a height or width, x has one scale.
    """
    if not height * width:
        scale = fp8_scale(x.abs().amax(), dtype)
        return (cast_to_fp8(x, scale, dtype).double() / scale.double())[part]
    x = x[part]
    result = torch.empty(x.shape, dtype=torch.float64)
    for i in range(0, x.shape[0], height):
        for j in range(0, x.shape[1], width):
            block = x[i : i + height, j : j + width].double()
            largest = block.abs().max().item()
            exponent = math.floor(math.log2(torch.finfo(dtype).max / largest)) if largest else 0
            result[i : i + height, j : j + width] = (block * 2.0**exponent).to(dtype).double() / 2.0**exponent
    return result


def of_gradients(precision: PrecisionConfig) -> torch.dtype:
    return E4M3 if precision.fp8_format == "e4m3" else E5M2


def spread(*shape: int) -> Tensor:
    """Return numbers of very different sizes: an outlier costs only its block precision."""
    return torch.randn(*shape) * torch.randn(*shape).mul(2.0).exp()


def weight_gradient(gemms: Fp8Gemms, dy: Tensor, x: Tensor) -> Tensor:
    slot = GradientSlot(torch.zeros(dy.shape[1], x.shape[1]))
    gemms.add_weight_gradient(slot, dy, x)
    return slot.main_grad


def closeness(found: Tensor, wanted: Tensor, terms: Tensor) -> float:
    """Return the largest difference in units of fp32's rounding of the absolute values of the summed terms."""
    return float(((found.double() - wanted).abs() / (terms * 2.0**-24 + 1e-30)).max())


@pytest.mark.parametrize(
    "precision",
    [BLOCKWISE, HYBRID, MX, MX_HYBRID, TENSORWISE, PrecisionConfig(fp8_format="e4m3", fp8_recipe="tensorwise")],
    ids=["e4m3", "hybrid", "mxfp8", "mxfp8-hybrid", "tensorwise-hybrid", "tensorwise"],
)
@pytest.mark.parametrize(("tokens", "inputs", "outputs"), [(256, 384, 256), (272, 336, 400)], ids=["whole", "partial"])
def test_the_three_products_of_a_linear_are_those_of_operands_rounded_in_blocks(
    precision: PrecisionConfig, tokens: int, inputs: int, outputs: int
) -> None:
    torch.manual_seed(0)
    gemms, weight, x, dy = Fp8Gemms(precision), spread(outputs, inputs), spread(tokens, inputs), spread(tokens, outputs)
    of_dy, block = of_gradients(precision), BLOCK[precision.fp8_recipe]
    w8, w8_back = (rounded_weight(weight, precision, transposed) for transposed in (False, True))
    x8, dy8 = rounded(x, E4M3, 1, block), rounded(dy, of_dy, 1, block)
    x8_tokens, dy8_tokens = rounded(x, E4M3, block, 1), rounded(dy, of_dy, block, 1)
    bias = torch.randn(outputs)
    found = [
        gemms.forward(x, weight, None),
        gemms.forward(x, weight, bias) - bias,
        gemms.input_gradient(dy, weight, then_weight=True),
        weight_gradient(gemms, dy, x),
        weight_gradient(gemms, dy, x),  # not after an input gradient: casts the gradient itself
    ]
    wanted = [(x8, w8.t())] * 2 + [(dy8, w8_back)] + [(dy8_tokens.t(), x8_tokens)] * 2
    for result, (a, b) in zip(found, wanted, strict=True):
        assert closeness(result, a @ b, a.abs() @ b.abs()) < OF_SUMS
    slot = GradientSlot(torch.ones(outputs, inputs))
    gemms.add_weight_gradient(slot, dy, x)
    assert torch.equal(slot.main_grad, 1.0 + found[-1])
    assert torch.equal(found[-2], found[-1])
    assert torch.equal(x8, x8_tokens) == (precision.fp8_recipe == "tensorwise")


@settings(max_examples=40)
@given(seed=st.integers(0, 10**6), exponent=st.integers(-120, 100), dtype=st.sampled_from([E4M3, E5M2]))
def test_a_scale_is_the_largest_power_of_two_that_does_not_overflow(
    seed: int, exponent: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(seed)
    amax = torch.rand(64) * 2.0**exponent
    amax[0], amax[1] = torch.finfo(dtype).max * 2.0**exponent, 1.75 * 2.0**exponent * (1 + 2.0**-23)
    largest, scale = torch.finfo(dtype).max, block_scale(amax, dtype)
    assert (scale.log2() == scale.log2().round()).all() and scale[0] == 2.0**-exponent
    assert (amax.double() * scale <= largest).all()
    assert ((amax.double() * scale * 2 > largest) | (scale == 2.0**126)).all()


def test_tiny_and_empty_blocks_have_finite_scales_and_a_nonfinite_value_spoils_its_block_alone() -> None:
    x = torch.zeros(3, 384)
    x[0, :2] = torch.tensor([1e-44, -1e-38])
    x[1, 130], x[2, 3] = float("inf"), float("nan")
    (cast,) = BlockScales(E4M3, BLOCKWISE).cast(x)
    assert isinstance(cast, Fp8Blocks)
    back = cast.dequantized()
    assert back[0].isfinite().all() and back[0, 1] == pytest.approx(-1e-38, rel=0.07)
    finite = torch.ones(3, 3, dtype=torch.bool)
    finite[1, 1] = finite[2, 0] = False
    assert torch.equal(back.unflatten(1, (3, 128)).isfinite().all(2), finite)
    (ones,) = BlockScales(E4M3, BLOCKWISE).cast(torch.ones(2, 384))
    assert torch.equal(fp8.fp8_matmul(cast, ones, torch.float32).isfinite().all(1), torch.tensor([True, False, False]))


GROUPS = {"some_without_rows": (256, 0, 300, 17), "the_last_alone": (0, 0, 0, 272), "no_rows": (0, 0, 0, 0)}


@pytest.mark.parametrize("inputs_first", [False, True], ids=["out_in", "in_out"])
@pytest.mark.parametrize("then_input", [True, False], ids=["whole", "split"])
@pytest.mark.parametrize("name", GROUPS)
@all_recipes
def test_no_block_holds_rows_or_weights_of_two_groups(
    precision: PrecisionConfig, name: str, then_input: bool, inputs_first: bool
) -> None:
    counts, (inputs, outputs) = GROUPS[name], (256, 336)
    torch.manual_seed(0)
    gemms, groups, block = (
        Fp8Gemms(precision, num_matrices=4),
        RowGroups(counts, inputs_first),
        BLOCK[precision.fp8_recipe],
    )
    matrices = spread(4, *((inputs, outputs) if inputs_first else (outputs, inputs)))
    matrices[1] *= 1000.0
    weight, x, dy = matrices.flatten(0, 1), spread(sum(counts), inputs), spread(sum(counts), outputs)
    slot = GradientSlot(torch.zeros_like(weight))
    y = gemms.forward_groups(x, weight, groups)
    if then_input:
        gemms.add_weight_gradient_groups(slot, dy, x, groups, then_input=True)
    dx = gemms.input_gradient_groups(dy, weight, groups)
    if not then_input:
        gemms.add_weight_gradient_groups(slot, dy, x, groups)
    assert y.shape == dy.shape and dx.shape == x.shape
    assert not any(slot.main_grad.view_as(matrices)[group].any() for group, count in enumerate(counts) if not count)
    of_dy = of_gradients(precision)
    for group, rows in groups.slices():
        w8, w8_back = (rounded_weight(matrices, precision, each is not inputs_first, group) for each in (False, True))
        w8, w8_back = (w8.t(), w8_back.t()) if inputs_first else (w8, w8_back)
        of_weight = slot.main_grad.view_as(matrices)[group]
        pairs = (
            (y[rows], rounded(x, E4M3, 1, block, rows), w8.t()),
            (dx[rows], rounded(dy, of_dy, 1, block, rows), w8_back),
            (
                of_weight.t() if inputs_first else of_weight,
                rounded(dy, of_dy, block, 1, rows).t(),
                rounded(x, E4M3, block, 1, rows),
            ),
        )
        for found, a, b in pairs:
            assert closeness(found, a @ b, a.abs() @ b.abs()) < OF_SUMS


@all_recipes
def test_weights_are_cast_once_per_run_into_fixed_memory(precision: PrecisionConfig) -> None:
    torch.manual_seed(0)
    gemms, weight, x, dy = Fp8Gemms(precision), torch.randn(256, 336), torch.randn(32, 336), torch.randn(32, 256)

    def products() -> tuple[Tensor, Tensor]:
        return gemms.forward(x, weight, None), gemms.input_gradient(dy, weight)

    first = products()
    addresses = [(each.values.data_ptr(), each.scale_inverse.data_ptr()) for each in gemms.cast_weight(weight)]
    weight.mul_(4)
    assert all(map(torch.equal, products(), first))
    gemms.begin()
    assert all(torch.equal(found, 4 * earlier) for found, earlier in zip(products(), first, strict=True))
    assert [(e.values.data_ptr(), e.scale_inverse.data_ptr()) for e in gemms.cast_weight(weight)] == addresses


@all_recipes
def test_two_versions_of_a_weight_are_cast_once_each_into_memory_of_their_own(precision: PrecisionConfig) -> None:
    torch.manual_seed(0)
    gemms, weights, x = Fp8Gemms(precision), [torch.randn(256, 336) for _ in range(3)], torch.randn(32, 336)

    def product(version: int) -> Tensor:
        gemms.version = version
        return gemms.forward(x, weights[version], None)

    wanted = [Fp8Gemms(precision).forward(x, weight, None) for weight in weights]
    gemms.begin(2)
    first = product(0)
    weights[0].zero_()  # which would show in a second cast
    assert all(map(torch.equal, (first, product(1), product(0), product(2)), (*wanted[:2], *wanted[::2])))


@both_recipes
def test_chunks_of_rows_are_multiplied_with_the_scales_of_the_whole(precision: PrecisionConfig) -> None:
    torch.manual_seed(0)
    gemms, weight, x = Fp8Gemms(precision), torch.randn(256, 336), spread(4, 96, 336)
    whole = gemms.forward(x, weight, None)
    product, out = gemms.forward_chunks(x, weight, None, None), torch.empty(4, 96, 256)
    for part in (slice(0, 40), slice(40, 96)):
        product(x[:, part], out[:, part])
    torch.testing.assert_close(out, whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("width", [256, 272], ids=["multiples_of_128", "cut_blocks"])
@both_recipes
def test_a_slice_of_a_linear_has_the_scales_of_the_whole_where_cuts_fall_on_blocks(
    precision: PrecisionConfig, width: int
) -> None:
    """Column- and row-parallel halves: their products are slices of, or sum to, those of the whole linear."""
    torch.manual_seed(0)
    weight, x, dy = spread(2 * width, 2 * width), spread(64, 2 * width), spread(64, 2 * width)
    whole = Fp8Gemms(precision)
    y, dx, dw = whole.forward(x, weight, None), whole.input_gradient(dy, weight), weight_gradient(whole, dy, x)
    halves = slice(0, width), slice(width, 2 * width)
    columns = torch.cat([Fp8Gemms(precision).forward(x, weight[half], None) for half in halves], 1)
    rows = sum(Fp8Gemms(precision).forward(x[:, half], weight[:, half], None).double() for half in halves)
    summed = sum(Fp8Gemms(precision).input_gradient(dy[:, half], weight[half]).double() for half in halves)
    terms = (x.abs().double() @ weight.abs().double().t(), dy.abs().double() @ weight.abs().double())
    differences = [closeness(columns, y.double(), terms[0]), closeness(y, rows, terms[0])]
    differences.append(closeness(dx, summed, terms[1]))
    if width % 128 == 0:
        assert max(differences) < OF_SUMS
        assert torch.equal(weight_gradient(Fp8Gemms(precision), dy[:, halves[0]], x), dw[halves[0]])
    else:
        is_micro = precision is MX  # blocks of one dim: a cut of the outputs cuts none
        assert min(differences[is_micro:]) > 1000  # other blocks round otherwise
        assert (differences[0] == 0.0) is is_micro


@pytest.mark.parametrize("precision", [HYBRID, MX_HYBRID, TENSORWISE], ids=["blockwise", "mxfp8", "tensorwise"])
def test_all_casts_of_a_model_stay_within_the_graphs_that_torch_keeps(
    precision: PrecisionConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linears and experts of several shapes, whole and split backwards.

    The casts are traced with fullgraph, which makes a ninth graph of one function an error, not compiled.
    """
    whole = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **settings: whole(function, backend="eager", **settings))
    torch._dynamo.reset()
    kernels._shared_code.cache_clear()
    for outputs, inputs in ((32, 32), (48, 160), (128, 64), (256, 48)):
        found = []
        for compiler in (lambda function: function, compiled):
            torch.manual_seed(0)
            weight, experts, results = torch.randn(outputs, inputs), torch.randn(3 * outputs, inputs), []
            gemms, grouped = Fp8Gemms(precision, compiler), Fp8Gemms(precision, compiler, 3)
            for counts in ((30, 0, 2), (1, 130, 5), (17, 3, 128)):
                gemms.begin(), grouped.begin()
                is_whole = counts[0] != 30
                x, dy = torch.randn(sum(counts), inputs), torch.randn(sum(counts), outputs)
                groups, slot = RowGroups(counts, inputs_first=False), GradientSlot(torch.zeros_like(experts))
                results += [gemms.forward(x, weight, None), gemms.input_gradient(dy, weight, then_weight=is_whole)]
                results += [weight_gradient(gemms, dy, x), grouped.forward_groups(x, experts, groups)]
                grouped.add_weight_gradient_groups(slot, dy, x, groups, then_input=True)
                results += [slot.main_grad, grouped.input_gradient_groups(dy, experts, groups)]
            found.append(results)
        assert all(map(torch.equal, *found))


@pytest.mark.parametrize(
    ("recipe", "capability", "cuda", "lacks"),
    [
        ("blockwise", (9, 0), "12.9", None),
        ("blockwise", (9, 0), "12.8", "CUDA 12.8: it comes with CUDA 12.9"),
        (
            "blockwise",
            (10, 0),
            "13.0",
            "only Hopper, compute capability 9.0, has it; --fp8-recipe tensorwise needs none",
        ),
        ("blockwise", (8, 9), "12.9", "only Hopper"),
        ("mxfp8", (10, 0), "12.8", None),
        ("mxfp8", (10, 0), "12.6", "CUDA 12.6: it comes with CUDA 12.8"),
        (
            "mxfp8",
            (9, 0),
            "12.9",
            "only Blackwell, compute capability 10.0, has it; --fp8-recipe tensorwise needs none",
        ),
    ],
)
def test_blocks_are_refused_where_there_is_no_product_of_them(
    monkeypatch: pytest.MonkeyPatch, recipe: str, capability: tuple[int, int], cuda: str, lacks: str | None
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(fp8, "has_triton", lambda: True)
    monkeypatch.setattr(fp8.shutil, "which", lambda _: "cc")
    why = fp8.fp8_unsupported_reason(torch.device("cuda"), recipe)
    assert fp8.fp8_unsupported_reason(torch.device("cuda")) is None
    assert why is None if lacks is None else f"blocks of {BLOCK[recipe]}" in str(why) and lacks in str(why)


@pytest.mark.parametrize("rows", [256, 37], ids=["whole", "padded"])
@both_recipes
def test_the_layouts_are_those_that_torchs_kernel_asks_for(
    monkeypatch: pytest.MonkeyPatch, precision: PrecisionConfig, rows: int
) -> None:
    """The shapes and strides that torch's own check demands, on tensors without values."""
    seen: list[tuple[int, ...]] = []
    scaled_mm = torch.nn.functional.scaled_mm

    def checked(*arguments: Any, **options: Any) -> Tensor:
        without_values = (each.to("meta") if isinstance(each, Tensor) else each for each in arguments)
        result = scaled_mm(*without_values, **options)
        seen.append(tuple(result.shape))
        return torch.zeros(result.shape, dtype=result.dtype)

    monkeypatch.setattr(torch.nn.functional, "scaled_mm", checked)
    scales = (BlockScales if precision is BLOCKWISE else MxScales)(E4M3, precision)
    cast, columns = scales.cast(torch.randn(rows, 384), columns=True)
    for weight in scales.cast_weight(torch.randn(2, 640, 384), None):
        a = cast if weight.values.shape[2] == 384 else scales.cast(torch.randn(rows, 640))[0]
        assert a.product(weight.matrix(1), torch.bfloat16, None, True, None).shape == (rows, weight.values.shape[1])
    (other,) = scales.cast(torch.randn(rows, 512), rows=False, columns=True)
    assert columns.product(other, torch.float32, None, False, None).shape == (384, 512)
    filled = rows if precision is MX else -(-rows // 4) * 4
    assert seen == [(filled, 640), (filled, 384), (384, 512)]


def test_the_grouped_operator_has_the_signature_that_groups_rely_on() -> None:
    schema = torch.ops.aten._scaled_grouped_mm_v2.default._schema
    names = "self mat2 scale_a recipe_a swizzle_a scale_b recipe_b swizzle_b offs bias out_dtype contraction_dim"
    assert [argument.name for argument in schema.arguments] == [*names.split(), "use_fast_accum"]


def grouped_on_cpu(calls: list[int], *given: Any, offs: Tensor, output_dtype: torch.dtype) -> Tensor:
    """Stand in for scaled_grouped_mm: groups one by one, each scale from its place in memory.

    Places are those of FBGEMM's kernel (set_grouped_gemm_args_kernel in mx8mx8bf16_grouped): the scales of a group of
    rows begin at a multiple of 128 rows, those of a matrix at a multiple of its tiles.
    """
    a, b, scale_a, recipe_a, scale_b, recipe_b, swizzle_a, swizzle_b = given
    enums = [[each.value] for each in (recipe_a, swizzle_a, recipe_b, swizzle_b)]
    shaped = grouped_product_of_blocks(
        a, b, [scale_a], enums[0], enums[1], [scale_b], enums[2], enums[3], offs, None, output_dtype
    )
    calls.append(len(offs))
    tiles = -(-a.shape[1] // 128)

    def scaled(values: Tensor, scales: Tensor) -> Tensor:
        r, c = torch.meshgrid(torch.arange(len(values)), torch.arange(values.shape[1] // 32), indexing="ij")
        places = 512 * (r // 128 * tiles + c // 4) + r % 32 * 16 + r % 128 // 32 * 4 + c % 4
        return values.float() * scales.flatten().float()[places].repeat_interleave(32, 1)

    start = skipped = 0
    result = torch.full(shaped.shape, torch.nan, dtype=output_dtype)
    for group, end in enumerate(offs.tolist()):
        rows = scaled(a[start:end], scale_a[skipped:])
        result[start:end] = torch.mm(rows, scaled(b[group].t(), scale_b[group]).t())
        start, skipped = end, skipped + -(-(end - start) // 128) * 128
    return result


@pytest.mark.parametrize("inputs_first", [False, True], ids=["out_in", "in_out"])
@pytest.mark.parametrize("counts", [(3, 0, 130, 128), (0, 0, 5, 0), (256, 1, 0, 127)], ids=str)
def test_a_grouped_product_of_micro_blocks_equals_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch, counts: tuple[int, ...], inputs_first: bool
) -> None:
    torch.manual_seed(0)
    inputs, outputs, calls = 144, 336, list[int]()  # 144 is no multiple of 32, 336 none of 128
    matrices = spread(4, *((inputs, outputs) if inputs_first else (outputs, inputs))).bfloat16()
    x, dy = (spread(sum(counts), size).bfloat16() for size in (inputs, outputs))
    monkeypatch.setattr(fp8_scales, "why_no_grouped_product", lambda device: None)
    monkeypatch.setattr(torch.nn.functional, "scaled_grouped_mm", partial(grouped_on_cpu, calls))
    ends = torch.tensor(counts).cumsum(0).int()
    found = []
    for each in (None, ends):
        gemms, groups = Fp8Gemms(MX, num_matrices=4), RowGroups(counts, inputs_first, each)
        weight = matrices.flatten(0, 1)
        found.append((gemms.forward_groups(x, weight, groups), gemms.input_gradient_groups(dy, weight, groups)))
    assert calls == [4, 4]
    for one_by_one, grouped in zip(*found, strict=True):
        assert torch.equal(one_by_one, grouped)


@pytest.mark.parametrize("precision", [MX_HYBRID, BLOCKWISE, PrecisionConfig(fp8_format="e4m3")], ids=str)
def test_other_formats_multiply_one_group_after_the_other(
    monkeypatch: pytest.MonkeyPatch, precision: PrecisionConfig
) -> None:
    calls = list[int]()
    monkeypatch.setattr(fp8_scales, "why_no_grouped_product", lambda device: None)
    monkeypatch.setattr(torch.nn.functional, "scaled_grouped_mm", partial(grouped_on_cpu, calls))
    groups = RowGroups((3, 5), False, torch.tensor([3, 8], dtype=torch.int32))
    gemms = Fp8Gemms(precision, num_matrices=2)
    weight = torch.randn(2 * 64, 32).bfloat16()
    assert gemms.input_gradient_groups(torch.randn(8, 64).bfloat16(), weight, groups).shape == (8, 32)
    assert not calls


def test_cpus_have_no_grouped_product_of_micro_blocks() -> None:
    assert why_no_grouped_product(torch.device("cpu")) == "cpu has no kernel for it"


def test_micro_scales_stand_in_the_tiles_that_cublas_reads() -> None:
    """Place by place, as "1D Block Scaling Factors Layout" of cuBLAS' documentation has it."""
    rows, blocks = 256, 12
    scales = torch.arange(2 * rows * blocks).view(2, rows, blocks)
    tiles = rows_as_tiles(scales)
    for r in range(rows):
        for c in range(blocks):
            tile = (r // 128) * (blocks // 4) + c // 4
            place = 512 * tile + (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4
            assert tiles[1, place] == scales[1, r, c]
    assert torch.equal(tiles_as_rows(tiles, rows, blocks), scales)


def test_micro_scales_are_exponents_with_nan_for_a_nonfinite_block() -> None:
    x = torch.zeros(2, 70)
    x[0, :3], x[0, 40], x[1, 69] = torch.tensor([448.0, -1.0, 1e-44]), 449.0, float("inf")
    (cast,) = MxScales(E4M3, MX).cast(x)
    assert isinstance(cast, MxBlocks) and cast.values.shape == (2, 96) and cast.scale_inverse.shape == (512,)
    found = tiles_as_rows(cast.scale_inverse, 128, 4)[:2]
    assert found.tolist() == [[127, 128, 127, 127], [127, 127, 255, 127]]
    back = cast.dequantized()[:, :70]
    assert back[0, 0] == 448.0 and back[0, 40] == 448.0 and back[1, 64:].isnan().all()
    assert back[0].isfinite().all() and back[1, :64].isfinite().all()


@both_recipes
def test_a_column_parallel_linear_trains_with_blocks(precision: PrecisionConfig) -> None:
    gemms, block = Fp8Gemms(precision), BLOCK[precision.fp8_recipe]
    layer = ColumnParallelLinear(160, 256, bias=True, tp=Group.alone("tp"), sequence_parallel=False, gemms=gemms)
    layer.weight, layer.bias = nn.Parameter(torch.randn(256, 160)), nn.Parameter(torch.randn(256))
    x, dy = torch.randn(16, 2, 160, requires_grad=True), torch.randn(16, 2, 256)
    layer(x).backward(dy)
    rows, of_outputs = x.detach().flatten(0, 1), dy.flatten(0, 1)
    wanted = rounded(of_outputs, E4M3, block, 1).t() @ rounded(rows, E4M3, block, 1)
    torch.testing.assert_close(layer.weight.grad.double(), wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(layer.bias.grad, of_outputs.sum(0))  # not a product: not rounded
