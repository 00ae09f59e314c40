"""The oracle's configuration covers the model section; its weights, batches and dropout masks are those of the grid."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from megapipe.config.model import ModelConfig
from megapipe.extras.reference.asynchronous import StreamRule
from megapipe.extras.reference.config import ReferenceConfig
from megapipe.extras.reference.gpt import ReferenceGPT
from megapipe.extras.verify.oracle import (
    FROM_TRAINING,
    GridMasks,
    Oracle,
    StreamOracle,
    drawn_slices,
    parameter_stages,
    random_batches,
    reference_config,
    stream_rule,
    whole_weights,
)
from megapipe.optimizer.schedule import Rates
from megapipe.plan.resolve import resolve
from megapipe.plan.run_plan import RunPlan
from megapipe.tensor_parallel.random import DropoutKey, keyed_mask
from tests.extras.verify.grids import given_slices
from tests.tiny import LLAMA, tiny_config

# the reference computes in fp32 or better anyway; its weights and padded vocabulary are given
PER_LAYER = {
    "window_attn_skip_freq",
    "no_rope_freq",
    "moe_layer_freq",
    "layer_pattern",
}  # the fields `layers` and has_* in the reference
FUNCTIONS = {  # of extensions: tests/test_extend.py
    "norm_function",
    "norm_has_bias",
    "activation_function",
    "activation_is_gated",
    "attention_function",
    "attention_heads",
    "mixer",
    "mixer_matrices",
}
WITHOUT_EFFECT = {
    "make_vocab_size_divisible_by",
    "init_method_std",
    "attention_options",  # of token mixers, which are built with them
    "attention_softmax_in_fp32",
    "moe_router_dtype",
    "moe_router_force_load_balancing",
    "moe_pad_expert_input_to_capacity",
    "moe_token_dispatcher_type",
    "moe_combine_in_node",
    "moe_flex_dispatcher_backend",
}
KEY = DropoutKey(seed=3, step=1, microbatch=5)


def test_every_model_option_reaches_the_reference() -> None:
    options = {field.name for field in dataclasses.fields(ModelConfig)}
    known = {field.name for field in dataclasses.fields(ReferenceConfig)}
    assert options - known == WITHOUT_EFFECT | PER_LAYER
    assert known - options == {*FROM_TRAINING, "layers", "has_attention", "has_mlp", "moe_capacity_slices", *FUNCTIONS}
    config = resolve(tiny_config(**LLAMA, tp=2, label_smoothing=0.1, z_loss=1e-3), 2).config
    made = reference_config(config)
    assert all(getattr(made, name) == getattr(config.model, name) for name in options & known)
    assert (made.label_smoothing, made.z_loss) == (0.1, 1e-3)


def test_options_of_single_layers_reach_the_reference() -> None:
    pattern = ("1 attention=none ffn_hidden_size=24", "1 mlp=none rotary_base=50", "2", "1 qk_layernorm=true")
    frequencies = {"window_size": 3, "window_attn_skip_freq": "2", "no_rope_freq": "5"}
    config = resolve(tiny_config(**LLAMA, num_layers=5, layer_pattern=pattern, **frequencies), 1).config
    made = reference_config(config)
    layers = [made.layer(number) for number in range(5)]
    assert [layer.has_attention for layer in layers] == [False, True, True, True, True]
    assert [layer.has_mlp for layer in layers] == [True, False, True, True, True]
    assert [layer.ffn_hidden_size for layer in layers] == [24, 12, 12, 12, 12]
    assert [layer.rotary_base for layer in layers] == [10000.0, 50.0, 10000.0, 10000.0, 10000.0]
    assert [layer.window_size for layer in layers] == [3, None, 3, None, 3]
    assert [layer.position_embedding_type for layer in layers] == ["rope"] * 4 + ["none"]
    assert [layer.qk_layernorm for layer in layers] == [False] * 4 + [True]


UNLIKE: dict[str, Any] = LLAMA | {
    "norm_position": "around",
    "qk_layernorm": True,
    "qk_layernorm_scope": "projection",
    "layer_pattern": ("1 attention=none norm_position=after", "1 mlp=none num_query_groups=1"),
}


@pytest.mark.parametrize(
    "options", [{}, LLAMA, {"qk_layernorm": True}, UNLIKE], ids=["gpt2", "llama", "qk-norm", "unlike layers"]
)
def test_the_reference_has_the_parameters_of_the_specs_in_their_order(options: dict) -> None:
    plan = resolve(tiny_config(**options), 1)
    model = ReferenceGPT(reference_config(plan.config))
    assert {name: tuple(parameter.shape) for name, parameter in model.named_parameters()} == {
        s.name: s.shape for s in plan.specs
    }


def masks(**options: object) -> GridMasks:
    return GridMasks(resolve(tiny_config(tp=2, hidden_dropout=0.25, attention_dropout=0.5, **options), 2).config, KEY)


def test_attention_masks_are_cut_by_heads() -> None:
    whole = masks()(1, "attention_probs", (3, 4, 8, 8))
    for tp_rank in range(2):
        slice_of_rank = keyed_mask((3, 2, 8, 8), 0.5, KEY, 1, "attention_probs", tp_rank)
        assert torch.equal(whole[:, 2 * tp_rank : 2 * tp_rank + 2], slice_of_rank.double() / 0.5)


@pytest.mark.parametrize("site", ["embedding", "attention_output", "mlp_output"])
def test_hidden_masks_are_cut_by_the_sequence_only_under_sequence_parallelism(site: str) -> None:
    shared, cut = masks()(0, site, (3, 8, 16)), masks(sp=True)(0, site, (3, 8, 16))
    assert torch.equal(shared, keyed_mask((8, 3, 16), 0.25, KEY, 0, site).transpose(0, 1).double() / 0.75)
    for tp_rank in range(2):
        slice_of_rank = keyed_mask((4, 3, 16), 0.25, KEY, 0, site, tp_rank)
        assert torch.equal(cut[:, 4 * tp_rank : 4 * tp_rank + 4], slice_of_rank.transpose(0, 1).double() / 0.75)


@pytest.mark.parametrize("options", [{}, LLAMA | {"qk_layernorm": True}, UNLIKE], ids=["gpt2", "llama", "unlike"])
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


def asynchronous_plan(**options: Any) -> RunPlan:
    """Return the plan of a pipeline of two ranks, by default with PipeDream-2BW."""
    schedule = {"pipeline_schedule": "pipedream-2bw", "untie_embeddings_and_output_weights": True, "clip_grad": 0.0}
    return resolve(tiny_config(**{"dtype": "fp64", "pp": 2, "global_batch_size": 2} | schedule | options), 2)


@pytest.mark.parametrize(
    ("rule", "error_feedback", "equal_steps"),
    [
        (None, 0.0, [True, True, False]),
        (StreamRule.paci(2), 0.0, [True, True, False]),
        (None, 1.0, [True, False, False]),  # which goes on over the drain
    ],
    ids=["rule of the plan", "paci", "error feedback"],
)
def test_a_stream_is_late_until_it_drains(
    rule: StreamRule | None, error_feedback: float, equal_steps: list[bool]
) -> None:
    """It drains after step 0, so that step 1 is the first of a stream as well."""
    plan = asynchronous_plan(delay_error_feedback=error_feedback)
    weights = whole_weights(plan.specs, drawn_slices(3, torch.float64))
    plain, stream = Oracle(plan.config, weights), StreamOracle(plan, weights, "cpu", rule)
    found = []
    for step, batch in enumerate(random_batches(plan.config, 1, [2] * 3, seed=5)):
        late = stream.step(batch, step, Rates(1e-2 / (1 + step), 0.1), drains=step == 0)
        expected = plain.step(batch, step, Rates(1e-2 / (1 + step), 0.1)).weights
        found.append(all(torch.allclose(late.weights[name], weight, 1e-9) for name, weight in expected.items()))
    assert found == equal_steps


def test_stages_that_update_apart_share_no_weight() -> None:
    plan = asynchronous_plan(pipeline_schedule="1f1b", untie_embeddings_and_output_weights=False)
    with pytest.raises(ValueError, match="stages 0 and 1 both hold embedding"):
        parameter_stages(plan, StreamRule.paci(2))
    assert set(parameter_stages(plan, StreamRule.pipedream_2bw()).values()) == {0, 1}
    with pytest.raises(ValueError, match="1f1b"):
        stream_rule(plan)
    assert stream_rule(asynchronous_plan(pipeline_schedule="pipedream")).version(0, 5, 2) == 4
