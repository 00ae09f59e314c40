"""The whole model in one stage against the reference in fp64: loss and every gradient, option by option."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from megapipe.config.config import ResolvedModelConfig
from megapipe.config.training import TrainingConfig
from megapipe.extras.reference.gpt import ReferenceGPT
from megapipe.tensor_parallel.random import DropoutKey
from tests.model.grids import (
    GPT2,
    LLAMA,
    SETS,
    assert_equal,
    make_microbatch,
    make_stage,
    model_config,
    options_of,
    reference,
    reference_run,
)

OPTIONS = options_of("parity", SETS)
WHOLE, NO_ROPE = {"window_size": None}, {"position_embedding_type": "none"}
LOCAL = {"window_size": 4, "rotary_base": 50.0}
# options -> what each of five layers has in their place, written by hand
STACKS: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "every_second_layer_without_window": (
        {"window_size": 4, "window_attn_skip_freq": "2"},
        [{}, WHOLE, {}, WHOLE, {}],
    ),
    "window_by_list": ({"window_size": 4, "window_attn_skip_freq": "[0]+([1]*2)*2"}, [WHOLE, {}, {}, {}, {}]),
    "every_fifth_layer_without_rotation": ({"no_rope_freq": "5"}, [{}, {}, {}, {}, NO_ROPE]),
    "rotation_by_list": ({"no_rope_freq": "[1]*2+[0]*3"}, [NO_ROPE, NO_ROPE, {}, {}, {}]),
    "windows_and_rotary_bases": (
        {"layer_pattern": ("2 window_size=4 rotary_base=50", "1 rope_scaling_type=linear rotary-percent=0.67", "...")},
        [LOCAL, LOCAL, {"rope_scaling_type": "linear", "rotary_percent": 0.67}, LOCAL, LOCAL],
    ),
    "attention_options": (
        {
            "window_size": 4,
            "qk_layernorm": True,
            "layer_pattern": (
                "1 attn_logit_softcapping=1.5 window_size=none",
                "2 softmax_scale=0.9 num_query_groups=4",
                "1 qk_layernorm_scope=projection num_query_groups=1",
                "1 qk_layernorm=false",
            ),
        },
        [
            {"attn_logit_softcapping": 1.5, "window_size": None},
            {"softmax_scale": 0.9, "num_query_groups": 4},
            {"softmax_scale": 0.9, "num_query_groups": 4},
            {"qk_layernorm_scope": "projection", "num_query_groups": 1},
            {"qk_layernorm": False},
        ],
    ),
    "missing_parts": (
        {"layer_pattern": ("1", "1 attention=none ffn_hidden_size=8", "1 mlp=none norm_position=around", "2 mlp=none")},
        [
            {},
            {"has_attention": False, "ffn_hidden_size": 8},
            {"has_mlp": False, "norm_position": "around"},
            {"has_mlp": False},
            {"has_mlp": False},
        ],
    ),
    "widths_and_norms": (
        {
            "layer_pattern": (
                "1 activation=squared_relu ffn_hidden_size=36 norm_position=after",
                "1 activation=relu",
                "...",
            )
        },
        [{"activation": "squared_relu", "ffn_hidden_size": 36, "norm_position": "after"}, {"activation": "relu"}] * 2
        + [{"activation": "squared_relu", "ffn_hidden_size": 36, "norm_position": "after"}],
    ),
    "frequencies_and_a_pattern": (
        {"window_size": 4, "window_attn_skip_freq": "3", "no_rope_freq": "5", "layer_pattern": ("1 mlp=none", "4")},
        [{"has_mlp": False}, {}, WHOLE, {}, NO_ROPE],
    ),
}
WITH_DOCUMENTS = ["gpt2", "llama", "window", "qk_norm_llama", "dropout_gqa_cap"]
KEY = DropoutKey(seed=11, step=2, microbatch=7)


@pytest.mark.parametrize(
    ("name", "documents"),
    [pytest.param(name, False, id=name) for name in OPTIONS]
    + [pytest.param(name, True, id=f"{name}-documents") for name in WITH_DOCUMENTS],
)
def test_loss_and_gradients_equal_the_reference(name: str, documents: bool) -> None:
    config = model_config(**OPTIONS[name])
    assert_equals_reference(config, reference(config), documents)


@pytest.mark.parametrize("name", STACKS)
def test_layers_that_differ_equal_the_reference_with_a_list_by_hand(name: str) -> None:
    options, layers = STACKS[name]
    config = model_config(**LLAMA | options, num_layers=5)
    assert_equals_reference(config, reference(config, layers=layers), documents="windows" in name)


def assert_equals_reference(config: ResolvedModelConfig, model: ReferenceGPT, documents: bool) -> None:
    microbatch = make_microbatch(config, documents=documents, dropout_key=KEY)
    expected = reference_run(model, microbatch)
    stage = make_stage(config, dict(model.named_parameters()))
    loss = stage(microbatch)
    loss.loss_sum.backward()
    assert_equal(loss.loss_sum, expected.loss_sum, "loss")
    assert loss.num_tokens == expected.num_tokens
    grads = {name: parameter.grad for name, parameter in stage.named_parameters()}
    assert grads.keys() == expected.grads.keys()
    for name, grad in grads.items():
        assert_equal(grad, expected.grads[name], name)


@pytest.mark.parametrize("name", ["gpt2", "llama", "dropout"])
def test_label_smoothing_and_z_loss_enter_the_loss(name: str) -> None:
    config = model_config(**OPTIONS[name])
    loss_config = TrainingConfig(label_smoothing=0.1, z_loss=0.01)
    model = reference(config, loss=loss_config)
    microbatch = make_microbatch(config, dropout_key=KEY)
    expected = reference_run(model, microbatch)
    stage = make_stage(config, dict(model.named_parameters()), loss=loss_config)
    loss = stage(microbatch)
    loss.loss_sum.backward()
    assert_equal(loss.loss_sum, expected.loss_sum, "loss")
    for name, parameter in stage.named_parameters():
        assert_equal(parameter.grad, expected.grads[name], name)


def test_without_a_dropout_key_dropout_is_off() -> None:
    config = model_config(**OPTIONS["dropout"])
    model = reference(config)
    microbatch = make_microbatch(config)
    stage = make_stage(config, dict(model.named_parameters()))
    assert_equal(stage(microbatch).loss_sum, reference_run(model, microbatch).loss_sum, "loss")


def test_missing_loss_mask_counts_every_token() -> None:
    config = model_config(**GPT2)
    model = reference(config)
    microbatch = make_microbatch(config)
    stage = make_stage(config, dict(model.named_parameters()))
    everywhere = torch.ones_like(microbatch.loss_mask)
    with_mask = stage(dataclasses.replace(microbatch, loss_mask=everywhere))
    without = stage(dataclasses.replace(microbatch, loss_mask=None))
    assert with_mask.loss_sum == without.loss_sum
    assert with_mask.num_tokens == without.num_tokens == everywhere.sum()
