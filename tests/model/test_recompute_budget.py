"""Stages whose layers are recomputed by a memory budget compute the same gradients."""

from __future__ import annotations

import pytest
import torch

from megapipe.config.parallel import RecomputeConfig
from megapipe.plan.recompute_choice import layer_recompute
from megapipe.tensor_parallel.random import DropoutKey
from tests.model.grids import make_microbatch, make_stage, model_config
from tests.model.test_planned_bytes import ALL_SHAPES, LAYERS, shape_of, spec_of, weights_of


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
