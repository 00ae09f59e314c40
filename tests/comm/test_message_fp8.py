"""Messages in 8 bits: the stated error bound, non-finite rows, the bytes sent, and why gradients are not in e5m2."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.comm.channels import MessageSpec
from megapipe.comm.message_fp8 import decode, encode, encoded_bytes

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def there_and_back(x: torch.Tensor) -> torch.Tensor:
    return decode(encode(x), tuple(x.shape), x.dtype)


def scales(x: torch.Tensor) -> torch.Tensor:
    """Return the smallest power of two of each row with which nothing exceeds 448, by another way than `encode`."""
    largest = x.double().abs().amax(-1, keepdim=True)
    return torch.exp2(torch.ceil(torch.log2(largest / 448))).clamp(min=2.0**-126)


@settings(max_examples=60)
@given(
    st.sampled_from(FLOATS),
    st.integers(0, 2**31),
    st.floats(-30, 30),
    st.floats(0, 12),
    st.sampled_from([(5, 2, 16), (7,), (1, 1, 1), (3, 33)]),
)
def test_the_error_is_within_the_bound(
    dtype: torch.dtype, seed: int, power: float, spread: float, shape: tuple[int, ...]
) -> None:
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.exp2(power + spread * torch.randn(shape, generator=generator))
    x = (torch.randn(shape, generator=generator) * sizes).clamp(-6e4, 6e4).to(dtype)
    y, scale = there_and_back(x), scales(x)
    assert y.dtype is dtype and y.shape == x.shape
    bound = torch.maximum(x.double().abs() / 16, scale / 1024)
    if dtype is torch.float16:
        bound = bound + 2.0**-25  # half of fp16's smallest number
    assert ((y.double() - x.double()).abs() <= bound).all()


def test_what_eight_bits_can_hold_arrives_unchanged() -> None:
    x = torch.tensor([[0.0, -448.0, 1.0, 2.0**-9], [0.0, 0.0, 0.0, 0.0], [3.0, -1.5, 0.125, 0.0]])
    for factor in (1.0, 2.0**-100, 2.0**100):
        assert torch.equal(there_and_back(x * factor), x * factor)
    assert torch.equal(there_and_back(there_and_back(x + 0.3)), there_and_back(x + 0.3))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_row_with_a_non_finite_element_stays_non_finite_and_alone(dtype: torch.dtype, bad: float) -> None:
    x = torch.ones(3, 2, 8, dtype=dtype)
    x[1, 0, 3] = bad
    y = there_and_back(x)
    assert not y[1, 0].isfinite().any()
    rest = torch.ones(3, 2, dtype=torch.bool)
    rest[1, 0] = False
    assert torch.equal(y[rest], x[rest])


def test_a_payload_has_one_byte_for_each_element_and_one_for_each_row() -> None:
    x = torch.randn(6, 2, 32, dtype=torch.bfloat16)
    assert encode(x).nbytes == encoded_bytes(tuple(x.shape)) == 6 * 2 * 33
    assert MessageSpec.of(x).in_fp8() == MessageSpec.of(encode(x))


def test_gradients_of_a_model_lose_less_in_e4m3_than_in_e5m2() -> None:
    torch.manual_seed(1)
    layers = [torch.nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, norm_first=True) for _ in range(3)]
    hidden = [torch.randn(16, 2, 64, requires_grad=True)]
    for layer in layers:
        hidden.append(layer(hidden[-1]))
        hidden[-1].retain_grad()
    logits = hidden[-1] @ torch.randn(64, 50)
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.randint(50, (32,))).backward()
    for each in hidden:
        gradient = each.grad
        assert gradient is not None
        other = gradient / scales(gradient).float() * 128  # the same element at 57344, the largest of e5m2
        e5m2 = other.to(torch.float8_e5m2).float() / 128 * scales(gradient).float()
        error = (there_and_back(gradient) - gradient).norm() / gradient.norm()
        assert error < 0.6 * (e5m2 - gradient).norm() / gradient.norm()
        assert error < 0.03
