"""What a ring adds to a layer on a GPU: kernels and bytes beside the same layer and as many tokens without one.

A layer of Llama-3-8B's shape with 8,192 tokens of each sequence on a rank, forward and backward. Messages are not
counted. A compiled region counts as two kernels: that of a sum is one, that of a merge two or three, of which one moves
more than the log-sum-exps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.fake_cuda.test_budget import LAYER_8B

pytestmark = pytest.mark.timeout(300)
CP, TOKENS = 4, 8192
RING = {"context_parallel_size": CP, "cp_comm_type": ["p2p"], "seq_length": CP * TOKENS}
MOST_KERNELS, MOST_BYTES = 30, 3e9
CUDNN = "_scaled_dot_product_cudnn_attention"


def layer_work(run: Callable[..., Any], world_size: int, rank: int, changes: dict[str, Any]) -> tuple[float, float]:
    """Return the kernels of one layer, and the bytes that they read and write."""
    seen = run(world_size, rank, changes, LAYER_8B)
    assert not seen.error, seen.error
    assert not seen.host_reads and not seen.pageable_copies and not seen.mixed_devices
    rows = [row for part, row in seen.parts["1"].items() if not part.endswith(" messages")]
    compiled = sum(count for key, count in seen.kernels.items() if "model/" in key and "compiled" in key) / 2
    return sum(row["kernels"] for row in rows) + compiled, sum(row["all_bytes"] for row in rows)


def attention_kernels(seen: Any) -> dict[str, float]:
    """Return the kernels of attention in one layer of two."""
    return {key.split()[-1]: count / 2 for key, count in seen.kernels.items() if "scaled_dot_product" in key}


@pytest.mark.parametrize("rank", [0, CP - 1])  # with the most and with the fewest ranges of queries
def test_a_ring_keeps_to_its_budget(rank: int, run: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> None:
    alone, ring = layer_work(run, 1, 0, {}), layer_work(run, CP, rank, RING)
    kernels, num_bytes = (more - less for more, less in zip(ring, alone, strict=True))
    with capsys.disabled():
        print(f"\nring of {CP}, rank {rank}: {kernels:.0f} kernels and {num_bytes / 1e9:.2f} GB more")
    assert kernels <= MOST_KERNELS and num_bytes <= MOST_BYTES
    assert attention_kernels(run(CP, rank, RING, LAYER_8B)) == {CUDNN: CP, f"{CUDNN}_backward": CP}


def test_a_ring_in_fp32_runs_the_memory_efficient_kernel(run: Callable[..., Any]) -> None:
    seen = run(CP, 0, RING | {"dtype": "fp32", "seq_length": 256}, LAYER_8B)
    assert not seen.error, seen.error
    names = {"_scaled_dot_product_efficient_attention", "_scaled_dot_product_efficient_attention_backward"}
    assert set(attention_kernels(seen)) == names
