"""Kernels that only a GPU has: gradients added in the GEMM, gathered rows in a fixed order."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from megapipe.gpu.packed_attention import DocumentBorders, packed_attention, torch_kernel
from megapipe.model.attention import fused_attention
from megapipe.model.context import whole_mask
from megapipe.sharding.sequence import SequenceSlice, Visibility
from megapipe.tensor_parallel.gemms import PLAIN_GEMMS
from megapipe.tensor_parallel.gradients import GradientSlot, gemm_adds_to_fp32

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

CARD = "cuda"


def allocated_by(work: Callable[[], object]) -> int:
    """Return the bytes that a repeated call allocates at its peak, besides the workspace of a GEMM."""
    small = torch.ones(16, 16, device=CARD, dtype=torch.bfloat16)

    def peak(call: Callable[[], object]) -> int:
        call()  # what is allocated once
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        return torch.cuda.max_memory_allocated() - before

    return peak(work) - peak(lambda: torch.mm(small, small, out=small.clone()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weight_gradients_are_added_in_fp32(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    gradient, inputs = (torch.randn(512, width, device=CARD).to(dtype) for width in (96, 64))
    slot = GradientSlot(torch.zeros(96, 64, device=CARD))
    for _ in range(3):
        slot.add_outer(gradient, inputs)
    expected = 3 * gradient.double().t() @ inputs.double()
    assert torch.allclose(slot.main_grad.double(), expected, rtol=1e-5, atol=1e-3)
    coarse = 3 * torch.mm(gradient.t(), inputs).double()
    assert (slot.main_grad.double() - expected).abs().max() < (coarse - expected).abs().max() / 10, (
        "sums were rounded to 16 bits"
    )


@pytest.mark.parametrize("has_bias", [False, True], ids=["", "bias"])
def test_a_chunk_is_multiplied_in_place(has_bias: bool) -> None:
    """Strided rows are read and written in place: no copy of operand, matrix or result."""
    ranks, rows, inputs, outputs = 4, 512, 1024, 2048
    x, y = (torch.randn(ranks, 2 * rows, width, device=CARD).bfloat16() for width in (inputs, outputs))
    weight, bias = torch.randn(outputs, inputs, device=CARD).bfloat16(), torch.randn(outputs, device=CARD).bfloat16()
    product = PLAIN_GEMMS.forward_chunks(x, weight, bias if has_bias else None, None)
    untouched = y[:, rows:].clone()
    assert allocated_by(lambda: product(x[:, :rows], y[:, :rows])) < weight.nbytes / 4
    expected = torch.nn.functional.linear(x[:, :rows].float(), weight.float(), bias.float() if has_bias else None)
    torch.testing.assert_close(y[:, :rows].float(), expected, rtol=2e-2, atol=0.5)
    assert torch.equal(y[:, rows:], untouched)


def test_the_gemm_itself_adds_on_this_gpu() -> None:
    """The GEMM allocates nothing but its result: no fp32 product in addition to the gradient."""
    device = torch.device(CARD, torch.cuda.current_device())
    if not gemm_adds_to_fp32(device, torch.bfloat16):
        pytest.skip(f"torch {torch.__version__} on {torch.cuda.get_device_name()} adds products of bf16 separately")
    slot = GradientSlot(torch.zeros(2048, 2048, device=CARD))
    gradient, inputs = (torch.randn(256, 2048, device=CARD, dtype=torch.bfloat16) for _ in range(2))
    assert allocated_by(lambda: slot.add_outer(gradient, inputs)) < slot.main_grad.nbytes / 4


def test_rows_of_an_embedding_are_added_in_one_order() -> None:
    rows = torch.randint(0, 7, (4096,), device=CARD)
    gradient = torch.randn(4096, 64, device=CARD)
    sums = []
    for _ in range(3):
        slot = GradientSlot(torch.zeros(7, 64, device=CARD))
        slot.add_rows(rows, gradient)
        sums.append(slot.main_grad)
    assert torch.equal(sums[0], sums[1]) and torch.equal(sums[1], sums[2])


@pytest.mark.parametrize("window", [None, 40], ids=["", "window"])
@pytest.mark.parametrize(("groups", "queries", "batch"), [(4, 1, 1), (2, 4, 1), (2, 4, 2), (1, 8, 1)])
def test_documents_by_their_borders_equal_documents_under_a_mask(
    groups: int, queries: int, batch: int, window: int | None
) -> None:
    seq, size = 256, 64
    ids = torch.zeros(batch, seq, dtype=torch.int64)
    ids[0, 17:], ids[0, 200:] = 1, 2
    borders = DocumentBorders.of(ids.numpy(), lambda starts: torch.from_numpy(starts).to(CARD))
    ids = ids.to(CARD)
    mask = whole_mask(Visibility.of(SequenceSlice((seq,)), True, window=window), ids.device, torch.bfloat16, ids)
    qkv = torch.randn(seq, batch, groups, queries + 2, size, device=CARD).bfloat16().requires_grad_()
    parts = qkv.split((queries, 1, 1), dim=3)
    kernel = partial(torch_kernel, scale=0.125, window=window)
    packed = packed_attention(*parts, borders, kernel)
    masked = fused_attention(*parts, mask, 0.125)
    torch.testing.assert_close(packed, masked, rtol=2e-2, atol=2e-2)
    gradients = [torch.autograd.grad(x.float().square().sum(), qkv)[0] for x in (packed, masked)]
    torch.testing.assert_close(*gradients, rtol=5e-2, atol=5e-2)
