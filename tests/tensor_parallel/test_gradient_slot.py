"""Gradient slots: sums in main_grad's dtype, a fixed order of rows, readiness after the last use."""

from __future__ import annotations

import pytest
import torch

from megapipe.tensor_parallel.gradient_slot import GradientSlot

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])


@DTYPES
def test_small_gradients_are_not_lost_in_a_large_sum(dtype: torch.dtype) -> None:
    slot = GradientSlot(torch.full((2, 3), 4096.0))
    slot.add(torch.ones(2, 3, dtype=dtype))
    slot.add_outer(torch.ones(1, 2, dtype=dtype), torch.ones(1, 3, dtype=dtype))
    slot.add_rows(torch.tensor([0, 0, 1, 1]), torch.ones(4, 3, dtype=dtype))
    assert torch.equal(slot.main_grad, torch.full((2, 3), 4100.0))


def test_a_bias_sum_is_formed_in_fp32() -> None:
    slot = GradientSlot(torch.zeros(3))
    slot.add_column_sum(torch.ones(4097, 3, dtype=torch.bfloat16))
    assert torch.equal(slot.main_grad, torch.full((3,), 4097.0))  # bf16 has no 4097


def test_gradients_go_into_a_view_of_a_flat_buffer() -> None:
    flat = torch.zeros(16, dtype=torch.float64)
    slot = GradientSlot(flat[4:10].view(2, 3))
    slot.add_outer(torch.ones(5, 2, dtype=torch.float64), torch.ones(5, 3, dtype=torch.float64))
    assert flat.tolist() == [0.0] * 4 + [5.0] * 6 + [0.0] * 6


def test_ready_is_told_once_a_microbatch_after_the_last_use() -> None:
    told: list[GradientSlot] = []
    slot = GradientSlot(torch.zeros(1), uses=2, on_ready=told.append)
    counts = []
    for _ in range(4):
        slot.ready()
        counts.append(len(told))
    assert counts == [0, 1, 1, 2]
