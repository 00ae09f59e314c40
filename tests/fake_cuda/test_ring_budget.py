"""What a ring adds to a layer on a GPU: kernels and bytes beside the same layer and as many tokens without one.

A layer of Llama-3-8B's shape with 8,192 tokens of each sequence on a rank, forward and backward: the difference between
models of four and two layers, halved, without what updates weights. Messages are not counted. A compiled region counts
as two kernels: that of a sum is one, that of a merge two or three, of which one moves more than the log-sum-exps.
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
UPDATE = ("optimizer/", "data_parallel/")
CUDNN = "_scaled_dot_product_cudnn_attention"


def layer_work(run: Callable[..., Any], world_size: int, rank: int, changes: dict[str, Any]) -> dict[str, Any]:
    """Return of one layer the kernels, and the bytes that they read and write, by 'place name'."""
    few, more = (run(world_size, rank, changes | {"num_layers": count}, LAYER_8B) for count in (2, 4))
    assert not few.error and not more.error, few.error or more.error

    def of_layer(field: str) -> dict[str, float]:
        two, four = getattr(few, field), getattr(more, field)
        return {
            key: (four[key] - two.get(key, 0)) / 2 * (2 if field == "kernels" and "compiled" in key else 1)
            for key in four
            if not key.startswith(UPDATE) and four[key] != two.get(key, 0)
        }

    assert not more.host_reads and not more.pageable_copies and not more.mixed_devices
    return {field: of_layer(field) for field in ("kernels", "bytes_moved")}


@pytest.mark.parametrize("rank", [0, CP - 1])  # with the most and with the fewest ranges of queries
def test_a_ring_keeps_to_its_budget(rank: int, run: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> None:
    alone, ring = layer_work(run, 1, 0, {}), layer_work(run, CP, rank, RING)
    kernels, num_bytes = (sum(ring[each].values()) - sum(alone[each].values()) for each in ("kernels", "bytes_moved"))
    with capsys.disabled():
        print(f"\nring of {CP}, rank {rank}: {kernels:.0f} kernels and {num_bytes / 1e9:.2f} GB more")
    assert kernels <= MOST_KERNELS, ring["kernels"]
    assert num_bytes <= MOST_BYTES, ring["bytes_moved"]
    attention = {key.split()[-1]: count for key, count in ring["kernels"].items() if "scaled_dot_product" in key}
    assert attention == {CUDNN: CP, f"{CUDNN}_backward": CP}


def test_a_ring_in_fp32_runs_the_memory_efficient_kernel(run: Callable[..., Any]) -> None:
    work = layer_work(run, CP, 0, RING | {"dtype": "fp32", "seq_length": 256})
    names = {key.split()[-1] for key in work["kernels"] if "scaled_dot_product" in key}
    assert names == {"_scaled_dot_product_efficient_attention", "_scaled_dot_product_efficient_attention_backward"}
