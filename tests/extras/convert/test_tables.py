"""The conversion tables work in both directions.

Names, layouts and settings are bijections for every model that an architecture can express.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
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
    stacked_qkv,
    transposed,
    unpadded,
)
from megapipe.trace.parameters import model_parameters, model_states
from tests.tables import rows, value
from tests.tiny import NOPE


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Layout, tuple[int, ...]]:
    """Draw a layout and the shape of a whole tensor that it can split."""
    groups, queries, head_dim = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 4))
    heads = groups * queries
    model = ModelConfig(num_attention_heads=heads, num_query_groups=groups, kv_channels=head_dim)
    fused = (heads + 2 * groups) * head_dim
    kinds = [(same, 5), (transposed, 3), (gate_and_up, 6), (separate_qkv, fused), (stacked_qkv, fused)]
    kinds += [(fused_qkv, fused)]
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
            "yarn_correction_range_round_to_int": st.booleans(),
            "rope_original_max_position_embeddings": st.integers(8, 64),
        }
    ),
)
GROUPS = {"num_experts": 8, "moe_router_topk": 4, "moe_router_num_groups": 4, "moe_router_group_topk": 2}
SOME = ("Qwen2Moe", "Qwen3Moe")  # experts in any layers
WINDOWED = (
    "Dots1",
    "Ministral",
    "Qwen2",
    "Qwen3ForCausalLM",
    "Gemma2",
    "Gemma3",
    "Mellum",
    "Olmo3",
    "GptOss",
)  # in any layers
ROTATED = ("Gemma3", "Mellum", "Olmo3")  # with other rotary positions in layers with a window
LAYERS = {  # patterns of three layers
    "SmolLM3ForCausalLM": [
        (),
        ("1 position_embedding_type=none window_size=5", "2 window_size=5"),
        ("2", "1 position_embedding_type=none"),
        ("3 position_embedding_type=none",),
    ],
    "GraniteMoeSWAForCausalLM": [
        (),
        ("1 window_size=5", "1 position_embedding_type=none", "1 rotary_base=77"),
        ("1 window_size=5", "..."),
    ],
}


def expressed() -> dict[str, dict[str, list[Any]]]:
    """Return the values of each option of the models that an architecture can express, as expressed.tsv has them."""
    found: dict[str, dict[str, list[Any]]] = {}
    for name, words in rows(Path(__file__).with_name("expressed.tsv")):
        options: dict[str, list[Any]] = {}
        for word in words.split():
            key, _, values = word.partition("=")
            options |= {key: values_of(values)} if values else found[key]
        found[name] = options
    return {name: found[name] | ({"layer_pattern": LAYERS[name]} if name in LAYERS else {}) for name in FAMILIES}


def values_of(text: str) -> list[Any]:
    first, is_range, last = text.partition("..")
    return list(range(int(first), int(last) + 1)) if is_range else [value(part) for part in text.split("|")]


EXPRESSED = expressed()


@st.composite
def windowed(draw: st.DrawFn, num_layers: int, own_rope: bool) -> dict[str, Any]:
    """Draw windows in any layers, in any of the ways to write them."""
    marks = draw(st.lists(st.booleans(), min_size=num_layers, max_size=num_layers))
    ways = ["list", "runs"] if any(marks) else ["no window"]
    way = "runs" if own_rope and any(marks) else draw(st.sampled_from(ways))
    rope = draw(st.sampled_from(["", " rotary_base=77", " rope_scaling_type=linear rope_scaling_factor=3"]))
    words = {True: f"window_size=5{rope if own_rope else ''}", False: ""}
    return {
        "no window": {},
        "list": {"window_size": 5, "window_attn_skip_freq": str([int(mark) for mark in marks])},
        "runs": {"layer_pattern": tuple(f"1 {words[mark]}".strip() for mark in marks)},
    }[way]


@st.composite
def experts(draw: st.DrawFn, num_layers: int, best: int) -> dict[str, Any]:
    """Draw layers with experts, their widths and groups. best: experts of a group that its score is the sum of."""
    dense, width, shared = draw(st.integers(0, num_layers - 1)), draw(st.integers(1, 8)), draw(st.integers(1, 3))
    groups = {"moe_router_num_groups": 4, "moe_router_group_topk": 2, "moe_router_topk": 2 * best}
    sizes = {"moe_ffn_hidden_size": width, "moe_shared_expert_intermediate_size": shared * width}
    frequency = {"moe_layer_freq": f"[0]*{dense}+[1]*{num_layers - dense}"} if dense else {}
    return sizes | frequency | draw(st.sampled_from([groups, {"moe_router_topk": 3}]))


@st.composite
def models(draw: st.DrawFn, architecture: str) -> ModelConfig:
    fields = {name: draw(st.sampled_from(values)) for name, values in EXPRESSED[architecture].items()}
    if fields.get("position_embedding_type") == "rope":
        is_scaled = architecture != "Phi3ForCausalLM" and "yarn_query_scale" not in fields
        fields |= draw(SCALED if is_scaled else st.just({}))
    if architecture.startswith(WINDOWED):
        fields |= draw(windowed(fields["num_layers"], architecture.startswith(ROTATED)))
    if architecture.startswith(SOME):
        marks = draw(st.lists(st.integers(0, 1), min_size=fields["num_layers"], max_size=fields["num_layers"]))
        fields |= {"moe_layer_freq": str(marks) if any(marks) else draw(st.sampled_from([None, "2"]))}
    if architecture.startswith("Glm4MoeFor"):
        dense = draw(st.integers(0, fields["num_layers"] - 1))
        fields |= {"moe_layer_freq": f"[0]*{dense}+[1]*{fields['num_layers'] - dense}"}
        fields |= draw(st.sampled_from([{}, GROUPS, GROUPS | {"moe_router_num_groups": 3, "num_experts": 9}]))
    if architecture.startswith(("Deepseek", "Glm4MoeLite")):
        fields |= draw(experts(fields["num_layers"], 1 if architecture == "DeepseekV2ForCausalLM" else 2))
    if architecture == "Llama4ForCausalLM":
        local = {"window_size": 5, "attention_kind": "chunked", "qk_l2_norm": draw(st.booleans())}
        words = f"window_size=5 attention_kind=chunked position_embedding_type=rope qk_l2_norm={local['qk_l2_norm']}"
        nope: dict[str, Any] = draw(st.sampled_from([NOPE, {"position_embedding_type": "none"}]))
        mixed = nope | {"layer_pattern": (f"1 {words}", "1", "...")}
        fields |= draw(st.sampled_from([local, nope | {"rope_scaling_type": "none"}, mixed]))
    if "window_attn_skip_freq" in fields and architecture.startswith(("Afmoe", "Exaone", "Flint")):
        full = {"3": "[0,0,1]", "[0]*1+[1]*1+[0]*1": "[1,0,1]"}
        fields |= {"no_rope_freq": full[fields["window_attn_skip_freq"]]}
        if architecture == "Exaone4ForCausalLM" and draw(st.booleans()):  # rotary positions in all layers
            fields |= dict.fromkeys(("window_size", "window_attn_skip_freq", "no_rope_freq"))
    if architecture.startswith("Gemma") or (architecture.startswith("Afmoe") and draw(st.booleans())):
        fields |= {"embedding_scale": fields["hidden_size"] ** 0.5}
    return ModelConfig(**fields)


def computed(model: ModelConfig) -> list[dict[str, Any]]:
    """Return what each layer of a model computes with."""
    return [
        {name: getattr(layer, name) for name in vars(model) if name not in NOT_THE_MODEL} for layer in meaning(model)
    ]


@pytest.mark.parametrize("architecture", FAMILIES)
@settings(max_examples=60)
@given(data=st.data())
def test_every_model_comes_back_from_its_settings_and_they_from_it(architecture: str, data: st.DataObject) -> None:
    family, model = FAMILIES[architecture], data.draw(models(architecture))
    theirs = family.write(model)
    read = family.read(theirs)
    assert computed(read) == computed(model)
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
    specs = (*model_parameters(model, sequence_parallel=False), *model_states(model))
    assert [entry.spec.name for entry in placed] == [spec.name for spec in specs]
    theirs = [name for entry in placed for name in entry.theirs]
    assert len(set(theirs)) == len(theirs)
    for entry in placed:
        assert len(entry.layout.shapes(entry.spec.shape)) == len(entry.theirs)


def test_the_layout_of_a_tensor_is_that_of_its_own_layer() -> None:
    pattern = ("1", "1 num_query_groups=1", "1 num_query_groups=4")
    sizes = LLAMA | {"num_layers": 3, "hidden_size": 16, "num_attention_heads": 4, "num_query_groups": 2}
    model = unpadded(ModelConfig(**sizes, layer_pattern=pattern))
    mapped = map_tensors(FAMILIES["LlamaForCausalLM"].rows, model, "LlamaForCausalLM")
    shapes = [entry.layout.shapes(entry.spec.shape) for entry in mapped if "linear_qkv" in entry.spec.name]
    assert [[rows for rows, _ in parts] for parts in shapes] == [[16, 8, 8], [16, 4, 4], [16, 16, 16]]


@pytest.mark.parametrize("architecture", FAMILIES)
def test_each_row_and_each_key_occurs_once(architecture: str) -> None:
    family = FAMILIES[architecture]
    ours, theirs = [row.ours for row in family.rows], [name for row in family.rows for name in row.theirs]
    assert len(set(ours)) == len(ours) and len(set(theirs)) == len(theirs)
    keys = [key for rule in family.rules for key in rule.keys]
    assert len(set(keys)) == len(keys)
    assert not set(keys) & INERT
    assert architecture not in REFUSED


LLAMA: dict[str, Any] = {
    "vocab_size": 50,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "activation": "swiglu",
    "add_bias_linear": False,
}
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
    "norms_after": {"norm_position": "after"},
    "embedding_scale": {"embedding_scale": 8.0},
}


@pytest.mark.parametrize("change", UNEXPRESSED.values(), ids=UNEXPRESSED.keys())
def test_what_llama_cannot_express_is_named(change: dict[str, Any]) -> None:
    llama = ModelConfig(**LLAMA)
    assert choose_family(llama, None)[0].architecture == "LlamaForCausalLM"
    with pytest.raises(ConfigError, match=rf"LlamaForCausalLM cannot express model\.{next(iter(change))}"):
        choose_family(dataclasses.replace(llama, **change), "LlamaForCausalLM")


def test_by_default_the_first_architecture_that_fits_is_taken_or_all_reasons_are_given() -> None:
    fits = ModelConfig(**LLAMA, window_size=9)
    assert choose_family(fits, None)[0].architecture == "MistralForCausalLM"
    both = dataclasses.replace(fits, window_size=None)
    assert choose_family(both, None, "MistralForCausalLM")[0].architecture == "MistralForCausalLM"
    with pytest.raises(ConfigError) as error:
        choose_family(dataclasses.replace(fits, attn_logit_softcapping=30.0, softmax_scale=2.0), None)
    assert all(name in str(error.value) for name in FAMILIES)


LAYERS_OF_ONE_MODEL: list[dict[str, Any]] = [
    {"window_size": 5, "window_attn_skip_freq": "3"},
    {"window_size": 5, "window_attn_skip_freq": "([1]*2+[0])*2"},
    {"layer_pattern": ("2 window_size=5", "1", "...")},
    {"layer_pattern": ("2 window_size=5", "1", "1 window_size=5", "1 window_size=5", "1 rotary_base=10000")},
]


@pytest.mark.parametrize("architecture", ["MinistralForCausalLM", "Gemma3ForCausalLM"])
def test_every_way_to_write_the_same_layers_has_the_same_settings(architecture: str) -> None:
    other = {} if architecture.startswith("Mini") else {
        "activation": "geglu_tanh", "layernorm_zero_centered_gamma": True, "norm_position": "around",
        "qk_layernorm": True, "embedding_scale": 128**0.5, "untie_embeddings_and_output_weights": False,
    }  # fmt: skip
    common = LLAMA | {"num_layers": 6} | other
    written = [FAMILIES[architecture].write(ModelConfig(**common | layers)) for layers in LAYERS_OF_ONE_MODEL]
    assert written[0]["layer_types"][1:3] == ["sliding_attention", "full_attention"]
    assert all(settings == written[0] for settings in written)


LAYER_TYPES = rows(Path(__file__).with_name("layer_types.tsv"))


@pytest.mark.parametrize(
    ("architecture", "settings", "ours"), [pytest.param(*row[1:], id=row[0]) for row in LAYER_TYPES]
)
def test_layer_types_are_read_as_the_shortest_of_our_options(architecture: str, settings: str, ours: str) -> None:
    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
    model = FAMILIES[architecture].read(sizes | json.loads(settings))
    expected = value(ours)
    assert {name: getattr(model, name) for name in expected} == expected
