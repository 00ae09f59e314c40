"""The work of a step on a GPU, part by part: kernels, and the bytes that they read and write, counted and as budgeted.

A layer of Llama-3-8B's shape, one sequence of 8,192 tokens, forward, backward and update: the difference between models
of four and two layers, halved; two layers without these are the step around them. The budget of layers and the loss is
`megapipe.plan.roofline`, from which `megapipe plan --roofline` computes times. A change that adds or removes a kernel
fails here until the budget is changed, with its reason.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest

from megapipe.plan.hardware import hardware_named
from megapipe.plan.roofline import Forms, PartWork, configured_forms, layer_work, step_work
from megapipe.plan.run_plan import RunPlan
from megapipe.plan.step_time import optimizer_bytes
from tests.extras.dry_run.grids import FP8, LLAMA, SP2, ZERO1, make_plan
from tests.extras.dry_run.test_planned import NARROW

pytestmark = pytest.mark.timeout(300)
LAYER_8B = LLAMA | {
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
TP8 = SP2 | {"tensor_model_parallel_size": 8, "tp_comm_overlap": False}  # whole GEMMs
COMPILED = {"compile_pointwise": True, "optimizer_impl": "compiled"}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "bf16": (1, {}),
    "compiled": (1, COMPILED),
    "fp8": (1, FP8),
    "tp8_sp": (8, TP8),
}
# beginnings of 'place kernel' -> the part of the budget; the first that fits
PARTS = {
    "extras/dry_run/meta.py:attention_on": "attention",
    "outside _scaled_dot_product": "attention",
    "outside rms_norm": "norms",
    "model/norm.py": "norms",
    "data_parallel/buffers.py:add": "norms",
    "data_parallel/stores.py:_reduce": "norms",
    "outside cat": "qkv gradient",
    "outside add": "residual",
    "model/block.py:__call__ add_": "residual",
    "model/context.py": "rotary",
    "model/mlp.py": "activation",
    "tensor_parallel/gemms.py": "GEMMs",
    "tensor_parallel/gradients.py:add_outer": "GEMMs",
    "tensor_parallel/fp8_matrix.py": "GEMMs",
    "tensor_parallel/fp8": "fp8",
    "tensor_parallel/gradients.py:add add_": "fp8",
    "tensor_parallel/cross_entropy.py": "loss",
    "tensor_parallel/embedding.py:local": "loss",
    "tensor_parallel/embedding.py": "embedding",
    "tensor_parallel/gradients.py:add_rows": "embedding",
    "optimizer/": "update",
    "data_parallel/store.py:begin_step zero_": "update",
}
# of the step around the layers: ids checked, rows of the embedding read and their gradients added; copies of tokens and
# labels, the loss scaled and summed over microbatches and ranks
MOST_BORDER_KERNELS = 45


def parts_of(counted: dict[str, float]) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    for key, count in counted.items():
        found[next((part for start, part in PARTS.items() if key.startswith(start)), "border")] += count
    return found


@pytest.fixture(params=CASES)
def counted(
    request: pytest.FixtureRequest, run: Callable[..., Any]
) -> tuple[RunPlan, list[dict[str, dict[str, float]]]]:
    """Return a plan, and its kernels and bytes by part: [of a layer, of the step around the layers]."""
    world_size, changes = CASES[request.param]
    few, more = (run(world_size, 0, changes | {"num_layers": count}, LAYER_8B) for count in (2, 4))
    assert not few.error and not more.error, few.error or more.error
    layer, step = {}, {}
    for name in ("kernels", "bytes_moved"):
        two, four = parts_of(getattr(few, name)), parts_of(getattr(more, name))
        layer[name] = {part: (four[part] - two[part]) / 2 for part in four}
        step[name] = {part: two[part] - 2 * layer[name][part] for part in four}
    return make_plan(world_size, changes | {"num_layers": 4, "device": "cuda"}, LAYER_8B), [layer, step]


def test_a_step_keeps_to_its_budget(counted: tuple[RunPlan, list[dict[str, dict[str, float]]]]) -> None:
    plan, (layer, step) = counted
    forms = configured_forms(plan)
    work = [each for each in layer_work(plan, hardware_named("h100"), forms) if each.part != "tp messages"]
    fp8 = [each for each in work if each.part.startswith("fp8")]
    work = [each for each in work if each not in fp8]
    if fp8:
        work.append(PartWork("fp8", sum(each.kernels for each in fp8), sum(each.num_bytes for each in fp8), ""))
    kernels = {part: count for part, count in layer["kernels"].items() if count and part != "update"}
    assert kernels == {each.part: each.kernels for each in work}
    for each in work:
        if each.seconds is None:
            assert layer["bytes_moved"][each.part] == pytest.approx(each.num_bytes, rel=0.01), each
    around = step_work(plan, forms)
    weights = sum(spec.num_elements for spec in plan.specs) / plan.topology.tp
    moved = 4 * layer["bytes_moved"]["update"] + step["bytes_moved"]["update"]
    assert moved == pytest.approx(around["update"].num_bytes * weights, rel=0.02)
    assert step["kernels"]["loss"] == around["loss"].kernels
    assert step["bytes_moved"]["loss"] == pytest.approx(around["loss"].num_bytes, rel=0.02)
    assert step["kernels"]["embedding"] + step["kernels"]["border"] <= MOST_BORDER_KERNELS


UPDATES: dict[str, dict[str, Any]] = {
    "bf16": {},
    "fp32": {"dtype": "fp32"},
    "compiled": {"optimizer_impl": "compiled"},
    "compiled fp32": {"optimizer_impl": "compiled", "dtype": "fp32"},
    "remainders": {"use_precision_aware_optimizer": True},
    "bf16 moments and gradients": NARROW | {"exp_avg_sq_dtype": "bf16"},
    "a scaled moment": NARROW,
    "scaled masters": NARROW | {"main_params_dtype": "fp16"},
    "whole gradients, scaled moments": NARROW
    | {"main_grads_dtype": "fp32", "exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "fp8"},
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
    assert parts_of(seen.bytes_moved)["update"] == pytest.approx(planned, rel=0.02)


def test_what_a_review_found_costs_what_it_was_counted_to() -> None:
    """fp8 as separate kernels, blocks of 8 MiB: more launches and bytes than fused."""
    plan = make_plan(1, FP8 | {"device": "cuda"}, LAYER_8B)
    reviewed, now = (
        next(each for each in layer_work(plan, hardware_named("h100"), forms) if each.part == "fp8 casts")
        for forms in (Forms(fuses_casts=False), Forms())
    )
    assert reviewed.num_bytes > 4 * now.num_bytes and reviewed.kernels > 4 * now.kernels
    launches = [step_work(plan, Forms(loss_block_bytes=size))["loss"].kernels for size in (1 << 23, 1 << 27)]
    assert launches[0] > 5000 and launches[1] < 600
