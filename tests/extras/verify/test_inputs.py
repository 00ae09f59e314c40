"""The inputs of a verification: weights drawn in slices are slices of the whole tensors; batches are cut over dp as in
training."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megapipe.extras.verify.oracle import Oracle, drawn_slices, random_batches, whole_weights
from megapipe.optimizer.schedule import Rates
from megapipe.plan.resolve import resolve
from tests.extras.verify.grids import given_slices
from tests.tiny import LLAMA, tiny_config


@pytest.mark.parametrize("options", [{}, LLAMA | {"qk_layernorm": True}], ids=["gpt2", "llama"])
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_slices_drawn_on_a_grid_are_slices_of_what_one_process_draws(tp: int, options: dict) -> None:
    specs = resolve(tiny_config(tp=tp, **options), tp).specs
    drawn = drawn_slices(seed=3, dtype=torch.float64)
    given = given_slices(whole_weights(specs, drawn))
    assert all(torch.equal(drawn(spec, rank, tp), given(spec, rank, tp)) for spec in specs for rank in range(tp))


def test_every_weight_differs_from_its_usual_initial_value() -> None:
    for spec in resolve(tiny_config(), 1).specs:
        values = drawn_slices(seed=3, dtype=torch.bfloat16)(spec, 0, 1).double()
        start = {"ones": 1.0, "zeros": 0.0, "normal": 0.0}[spec.init.kind]
        assert 0.05 < (values - start).std() < 0.5 and torch.equal(values, values.bfloat16().double())


def test_missing_vocabulary_padding_is_zero() -> None:
    spec = resolve(tiny_config(), 1).specs[0]
    whole = torch.ones(21, 16)
    assert given_slices({spec.name: whole})(spec, 0, 1).sum() == whole.numel()


def test_batches_have_documents_where_the_configuration_uses_them() -> None:
    plain = random_batches(resolve(tiny_config(), 1).config, 1, [2], seed=5)[0][0]
    assert plain.document_ids is None and plain.position_ids is None and plain.loss_mask is None
    config = resolve(tiny_config(reset_attention_mask=True, reset_position_ids=True, eod_mask_loss=True), 1).config
    batches = random_batches(config, 2, [3, 4], seed=5)
    assert [len(batch) for batch in batches] == [6, 8]
    assert max(batch.document_ids.max() for batch in batches[0] if batch.document_ids is not None) > 0
    assert any((batch.loss_mask == 0).any() for batch in batches[0] if batch.loss_mask is not None)
    assert all(batch.tokens.max() <= 20 for batch in batches[1])
    assert not np.array_equal(batches[0][0].tokens, batches[1][0].tokens)


def test_the_oracle_trains() -> None:
    plan = resolve(tiny_config(dtype="fp64", hidden_dropout=0.1, global_batch_size=2), 1)
    weights = whole_weights(plan.specs, drawn_slices(3, torch.float64))
    batch = random_batches(plan.config, 1, [2], seed=5)[0]
    oracle = Oracle(plan.config, weights)
    steps = [oracle.step(batch, step, Rates(1e-2, 0.1)) for step in range(8)]
    assert steps[-1].loss < steps[0].loss
    assert all(not torch.equal(steps[0].weights[name], weight) for name, weight in weights.items())
    assert steps[0].grad_norm == pytest.approx(sum(g.square().sum().item() for g in steps[0].gradients.values()) ** 0.5)
