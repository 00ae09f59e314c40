"""What one layer asks of a GPU in a step: its kernels, and the bytes that they read and write, held to a table.

A layer of Llama-3-8B's shape, one sequence of 8,192 tokens, forward, backward and update: the difference between models
of four and two layers, halved. A change that adds or removes a kernel has to change the table, with its reason in the
commit. Not counted: RMSNorm, whose kernel a CPU build of torch does not have.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.extras.dry_run.grids import FP8, LLAMA, SP2
from tests.fake_cuda.test_steps import run as run  # a fixture

pytestmark = pytest.mark.timeout(300)
LAYER_8B = LLAMA | {
    "hidden_size": 4096,
    "ffn_hidden_size": 14336,
    "num_attention_heads": 32,
    "num_query_groups": 8,
    "seq_length": 8192,
    "micro_batch_size": 1,
    "dtype": "bf16",
    "global_batch_size": 1,
}
# options -> (ranks, changes, kernels, GB read and written); what costs:
BUDGETS: dict[str, tuple[int, dict[str, Any], float, float]] = {
    # rope as mul, add, cat and copies of q and k; gradients of q, k and v copied into one; squares for the norm
    "bf16": (1, {}, 68.0, 24.72),
    "tp8_sp": (8, SP2 | {"tensor_model_parallel_size": 8}, 55.0, 3.81),
    # casts as chains of kernels: scale, clamp, cast, transpose, for each operand
    "fp8": (1, FP8, 348.0, 66.31),
}


@pytest.mark.parametrize("name", BUDGETS)
def test_a_layer_keeps_to_its_budget(name: str, run: Callable[..., Any]) -> None:
    world_size, changes, kernels, gigabytes = BUDGETS[name]
    few, more = (run(world_size, 0, changes | {"num_layers": count}, LAYER_8B) for count in (2, 4))
    assert not few.error and not more.error, few.error or more.error
    found = {each: (more.kernels[each] - few.kernels.get(each, 0)) / 2 for each in more.kernels}
    moved = (sum(more.bytes_moved.values()) - sum(few.bytes_moved.values())) / 2e9
    assert (sum(found.values()), round(moved, 2)) == (kernels, gigabytes), {each: n for each, n in found.items() if n}
