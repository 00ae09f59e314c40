"""The work of a step on a GPU, part by part: the kernels of each element of a layer, and the bytes that they move.

A layer of Llama-3-8B's shape, one sequence of 8,192 tokens, forward and backward, as `megapipe plan --roofline` counts
it. A change that adds or removes a kernel fails here until the budget is changed, with its reason.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from megapipe.plan.step_time import optimizer_bytes
from tests.extras.dry_run.grids import FP8, LLAMA, NARROW, SP2, ZERO1, make_plan

pytestmark = pytest.mark.timeout(300)
LAYER_8B = LLAMA | {
    "num_layers": 2,
    "hidden_size": 4096,
    "ffn_hidden_size": 14336,
    "num_attention_heads": 32,
    "num_query_groups": 8,
    "seq_length": 8192,
    "vocab_size": 128256,
    "micro_batch_size": 1,
    "dtype": "bf16",
    "global_batch_size": 1,
}
LINEARS = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
# element -> kernels, MB of those that are no GEMM or attention
BF16: dict[str, tuple[int, int]] = {
    # forward, two backward, the sum of the weight's gradient, and that of the gradients of both uses of its input
    "input_layernorm": (5, 671),
    "pre_mlp_layernorm": (5, 671),
    # output, input gradient, weight gradient added in fp32
    **dict.fromkeys(LINEARS, (3, 0)),
    # raise both halves, four products, two sums, write both halves; the gradient is copied first, and those of q, k and
    # v are put side by side
    "heads": (23, 3779),
    "core_attention": (2, 0),
    "add": (2, 403),  # two sums
    "activation": (7, 4228),  # silu and product; backward five kernels
}
# each linear: input in F and W, gradient with its transpose, and before each cast a pass for its amax and small ones
# for the scale; the weight gradient leaves its GEMM in fp32 and is added
CASTS = dict(zip(LINEARS, [(34, 940), (34, 738), (34, 3154), (34, 2081)], strict=True))
CASES: dict[str, tuple[int, dict[str, Any], dict[str, tuple[int, int]]]] = {
    "bf16": (1, {"compile_loss": False, "optimizer_impl": "torch"}, BF16),
    "compiled": (1, {"compile_pointwise": True}, BF16 | {"activation": (2, 1879)}),
    "fp8": (1, FP8 | {"global_batch_size": 2}, BF16 | CASTS),  # the first microbatch casts the weights
    "tp8_sp": (
        8,
        SP2 | {"tensor_model_parallel_size": 8, "tp_comm_overlap": False},  # whole GEMMs
        # the tables of angles are as long as with one rank
        {element: (kernels, moved // 8) for element, (kernels, moved) in BF16.items()} | {"heads": (23, 491)},
    ),
}
# the loss: maximum, and by blocks in fp32 difference, exponential, sum; backward difference, exponential, factor, copy;
# three GEMMs. Compiled a pass over the logits each: maximum, sum of exponentials, gradient
LOSS = {"bf16": (569, 50_430), "compiled": (35, 8406)}
# of the step around the layers: ids checked, rows of the embedding read and their gradients added; copies of tokens and
# labels, the loss scaled
MOST_BORDER_KERNELS = 45


@pytest.mark.parametrize("name", CASES)
def test_a_step_keeps_to_its_budget(name: str, run: Callable[..., Any]) -> None:
    world_size, changes, budget = CASES[name]
    seen = run(world_size, 0, changes, LAYER_8B)
    assert not seen.error, seen.error
    assert not seen.host_reads
    rows = {part: row for part, row in seen.parts["1"].items() if not part.endswith(" messages")}
    assert {part: row["kernels"] for part, row in rows.items()} == {part: count for part, (count, _) in budget.items()}
    for part, (_, megabytes) in budget.items():
        assert rows[part]["num_bytes"] == pytest.approx(1e6 * megabytes, rel=0.02, abs=1e6), part
    ends = seen.parts[""]
    loss = ends.pop("output layer and loss")
    if name in LOSS:
        kernels, megabytes = LOSS[name]
        assert loss["kernels"] == kernels and loss["num_bytes"] == pytest.approx(1e6 * megabytes, rel=0.01)
    assert sum(row["kernels"] for row in ends.values()) <= MOST_BORDER_KERNELS


def update_bytes(seen: Any) -> float:
    """Return the bytes that a counted update moves."""
    starts = ("optimizer/", "data_parallel/store.py:begin_step zero_")
    return float(sum(count for key, count in seen.bytes_moved.items() if key.startswith(starts)))


UPDATES: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp32": {"dtype": "fp32"},
    "compiled": {"optimizer_impl": "compiled"},
    "compiled fp32": {"optimizer_impl": "compiled", "dtype": "fp32"},
    "bf16 moments and gradients": NARROW,
    "whole gradients, narrow moments": NARROW | {"main_grads_dtype": "fp32"},
    "fp32 weights, narrow moment": NARROW | {"dtype": "fp32", "exp_avg_sq_dtype": "fp32"},
    "zero1": ZERO1,
}


@pytest.mark.parametrize("name", UPDATES)
def test_the_planned_bytes_of_an_update_are_those_counted(name: str, run: Callable[..., Any]) -> None:
    changes, world_size = UPDATES[name], 4 if name == "zero1" else 1
    shape = {"num_layers": 1, "hidden_size": 512, "seq_length": 8, "vocab_size": 4096, "micro_batch_size": 1}
    changes = LLAMA | shape | {"dtype": "bf16", "global_batch_size": world_size} | changes
    seen = run(world_size, 0, changes, {})
    assert not seen.error, seen.error
    plan = make_plan(world_size, changes | {"device": "cuda"})
    planned = optimizer_bytes(plan, 0, plan.config.kernels.optimizer_impl == "compiled")
    assert update_bytes(seen) == pytest.approx(planned, rel=0.02)
