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
    NOPE,
    SCALING,
    assert_equal,
    make_microbatch,
    make_stage,
    model_config,
    reference,
    reference_run,
)

OPTIONS = {
    "gpt2": GPT2,
    "llama": LLAMA,
    "rotary_percent": LLAMA | {"rotary_percent": 0.67},
    "rotary_base_linear": LLAMA | SCALING | {"rope_scaling_type": "linear"},
    "rotary_llama3": LLAMA | SCALING | {"rope_scaling_type": "llama3", "rope_high_freq_factor": 2.5},
    "rotary_yarn": LLAMA | SCALING | {"rope_scaling_type": "yarn", "yarn_beta_fast": 2.0, "yarn_beta_slow": 0.25},
    "rotary_yarn_unrounded": LLAMA
    | SCALING
    | {
        "rope_scaling_type": "yarn",
        "yarn_beta_fast": 2.0,
        "yarn_beta_slow": 0.25,
        "yarn_correction_range_round_to_int": False,
    },
    "rotary_yarn_mscale": LLAMA
    | SCALING
    | {"rope_scaling_type": "yarn", "yarn_mscale": 0.7, "yarn_mscale_all_dim": 0.3},
    "no_positions": GPT2 | {"position_embedding_type": "none"},
    "rmsnorm_zero_centred": GPT2 | {"normalization": "RMSNorm", "layernorm_zero_centered_gamma": True},
    "layernorm_zero_centred": GPT2 | {"layernorm_zero_centered_gamma": True},
    "gelu_erf": GPT2 | {"activation": "gelu"},
    "relu": GPT2 | {"activation": "relu"},
    "squared_relu": GPT2 | {"activation": "squared_relu"},
    "geglu": GPT2 | {"activation": "geglu_tanh"},
    "no_bias": GPT2 | {"add_bias_linear": False},
    "qkv_bias": GPT2 | {"add_bias_linear": False, "add_qkv_bias": True},
    "mqa": LLAMA | {"num_query_groups": 1},
    "qk_norm_llama": LLAMA | {"qk_layernorm": True},
    "qk_norm_gpt2": GPT2 | {"qk_layernorm": True, "num_query_groups": 2},
    "window": LLAMA | {"window_size": 4},
    "window_longer_than_sequence": LLAMA | {"window_size": 100},
    "quick_geglu": GPT2 | {"activation": "quick_geglu"},
    "clamped_quick_geglu": LLAMA
    | {"activation": "quick_geglu", "activation_func_clamp_value": 0.05, "glu_linear_offset": 1.0},
    "clamped_swiglu": LLAMA | {"activation_func_clamp_value": 0.05},
    "offset_geglu": LLAMA | {"activation": "geglu_tanh", "glu_linear_offset": -0.5},
    "sinks": LLAMA | {"softmax_type": "learnable", "window_size": 4},
    "sinks_capped_dropout": GPT2
    | {"softmax_type": "learnable", "attn_logit_softcapping": 2.0, "attention_dropout": 0.2, "num_query_groups": 2},
    "off_by_one": GPT2 | {"softmax_type": "off-by-one"},
    "attention_soft_cap": LLAMA | {"attn_logit_softcapping": 1.5},
    "final_soft_cap": GPT2 | {"final_logit_softcapping": 2.0},
    "softmax_scale": GPT2 | {"softmax_scale": 0.9},
    "softmax_in_fp32": LLAMA | {"attention_softmax_in_fp32": True, "window_size": 5},
    "norms_after": LLAMA | {"norm_position": "after"},
    "norms_around_gpt2": GPT2 | {"norm_position": "around", "hidden_dropout": 0.2},
    "projection_norms": LLAMA | {"qk_layernorm": True, "qk_layernorm_scope": "projection"},
    "norms_of_heads_after_the_rotation": LLAMA | {"qk_layernorm": True, "qk_layernorm_after_rope": True},
    "norms_of_projections_after_the_rotation": LLAMA
    | {"qk_layernorm": True, "qk_layernorm_scope": "projection", "qk_layernorm_after_rope": True},
    "gated": LLAMA | {"attention_output_gate": True},
    "norms_without_weights": LLAMA | {"qk_l2_norm": True, "rotary_percent": 0.67},
    "norms_without_weights_gated": GPT2 | {"qk_l2_norm": True, "attention_output_gate": True},
    "queries_that_grow": GPT2 | NOPE,
    "queries_that_grow_gated_norms": LLAMA | NOPE | {"qk_layernorm": True, "attention_output_gate": True},
    "queries_that_grow_in_some_layers": LLAMA
    | {"nope_query_scale": 0.7, "nope_query_scale_length": 3, "qk_l2_norm": True, "no_rope_freq": "2"}
    | {"num_layers": 4},
    "gated_norms_of_heads": LLAMA | {"attention_output_gate": True, "qk_layernorm": True, "num_query_groups": 4},
    "gated_biases": GPT2 | {"attention_output_gate": True, "num_query_groups": 1},
    "scaled_branches_and_logits": LLAMA | {"residual_scale": 0.3, "logits_scaling": 5.0, "norm_position": "around"},
    "scaled_branches_dropout": GPT2 | {"residual_scale": 0.7, "hidden_dropout": 0.2},
    "embedding_scale": GPT2 | {"embedding_scale": 4.9},
    "untied": GPT2 | {"untie_embeddings_and_output_weights": True},
    "dropout": GPT2 | {"hidden_dropout": 0.2, "attention_dropout": 0.3},
    "dropout_gqa_cap": LLAMA | {"hidden_dropout": 0.2, "attention_dropout": 0.3, "attn_logit_softcapping": 2.0},
}
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
