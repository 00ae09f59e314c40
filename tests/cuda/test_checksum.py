"""The checksum of GPU memory equals that of the same bits on the CPU, and a copy with one different bit is found."""

from __future__ import annotations

import pytest
import torch

from megapipe.data_parallel.copies import LANES, checksum, raw_bytes

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

CARD = "cuda"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("numel", [5, 33 * LANES + 3], ids=["short", "long"])
def test_both_devices_see_the_same_bits(dtype: torch.dtype, numel: int) -> None:
    values = torch.randn(numel, generator=torch.Generator().manual_seed(0)).to(dtype)
    there = values.to(CARD)
    assert torch.equal(checksum(values), checksum(there).cpu())
    raw_bytes(there)[numel // 2] ^= 1
    assert not torch.equal(checksum(values), checksum(there).cpu())
