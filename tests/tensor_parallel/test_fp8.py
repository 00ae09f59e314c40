"""Arithmetic of fp8: rounding within the formats' bounds, products as torch._scaled_mm makes them, scales that a step
does not change.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import megapipe.tensor_parallel.fp8 as fp8
from megapipe.comm.groups import Group
from megapipe.config.model import PrecisionConfig
from megapipe.gpu import kernels
from megapipe.gpu.kernels import compiled
from megapipe.tensor_parallel import fp8_scales
from megapipe.tensor_parallel.fp8 import Fp8Gemms
from megapipe.tensor_parallel.fp8_matrix import E4M3, E5M2, Fp8Tensor, fp8_matmul
from megapipe.tensor_parallel.fp8_scales import cast_to_fp8, fp8_scale
from megapipe.tensor_parallel.gemms import RowGroups
from megapipe.tensor_parallel.gradients import GradientSlot
from megapipe.tensor_parallel.linear import ColumnParallelLinear

# half a unit in the last place, relative; half the smallest number, absolute
ROUNDOFF = {E4M3: (2.0**-4, 2.0**-10), E5M2: (2.0**-3, 2.0**-17)}
TENSORWISE = PrecisionConfig(fp8_format="hybrid", fp8_recipe="tensorwise")


def cast(x: Tensor, dtype: torch.dtype) -> Fp8Tensor:
    scale = fp8_scale(x.abs().amax(), dtype)
    return Fp8Tensor(cast_to_fp8(x, scale, dtype), scale.reciprocal())


def bound(x: Tensor, dtype: torch.dtype) -> Tensor:
    """The most by which rounding changes each element of x (with some fp32 rounding of the scale itself)."""
    relative, absolute = ROUNDOFF[dtype]
    inverse = x.abs().amax() / torch.finfo(dtype).max
    return torch.maximum(relative * x.abs(), absolute * inverse) + 1e-6 * x.abs()


DTYPES = pytest.mark.parametrize(
    "dtypes", [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2)], ids=["e4m3-e4m3", "e5m2-e4m3", "e4m3-e5m2"]
)


@DTYPES
@settings(max_examples=40)
@given(
    seed=st.integers(0, 10**6),
    exponent=st.integers(-30, 30),
    spread=st.floats(0, 6),
    sizes=st.tuples(*[st.integers(1, 20)] * 3),
)
def test_a_product_is_within_the_bounds_of_its_formats(
    dtypes: tuple[torch.dtype, torch.dtype], seed: int, exponent: int, spread: float, sizes: tuple[int, int, int]
) -> None:
    m, n, k = sizes
    generator = torch.Generator().manual_seed(seed)
    a, b = (
        torch.randn(rows, k, generator=generator) * torch.randn(rows, k, generator=generator).mul(spread).exp()
        for rows in (m, n)
    )
    a = a * 2.0**exponent
    exact = a.double() @ b.double().t()
    found = fp8_matmul(cast(a, dtypes[0]), cast(b, dtypes[1]), torch.float32)
    da, db = bound(a, dtypes[0]).double(), bound(b, dtypes[1]).double()
    most = da @ b.abs().double().t() + a.abs().double() @ db.t() + da @ db.t()
    sums = 1e-6 * k * (a.abs().double() @ b.abs().double().t())  # of the fp32 sums
    assert ((found.double() - exact).abs() <= most + sums + 1e-38).all()


@DTYPES
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_emulation_is_what_scaled_mm_computes(
    dtypes: tuple[torch.dtype, torch.dtype], out_dtype: torch.dtype
) -> None:
    a, b = cast(torch.randn(16, 32), dtypes[0]), cast(torch.randn(48, 32), dtypes[1])
    product = torch._scaled_mm(
        a.values, b.values.t(), scale_a=a.scale_inverse, scale_b=b.scale_inverse, out_dtype=out_dtype
    )
    torch.testing.assert_close(
        fp8_matmul(a, b, out_dtype), product, rtol=1e-5 if out_dtype == torch.float32 else 1e-2, atol=1e-5
    )


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
def test_the_largest_element_becomes_the_largest_number_and_a_margin_keeps_away_from_it(dtype: torch.dtype) -> None:
    x = torch.tensor([3.0, -0.7])
    assert cast_to_fp8(x, fp8_scale(x.abs().amax(), dtype), dtype)[0].float() == torch.finfo(dtype).max
    assert cast_to_fp8(x, fp8_scale(x.abs().amax(), dtype, 3), dtype)[0].float() == torch.finfo(dtype).max / 8
    # a scale that is too large: no overflow
    assert cast_to_fp8(x, torch.tensor(1e9), dtype)[1].float() == -torch.finfo(dtype).max


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_nonfinite_values_and_zeros_are_kept(value: float, dtype: torch.dtype) -> None:
    one = cast(torch.ones(2, 4), E4M3)
    x = torch.ones(3, 4)
    x[1, 2] = value
    assert not fp8_matmul(cast(x, dtype), one, torch.float32)[1].isfinite().any()
    assert torch.equal(fp8_matmul(cast(torch.zeros(3, 4), dtype), one, torch.float32), torch.zeros(3, 2))


def fp8_linear(precision: PrecisionConfig, bias: bool = True) -> tuple[ColumnParallelLinear, Fp8Gemms]:
    gemms = Fp8Gemms(precision)
    layer = ColumnParallelLinear(32, 16, bias=bias, tp=Group.alone("tp"), sequence_parallel=False, gemms=gemms)
    layer.weight = nn.Parameter(torch.randn(16, 32))
    if bias:
        layer.bias = nn.Parameter(torch.randn(16))
    layer.slots = {"weight": GradientSlot(torch.zeros(16, 32))}
    return layer, gemms


@pytest.mark.parametrize("format_", ["e4m3", "hybrid"])
def test_the_three_products_of_a_linear_round_their_operands_alone(format_: str) -> None:
    layer, _ = fp8_linear(PrecisionConfig(fp8_format=format_, fp8_recipe="tensorwise"))
    x = torch.randn(8, 2, 32, requires_grad=True)
    dy = torch.randn(8, 2, 16)
    y = layer(x)
    y.backward(dy)
    gradient = E4M3 if format_ == "e4m3" else E5M2
    rounded = (cast(t.detach().flatten(0, -2), d) for t, d in ((x, E4M3), (layer.weight, E4M3), (dy, gradient)))
    x8, w8, dy8 = (tensor.values.float() * tensor.scale_inverse for tensor in rounded)
    torch.testing.assert_close(y.detach().flatten(0, 1), x8 @ w8.t() + layer.bias, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(x.grad.flatten(0, 1), dy8 @ w8, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(layer.slots["weight"].main_grad, dy8.t() @ x8, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(layer.bias.grad, dy.flatten(0, 1).sum(0))  # not a product: not rounded


def test_weights_are_cast_once_per_run_of_a_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[tuple[int, ...]] = []
    original = fp8_scales.cast_to_fp8
    monkeypatch.setattr(
        fp8_scales, "cast_to_fp8", lambda x, *rest: (shapes.append(tuple(x.shape)), original(x, *rest))[1]
    )
    layer, gemms = fp8_linear(TENSORWISE, bias=False)
    outputs = []
    for row in range(2):
        gemms.begin()
        for _ in range(3):
            outputs.append(layer(torch.ones(4, 1, 32, requires_grad=True)))
            outputs[-1].sum().backward()
        assert shapes.count((1, 16, 32)) == row + 1
        layer.weight.data.mul_(2)
    torch.testing.assert_close(outputs[-1], 2 * outputs[0])


def test_a_gradient_cast_once_for_both_products_gives_their_bits() -> None:
    """Three steps: the products of a backward at once, and those of I and W apart."""
    found = []
    for then_weight in (True, False):
        torch.manual_seed(0)
        gemms, weight, results = Fp8Gemms(TENSORWISE), torch.randn(16, 32), []
        for _ in range(3):
            gemms.begin()
            x, dy = torch.randn(8, 32), torch.randn(8, 16)
            results.append(gemms.forward(x, weight, None))
            results.append(gemms.input_gradient(dy, weight, then_weight=then_weight))
            results.append(gemms.weight_gradient(dy, x))
        found.append(results)
    assert all(map(torch.equal, *found))


def test_all_casts_of_a_model_stay_within_the_graphs_that_torch_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Linears of several shapes, square ones too, whole and split backwards.

    The casts are traced with fullgraph, which makes a ninth graph of one function an error, not compiled.
    """
    whole = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **settings: whole(function, backend="eager", **settings))
    torch._dynamo.reset()
    kernels._shared_code.cache_clear()
    for outputs, inputs in ((32, 32), (48, 32), (32, 64), (64, 48)):
        found = []
        for compiler in (lambda function: function, compiled):
            torch.manual_seed(0)
            gemms, weight, results = Fp8Gemms(TENSORWISE, compiler), torch.randn(outputs, inputs), []
            for step in range(3):
                gemms.begin()
                for tokens in (32, 16):
                    x, dy = torch.randn(tokens, inputs), torch.randn(tokens, outputs)
                    results.append(gemms.forward(x, weight, None))
                    results.append(gemms.input_gradient(dy, weight, then_weight=step > 0))
                    results.append(gemms.weight_gradient(dy, x))
            found.append(results)
        assert all(map(torch.equal, *found))


