"""The conversion tables work in both directions.

Names, layouts and settings are bijections for every model that an architecture can express.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

from megapipe.config.model import ModelConfig
from megapipe.errors import ConfigError
from megapipe.extras.convert.families import FAMILIES, REFUSED, choose_family, family_of
from megapipe.extras.convert.snapshot import INERT
from megapipe.extras.convert.tables import (
    NOT_THE_MODEL,
    Layout,
    fused_qkv,
    gate_and_up,
    map_tensors,
    meaning,
    same,
    separate_qkv,
    transposed,
    unpadded,
)
from megapipe.layers.model import model_parameters


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Layout, tuple[int, ...]]:
    """Draw a layout and the shape of a whole tensor that it can split."""
    groups, queries, head_dim = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 4))
    heads = groups * queries
    model = ModelConfig(num_attention_heads=heads, num_query_groups=groups, kv_channels=head_dim)
    fused = (heads + 2 * groups) * head_dim
    kinds = [(same, 5), (transposed, 3), (gate_and_up, 6), (separate_qkv, fused), (fused_qkv, fused)]
    layout, rows = draw(st.sampled_from(kinds))
    return layout(model), draw(st.sampled_from([(rows,), (rows, 4)]))


@settings(max_examples=150)
@given(layouts())
def test_layouts_are_bijections_of_the_announced_shapes(case: tuple[Layout, tuple[int, ...]]) -> None:
    layout, shape = case
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    parts = layout.split(whole)
    assert tuple(tuple(part.shape) for part in parts) == layout.shapes(shape)
    assert sorted(value for part in parts for value in part.flatten().tolist()) == whole.flatten().tolist()
    assert torch.equal(layout.join(parts), whole)
    assert all(torch.equal(again, part) for again, part in zip(layout.split(layout.join(parts)), parts, strict=True))


COMMON = {"num_layers": st.integers(1, 3), "hidden_size": st.sampled_from([16, 32]), "vocab_size": st.integers(1, 300)}
ROPE = {"position_embedding_type": st.just("rope"), "rotary_base": st.sampled_from([1e4, 5e5])}
SCALED = st.one_of(
    st.just({}),
    st.fixed_dictionaries({"rope_scaling_type": st.just("linear"), "rope_scaling_factor": st.floats(1, 8)}),
    st.fixed_dictionaries(
        {
            "rope_scaling_type": st.just("llama3"),
            "rope_scaling_factor": st.floats(1, 8),
            "rope_low_freq_factor": st.floats(0.5, 1.5),
            "rope_high_freq_factor": st.floats(2, 4),
            "rope_original_max_position_embeddings": st.integers(8, 64),
        }
    ),
    st.fixed_dictionaries(
        {
            "rope_scaling_type": st.just("yarn"),
            "rope_scaling_factor": st.floats(1, 8),
            "yarn_beta_fast": st.floats(16, 32),
            "yarn_beta_slow": st.floats(0.5, 2),
            "yarn_mscale": st.just(0.7),
            "yarn_mscale_all_dim": st.just(0.4),
            "rope_original_max_position_embeddings": st.integers(8, 64),
        }
    ),
)
SIZES = COMMON | {
    "num_attention_heads": st.just(4),
    "num_query_groups": st.sampled_from([1, 2, 4]),
    "ffn_hidden_size": st.integers(1, 40),
    "norm_epsilon": st.sampled_from([1e-5, 1e-6]),
    "max_position_embeddings": st.integers(128, 256),
    "untie_embeddings_and_output_weights": st.booleans(),
    "attention_dropout": st.sampled_from([0.0, 0.1]),
    "init_method_std": st.sampled_from([0.01, 0.02]),
}
LLAMA_LIKE = SIZES | ROPE | {
    "normalization": st.just("RMSNorm"), "activation": st.sampled_from(["swiglu", "geglu_tanh"]),
    "hidden_dropout": st.just(0.0),
}  # fmt: skip
WIDE = {"kv_channels": st.sampled_from([4, 8])}
WINDOW = {"window_size": st.sampled_from([None, 5])}
EXPRESSED: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": LLAMA_LIKE | WIDE | {"add_bias_linear": st.booleans()},
    "MistralForCausalLM": LLAMA_LIKE | WIDE | WINDOW | {"add_bias_linear": st.just(False)},
    "Qwen2ForCausalLM": LLAMA_LIKE | WINDOW | {"add_bias_linear": st.just(False), "add_qkv_bias": st.just(True)},
    "Qwen3ForCausalLM": LLAMA_LIKE | WIDE | WINDOW | {"add_bias_linear": st.just(False), "qk_layernorm": st.just(True)},
    "GPT2LMHeadModel": SIZES
    | {
        "num_query_groups": st.just(4),
        "activation": st.sampled_from(["gelu", "gelu_tanh", "relu", "squared_relu"]),
        "hidden_dropout": st.sampled_from([0.0, 0.1]),
    },
}


@st.composite
def models(draw: st.DrawFn, architecture: str) -> ModelConfig:
    fields = draw(st.fixed_dictionaries(EXPRESSED[architecture]))
    if fields.get("position_embedding_type") == "rope":
        fields |= draw(SCALED)
    return ModelConfig(**fields)


@pytest.mark.parametrize("architecture", FAMILIES)
@settings(max_examples=60)
@given(data=st.data())
def test_every_model_comes_back_from_its_settings_and_they_from_it(architecture: str, data: st.DataObject) -> None:
    family, model = FAMILIES[architecture], data.draw(models(architecture))
    theirs = family.write(model)
    read = family.read(theirs)
    assert {name: getattr(meaning(read), name) for name in vars(model) if name not in NOT_THE_MODEL} == {
        name: getattr(meaning(model), name) for name in vars(model) if name not in NOT_THE_MODEL
    }
    trained = ("hidden_dropout", "attention_dropout", "init_method_std")
    assert [getattr(read, name) for name in trained] == [getattr(model, name) for name in trained]
    assert family.write(read) == theirs
    assert family_of(theirs) is family


@pytest.mark.parametrize("architecture", FAMILIES)
@settings(max_examples=30)
@given(data=st.data())
def test_every_parameter_has_names_of_its_own(architecture: str, data: st.DataObject) -> None:
    model = unpadded(data.draw(models(architecture)))
    placed = map_tensors(FAMILIES[architecture].rows, model, architecture)
    assert [entry.spec.name for entry in placed] == [
        spec.name for spec in model_parameters(model, sequence_parallel=False)
    ]
    theirs = [name for entry in placed for name in entry.theirs]
    assert len(set(theirs)) == len(theirs)
    for entry in placed:
        assert len(entry.layout.shapes(entry.spec.shape)) == len(entry.theirs)


@pytest.mark.parametrize("architecture", FAMILIES)
def test_each_row_and_each_key_occurs_once(architecture: str) -> None:
    family = FAMILIES[architecture]
    ours, theirs = [row.ours for row in family.rows], [name for row in family.rows for name in row.theirs]
    assert len(set(ours)) == len(ours) and len(set(theirs)) == len(theirs)
    keys = [key for rule in family.rules for key in rule.keys]
    assert len(set(keys)) == len(keys)
    assert not set(keys) & INERT
    assert architecture not in REFUSED


UNEXPRESSED = {
    "soft_cap": {"final_logit_softcapping": 30.0},
    "attention_soft_cap": {"attn_logit_softcapping": 50.0},
    "zero_centred_norms": {"layernorm_zero_centered_gamma": True},
    "scale": {"softmax_scale": 0.3},
    "erf_gelu": {"activation": "gelu"},
    "no_positions": {"position_embedding_type": "none"},
    "part_of_a_head_rotated": {"rotary_percent": 0.5},
    "layer_norm": {"normalization": "LayerNorm"},
    "window": {"window_size": 9},
    "qk_norm": {"qk_layernorm": True},
}


@pytest.mark.parametrize("change", UNEXPRESSED.values(), ids=UNEXPRESSED.keys())
def test_what_llama_cannot_express_is_named(change: dict[str, Any]) -> None:
    llama = ModelConfig(
        vocab_size=50,
        position_embedding_type="rope",
        normalization="RMSNorm",
        activation="swiglu",
        add_bias_linear=False,
    )
    assert choose_family(llama, None)[0].architecture == "LlamaForCausalLM"
    with pytest.raises(ConfigError, match=rf"LlamaForCausalLM cannot express model\.{next(iter(change))}"):
        choose_family(dataclasses.replace(llama, **change), "LlamaForCausalLM")


def test_by_default_the_first_architecture_that_fits_is_taken_or_all_reasons_are_given() -> None:
    fits = ModelConfig(
        vocab_size=50,
        position_embedding_type="rope",
        normalization="RMSNorm",
        activation="swiglu",
        add_bias_linear=False,
        window_size=9,
    )
    assert choose_family(fits, None)[0].architecture == "MistralForCausalLM"
    both = dataclasses.replace(fits, window_size=None)
    assert choose_family(both, None, "MistralForCausalLM")[0].architecture == "MistralForCausalLM"
    with pytest.raises(ConfigError) as error:
        choose_family(dataclasses.replace(fits, attn_logit_softcapping=30.0), None)
    assert all(name in str(error.value) for name in FAMILIES)
