"""Stages whose layers are recomputed by a memory budget keep the planned bytes and compute the same gradients."""

from __future__ import annotations

import pytest
import torch

from megapipe.config.parallel import RecomputeConfig
from megapipe.plan.activations import deferred_bytes, stage_bytes
from megapipe.plan.recompute_choice import layer_recompute
from megapipe.tensor_parallel.gradients import WeightQueue
from megapipe.tensor_parallel.random import DropoutKey
from tests.model.grids import make_microbatch, make_stage, model_config
from tests.model.test_planned_bytes import (
    ALL_SHAPES,
    DTYPES,
    LAYERS,
    PARTS,
    counted,
    shape_of,
    spec_of,
    tensors_of,
    weights_of,
)

BUDGETS = (0.0, 0.2, 0.35, 0.5, 0.65, 0.8, 0.95, 1.0)


@pytest.mark.parametrize("shape", ALL_SHAPES)
def test_a_stage_keeps_the_bytes_in_the_plan_for_every_budget(shape: str) -> None:
    config, kinds = model_config(num_layers=LAYERS, **ALL_SHAPES[shape]), set()
    for number, budget in enumerate(BUDGETS):
        dtype, part = ("fp32", "bf16")[number % 2], PARTS[("whole", "inner")[number // 2 % 2]]
        wanted = shape_of(config, dtype, RecomputeConfig(recompute_memory_budget=budget))
        layers = spec_of(config).layers[part.first_layer : part.last_layer_exclusive]
        chosen = layer_recompute(layers, wanted)
        kinds.update(chosen)
        count = counted(config, part, chosen, DTYPES[dtype])
        plan = stage_bytes(spec_of(config), wanted, part)
        assert sum(plan.values()) == count.forward, f"{budget}: {chosen}, {plan}\n" + "\n".join(count.storages)
    assert len(kinds) > 3  # nothing, everything and something in between


@pytest.mark.parametrize("shape", ["gpt2_dropout", "llama", "norms_around_soft_caps", "missing_parts"])
def test_gradients_and_loss_are_those_without_recompute(shape: str) -> None:
    config = model_config(num_layers=LAYERS, **ALL_SHAPES[shape])
    weights, microbatch = weights_of(config, torch.float64), make_microbatch(config, dropout_key=DropoutKey(1, 2, 3))

    def gradients(recompute: RecomputeConfig | tuple[RecomputeConfig, ...]) -> list[torch.Tensor | None]:
        stage = make_stage(config, weights, recompute=recompute)
        loss = stage(microbatch).loss_sum
        loss.backward()
        return [loss.detach(), *(parameter.grad for parameter in stage.parameters())]

    plain, seen = gradients(RecomputeConfig()), set()
    for budget in (0.0, 0.3, 0.6, 0.9):
        wanted = shape_of(config, "fp64", RecomputeConfig(recompute_memory_budget=budget))
        chosen = layer_recompute(spec_of(config).layers, wanted)
        seen.add(chosen)
        for one, other in zip(plain, gradients(chosen), strict=True):
            assert (one is None and other is None) or torch.equal(one, other), (budget, chosen)
    assert len(seen) > 2


@pytest.mark.parametrize("shape", ["gpt2_dropout", "llama", "every_layer_another"])
def test_queued_weight_gradients_of_budgeted_layers_keep_the_bytes_in_the_plan(shape: str) -> None:
    config = model_config(num_layers=LAYERS, **ALL_SHAPES[shape])
    for budget in BUDGETS:
        wanted = shape_of(config, "bf16", RecomputeConfig(recompute_memory_budget=budget))
        queue, chosen = WeightQueue(), layer_recompute(spec_of(config).layers, wanted)
        stage = make_stage(config, weights_of(config, DTYPES["bf16"]), recompute=chosen, queue=queue)
        microbatch = make_microbatch(config, dropout_key=DropoutKey(1, 2, 3))
        loss = stage(microbatch).loss_sum
        queue.defer(0)
        loss.backward()
        queue.immediate()
        held = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for waiting in queue.waiting[0]
            for tensor in tensors_of(waiting)
        }
        known = {t.untyped_storage().data_ptr() for t in (*stage.parameters(), microbatch.tokens)}
        waiting = sum(size for address, size in held.items() if address not in known)
        assert waiting == deferred_bytes(spec_of(config), wanted, PARTS["whole"]), (budget, chosen)
