"""The checksum of a tensor's bits detects every single change and depends on bits, not values."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megapipe.data_parallel.copies import LANES, checksum, raw_bytes

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8)


@given(
    dtype=st.sampled_from(DTYPES),
    numel=st.integers(1, 3 * LANES + 7) | st.sampled_from([LANES * 2, LANES * 8, 5 * LANES]),
    start=st.integers(0, 9),
    where=st.integers(0, 1 << 30),
)
def test_a_flip_of_any_one_bit_is_seen(dtype: torch.dtype, numel: int, start: int, where: int) -> None:
    noise = raw_bytes(torch.randn(start + numel, generator=torch.Generator().manual_seed(numel), dtype=torch.float64))
    values = noise.view(dtype)[start : start + numel]
    before = checksum(values)
    assert torch.equal(before, checksum(values.clone())), "the place in memory counts for nothing"
    byte, bit = divmod(where % (8 * values.numel() * dtype.itemsize), 8)
    raw_bytes(values)[byte] ^= 1 << bit
    assert not torch.equal(before, checksum(values))


@pytest.mark.parametrize("numel", [2, 4 * LANES], ids=["short", "long"])
def test_two_elements_that_change_places_are_seen(numel: int) -> None:
    values = torch.arange(1, numel + 1, dtype=torch.float64)
    changed = values.clone()
    changed[0], changed[-1] = values[-1].clone(), values[0].clone()
    assert not torch.equal(checksum(values), checksum(changed))


def test_bits_count_and_not_values() -> None:
    assert not torch.equal(checksum(torch.tensor([0.0, 1.0])), checksum(torch.tensor([-0.0, 1.0])))
    nan = torch.tensor([float("nan"), 1.0])
    assert torch.equal(checksum(nan), checksum(nan.clone()))
