"""torch.compile of pointwise functions keeps values and gradients and saves nothing more for the backward."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo.testing

from megapipe.config.config import convert
from megapipe.config.layers import LayerConfig
from megapipe.config.model import ModelConfig
from megapipe.extras.reference.experts import ACTIVATIONS as PLAIN
from megapipe.gpu import kernels
from megapipe.gpu.kernels import compiled
from megapipe.model.mlp import FORMULAS, GATES, activation
from megapipe.tensor_parallel.fp8_matrix import E4M3, E5M2
from megapipe.tensor_parallel.fp8_scales import cast_to_fp8
from tests.model.saved_bytes import SavedBytes


def values(function: object, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    leaf = x.clone().requires_grad_()
    with SavedBytes(torch.nn.Identity()) as saved:
        y = function(leaf)  # type: ignore[operator]
    y.square().sum().backward()
    return y.detach(), leaf.grad, saved.total


def of_kind(name: str) -> LayerConfig:
    return convert(LayerConfig, ModelConfig(activation=name))


@pytest.mark.parametrize("name", FORMULAS)
def test_written_out_gradients_are_autograds(name: str) -> None:
    """Compare both forms, the one that would be compiled too, with the reference."""

    def plain(x: torch.Tensor) -> torch.Tensor:
        if name not in GATES:
            return PLAIN[name](x)
        gate, up = x.chunk(2, dim=-1)
        return PLAIN[name](gate) * up

    x = torch.randn(5, 8, dtype=torch.float64)
    *expected, _ = values(plain, x)
    for function in (activation(of_kind(name)), activation(of_kind(name), lambda f: f)):
        *found, saved = values(function, x)
        assert saved == x.nbytes
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


def test_more_shapes_than_torch_keeps_graphs_of_one_function_are_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The casts of one layer's linears have nine shapes or more, in two formats.

    The functions are traced, not compiled to machine code.
    """
    whole = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **settings: whole(function, backend="eager", **settings))
    torch._dynamo.reset()
    linears = [compiled(cast_to_fp8) for _ in range(4)]
    for number, linear in enumerate(linears):
        for rows, columns in ((32, 32), (32, 16 * (number + 2)), (16 * (number + 3), 32)):
            for dtype in (E4M3, E5M2):
                x, scale = torch.randn(rows, columns).bfloat16(), torch.tensor(3.0)
                assert torch.equal(linear(x, scale, dtype).float(), cast_to_fp8(x, scale, dtype).float())


@pytest.mark.parametrize("is_exact", [False, True])
def test_numbers_of_rows_that_vary_are_compiled_once(is_exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One graph for any number of rows, and those that torch makes for no row and for one; an exact function has one
    for its first number of rows besides."""
    counter, whole = torch._dynamo.testing.CompileCounter(), torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **settings: whole(function, backend=counter, **settings))
    torch._dynamo.reset()
    kernels._shared_code.cache_clear()
    cast, scale = compiled(cast_to_fp8, is_exact), torch.tensor(3.0)
    for rows in (*range(32, 52), 1, 0, 32):
        x = torch.randn(rows, 16)
        assert torch.equal(cast(x, scale, E4M3).float(), cast_to_fp8(x, scale, E4M3).float())
    assert counter.frame_count == 3 + is_exact
    for columns in (32, 48):
        for rows in range(32, 52):
            cast(torch.randn(rows, columns), scale, E4M3)
    assert counter.frame_count == 3 + is_exact + 2 * (1 + is_exact)


def test_beyond_a_number_of_kinds_all_sizes_are_dynamic(monkeypatch: pytest.MonkeyPatch) -> None:
    counter, whole = torch._dynamo.testing.CompileCounter(), torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **settings: whole(function, backend=counter, **settings))
    monkeypatch.setattr(kernels, "MOST_KINDS", 3)
    torch._dynamo.reset()
    kernels._shared_code.cache_clear()
    cast, scale = compiled(cast_to_fp8), torch.tensor(3.0)
    for columns in range(2, 42):
        x = torch.randn(8, columns)
        assert torch.equal(cast(x, scale, E4M3).float(), cast_to_fp8(x, scale, E4M3).float())
    assert counter.frame_count == 3 + 1


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_compiled_activation_is_one_graph_with_the_same_values() -> None:
    x = torch.randn(32, 64)
    for one, other in zip(
        values(activation(of_kind("swiglu"), compiled), x), values(activation(of_kind("swiglu")), x), strict=True
    ):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
