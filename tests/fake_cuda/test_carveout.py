"""--gemm-sm-carveout: only GEMMs beside a collective over tp leave SMs free."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from tests.extras.dry_run.grids import LLAMA, SP2, TP2

pytestmark = pytest.mark.timeout(300)
SMALL = {"num_layers": 2, "global_batch_size": 2, "dtype": "bf16", "gemm_sm_carveout": 16}
OVERLAP = {"tp_comm_overlap": True, "tp_comm_overlap_chunks": 4}
COLUMNS, ROWS = 2 * 2 + 1, 2 * 2  # column-parallel linears of two layers with the output layer; row-parallel ones


def products(seen: Any) -> dict[str, Counter[str]]:
    """Return the products of the linears, by the SMs left free."""
    assert not seen.error, seen.error
    found: dict[str, Counter[str]] = {"0": Counter(), "16": Counter()}
    for key, count in seen.carveouts.items():
        where, free = key.rsplit(" ", 1)
        found[free][where.split(":")[-1]] += count
    return found


@pytest.mark.parametrize("grid", [TP2, SP2], ids=["tp", "sp"])
def test_whole_gemms_leave_sms_where_a_collective_runs(run: Callable[..., Any], grid: dict[str, Any]) -> None:
    """Beside the sum of a column-parallel linear's input gradient runs its weight gradient, and with sequence
    parallelism beside the gather of its input the input gradient."""
    found = products(run(2, 0, SMALL | grid | {"tp_comm_overlap": False}, LLAMA))
    beside = {"add_outer": COLUMNS} | ({"input_gradient": COLUMNS} if grid is SP2 else {})
    assert found["16"] == beside
    assert found["0"] == {
        "forward": COLUMNS + ROWS,
        "input_gradient": ROWS + (0 if grid is SP2 else COLUMNS),
        "add_outer": ROWS,
    }


def test_chunks_leave_sms_but_for_the_one_without_a_neighbour(run: Callable[..., Any]) -> None:
    found = products(run(2, 0, SMALL | SP2 | OVERLAP, LLAMA))
    chunked = COLUMNS + ROWS + ROWS  # forwards, and the input gradients of row-parallel linears
    assert found["16"]["_multiply"] == 3 * chunked and found["0"]["_multiply"] == chunked
    assert found["16"]["add_outer"] == found["16"]["input_gradient"] == COLUMNS


@pytest.mark.parametrize("changes", [{"gemm_sm_carveout": 0} | SP2, {}], ids=["not asked for", "no tp"])
def test_otherwise_gemms_take_the_whole_gpu(run: Callable[..., Any], changes: dict[str, Any]) -> None:
    found = products(run(2 if "tensor_model_parallel_size" in changes else 1, 0, SMALL | changes, LLAMA))
    assert found["0"] and not found["16"]
