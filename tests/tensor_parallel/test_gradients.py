"""Gradient slots: sums in main_grad's dtype, fixed order of rows, readiness after the last use. Weight queue: order,
keys, and that communication of the next gradient runs under the GEMM of the current one.
"""

from __future__ import annotations

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from megapipe.comm.groups import Group
from megapipe.tensor_parallel.gradients import GradientSlot, WeightQueue, gemm_adds_to_fp32
from megapipe.tensor_parallel.linear import ColumnParallelLinear

DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])


@DTYPES
def test_small_gradients_are_not_lost_in_a_large_sum(dtype: torch.dtype) -> None:
    slot = GradientSlot(torch.full((2, 3), 4096.0))
    slot.add(torch.ones(2, 3, dtype=dtype))
    slot.add_outer(torch.ones(1, 2, dtype=dtype), torch.ones(1, 3, dtype=dtype))
    slot.add_rows(torch.tensor([0, 0, 1, 1]), torch.ones(4, 3, dtype=dtype))
    assert torch.equal(slot.main_grad, torch.full((2, 3), 4100.0))


def test_only_a_refused_gemm_is_taken_as_unsupported_and_not_one_that_ran_out_of_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ones, full = torch.ones, torch.full
    monkeypatch.setattr(torch, "ones", lambda *shape, device: ones(*shape))
    monkeypatch.setattr(torch, "full", lambda shape, value, dtype, device: full(shape, value, dtype=dtype))

    def fails_with(error: RuntimeError) -> bool:
        def gemm(*args: object, **options: object) -> None:
            raise error

        monkeypatch.setattr(torch.ops.aten.addmm, "dtype_out", gemm, raising=False)
        gemm_adds_to_fp32.cache_clear()
        try:
            return not gemm_adds_to_fp32(torch.device("cuda"), torch.bfloat16)
        finally:
            gemm_adds_to_fp32.cache_clear()

    assert fails_with(RuntimeError("expected both operands to have the dtype of the result"))
    with pytest.raises(torch.OutOfMemoryError):
        fails_with(torch.OutOfMemoryError("CUDA out of memory"))


def test_gradients_go_into_a_view_of_a_flat_buffer() -> None:
    flat = torch.zeros(16, dtype=torch.float64)
    slot = GradientSlot(flat[4:10].view(2, 3))
    slot.add_outer(torch.ones(5, 2, dtype=torch.float64), torch.ones(5, 3, dtype=torch.float64))
    assert flat.tolist() == [0.0] * 4 + [5.0] * 6 + [0.0] * 6


def test_ready_is_reported_once_per_microbatch_after_the_last_use() -> None:
    ready: list[GradientSlot] = []
    slot = GradientSlot(torch.zeros(1), uses=2, on_ready=ready.append)
    counts = []
    for _ in range(4):
        slot.ready()
        counts.append(len(ready))
    assert counts == [0, 1, 1, 2]


class Recorded:
    """A weight gradient that records its calls."""

    def __init__(self, name: str, events: list[str]) -> None:
        self.name, self.events = name, events

    def launch(self) -> None:
        self.events.append(f"launch {self.name}")

    def accumulate(self) -> None:
        self.events.append(f"add {self.name}")


def test_without_deferring_everything_runs_at_once() -> None:
    queue, events = WeightQueue(), []
    queue.submit(Recorded("a", events))
    assert events == ["launch a", "add a"]
    assert not queue.waiting


def test_deferred_gradients_wait_for_their_key_and_launch_one_ahead() -> None:
    queue, events = WeightQueue(), []
    for key, names in ((0, "ab"), (1, "cde")):
        queue.defer(key)
        for name in names:
            queue.submit(Recorded(name, events))
        queue.immediate()
    assert events == []
    assert list(queue.waiting) == [0, 1]
    queue.run(1)
    assert events == ["launch c", "launch d", "add c", "launch e", "add d", "add e"]
    assert list(queue.waiting) == [0]
    del events[:]
    queue.run(0)
    assert events == ["launch a", "launch b", "add a", "add b"]


def test_a_key_without_weight_gradients_may_be_run() -> None:
    queue = WeightQueue()
    queue.defer("k")
    queue.immediate()
    queue.run("k")
    assert not queue.waiting


def test_deferring_twice_or_running_an_unknown_key_is_refused() -> None:
    queue = WeightQueue()
    with pytest.raises(RuntimeError, match="no weight gradients are queued under 3"):
        queue.run(3)
    queue.defer(0)
    with pytest.raises(RuntimeError, match="deferring already"):
        queue.defer(1)
    queue.immediate()
    with pytest.raises(RuntimeError, match="still waiting"):
        queue.defer(0)
    queue.clear()
    queue.defer(0)


def test_a_deferred_gradient_reaches_its_parameter_where_hooks_pack_what_is_saved() -> None:
    """Unpacked, a saved parameter is another tensor."""
    queue = WeightQueue()
    linear = ColumnParallelLinear(3, 2, bias=True, tp=Group.alone("tp"), sequence_parallel=False, queue=queue)
    linear.weight, linear.bias = (torch.nn.Parameter(torch.randn(shape)) for shape in ((2, 3), (2,)))
    x = torch.randn(4, 1, 3, requires_grad=True)
    with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        output = linear(x)
    queue.defer(0)
    output.sum().backward()
    queue.immediate()
    queue.run(0)
    assert torch.allclose(linear.weight.grad, x.detach().sum((0, 1)).expand(2, 3))
    assert torch.equal(linear.bias.grad, torch.full((2,), 4.0))