@pytest.mark.parametrize(
    ("triton", "compiler", "lacks"),
    [(False, "cc", "Triton"), (True, None, "a C compiler"), (True, "cc", None)],
    ids=["no_triton", "no_compiler", "both"],
)
def test_fp8_is_refused_where_its_casts_cannot_be_compiled(
    monkeypatch: pytest.MonkeyPatch, triton: bool, compiler: str | None, lacks: str | None
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(fp8, "has_triton", lambda: triton)
    monkeypatch.setattr(fp8.shutil, "which", lambda _: compiler)
    why = fp8.fp8_unsupported_reason(torch.device("cuda"))
    assert why is None if lacks is None else f"fusing them needs {lacks}" in str(why)


GROUPS = {
    "some_without_rows": (256, 0, 300, 17),
    "the_last_alone": (0, 0, 0, 272),
    "no_rows": (0, 0, 0, 0),
}


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x as the products see it."""
    scale = fp8_scale(x.abs().amax(), dtype)
    return cast_to_fp8(x, scale, dtype).float() / scale


@pytest.mark.parametrize("inputs_first", [False, True], ids=["out_in", "in_out"])
@pytest.mark.parametrize("then_input", [True, False], ids=["whole", "split"])
@pytest.mark.parametrize("name", GROUPS)
def test_products_of_rows_in_groups_are_those_of_each_group_with_rounded_operands(
    name: str, then_input: bool, inputs_first: bool
) -> None:
    """Inputs and outputs of other sizes, one of them no multiple of 128; an operand has one scale for all groups."""
    counts, (inputs, outputs) = GROUPS[name], (256, 336)
    torch.manual_seed(0)
    gemms, groups = Fp8Gemms(TENSORWISE, num_matrices=4), RowGroups(counts, inputs_first)
    matrices = torch.randn(4, *((inputs, outputs) if inputs_first else (outputs, inputs)))
    matrices[1] *= 30.0  # a group without rows sets the scale of all
    weight = matrices.flatten(0, 1)
    x, dy = torch.randn(sum(counts), inputs), torch.randn(sum(counts), outputs)
    slot = GradientSlot(torch.ones_like(weight))
    y = gemms.forward_groups(x, weight, groups)
    if then_input:
        gemms.add_weight_gradient_groups(slot, dy, x, groups, then_input=True)
    dx = gemms.input_gradient_groups(dy, weight, groups)
    if not then_input:
        gemms.add_weight_gradient_groups(slot, dy, x, groups)
    assert y.shape == dy.shape and dx.shape == x.shape
    if not sum(counts):
        assert (slot.main_grad == 1.0).all()
        return
    x8, dy8, w8 = rounded(x, E4M3), rounded(dy, E5M2), rounded(weight, E4M3).view_as(matrices)
    w8 = w8.mT if inputs_first else w8
    found, start = slot.main_grad.view_as(matrices) - 1.0, 0
    for group, count in enumerate(counts):
        rows, start = slice(start, start + count), start + count
        torch.testing.assert_close(y[rows], x8[rows] @ w8[group].t(), rtol=1e-5, atol=1e-3)
        torch.testing.assert_close(dx[rows], dy8[rows] @ w8[group], rtol=1e-5, atol=1e-3)
        wanted = dy8[rows].t() @ x8[rows]
        torch.testing.assert_close(found[group].t() if inputs_first else found[group], wanted, rtol=1e-5, atol=1e-3)
