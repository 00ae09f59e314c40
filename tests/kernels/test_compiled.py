"""torch.compile of pointwise functions: the same values and gradients, and nothing more kept for the backward."""

from __future__ import annotations

import pytest
import torch

from megapipe.kernels.compiled import compiled
from megapipe.model.activation import ACTIVATIONS, GRADIENTS, activation
from tests.model.saved_bytes import SavedBytes


def values(function: object, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    leaf = x.clone().requires_grad_()
    with SavedBytes(torch.nn.Identity()) as saved:
        y = function(leaf)  # type: ignore[operator]
    y.square().sum().backward()
    return y.detach(), leaf.grad, saved.total


@pytest.mark.parametrize("name", GRADIENTS)
def test_the_written_out_gradient_is_autograds(name: str) -> None:
    """What would be compiled, not compiled."""
    x = torch.randn(5, 8, dtype=torch.float64)
    for one, other in zip(values(activation(name, lambda f: f), x), values(ACTIVATIONS[name], x), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_compiled_activation_is_one_graph_with_the_same_values() -> None:
    x = torch.randn(32, 64)
    for one, other in zip(values(activation("swiglu", compiled), x), values(ACTIVATIONS["swiglu"], x), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
