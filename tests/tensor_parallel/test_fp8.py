"""Arithmetic of fp8: rounding within the formats' bounds, products as torch._scaled_mm makes them, scales that a step
does not change.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import megapipe.tensor_parallel.fp8 as fp8
from megapipe.tensor_parallel.fp8_matrix import E4M3, E5M2, Fp8Tensor, fp8_matmul
from megapipe.tensor_parallel.fp8_scales import cast_to_fp8, fp8_scale

# half a unit in the last place, relative; half the smallest number, absolute
ROUNDOFF = {E4M3: (2.0**-4, 2.0**-10), E5M2: (2.0**-3, 2.0**-17)}


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
