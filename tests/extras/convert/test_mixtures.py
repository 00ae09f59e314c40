"""Settings of mixtures and of plain relatives of Llama: what cannot be expressed, and spellings of published files."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from megapipe.config.config import Config, resolve_model
from megapipe.config.layers import layer_configs
from megapipe.config.model import ModelConfig
from megapipe.errors import ConfigError
from megapipe.extras.convert.families import FAMILIES, family_of
from megapipe.extras.convert.megatron_args import MegatronGrid, write_args, write_experts
from tests.extras.convert.models import CASES, SIZES, refused_settings

BY_TYPE = {family.model_type: family for family in FAMILIES.values()}


def read(case: str, **changes: Any) -> ModelConfig:
    """Read the settings of a case with other values; a value of ... removes the key."""
    settings = SIZES | CASES[case].settings | changes
    return BY_TYPE[CASES[case].model_type].read({name: value for name, value in settings.items() if value is not ...})


REFUSED = [(case, *row) for case in CASES for row in refused_settings(case)]


@pytest.mark.parametrize(("case", "changes", "named"), REFUSED, ids=[f"{row[0]} {row[1]}" for row in REFUSED])
def test_what_cannot_be_expressed_is_named(case: str, changes: str, named: str) -> None:
    read(case)
    with pytest.raises(ConfigError) as error:
        read(case, **{key: ... if value == "absent" else value for key, value in json.loads(changes).items()})
    assert all(word in str(error.value) for word in named.split(" & ")), str(error.value)


def test_rotated_channels_are_a_part_of_each_head() -> None:
    model = read("minimax_m2", rope_parameters=..., rotary_dim=6)
    assert model.rotary_percent == 0.5


def test_alpha_of_dynamic_positions_is_a_factor_on_their_base() -> None:
    scaling = {"type": "dynamic", "alpha": 1000.0, "factor": 1.0, "beta_fast": 32, "mscale": 1.0}
    model = read("hunyuan_v1_moe", rope_parameters=..., rope_scaling=scaling, rope_theta=1e4, head_dim=12)
    assert (model.rope_scaling_type, model.rotary_base) == ("none", pytest.approx(1e4 * 1000.0 ** (12 / 10)))


def test_numbers_of_experts_may_be_lists() -> None:
    model = read("hunyuan_v1_moe", num_experts=[6, 6], moe_topk=[3, 3], moe_intermediate_size=[48, 48])
    assert (model.num_experts, model.moe_router_topk) == (6, 3)


@pytest.mark.parametrize("name", ["exaone4", "exaone_moe", "afmoe", "flint"])
def test_layers_without_windows_have_no_positions(name: str) -> None:
    count = int(CASES[name].settings["num_hidden_layers"])
    model = read(name, layer_types=["full_attention"] * count)
    assert (model.position_embedding_type, model.window_size) == ("none", None)
    model = read(name, layer_types=["sliding_attention"] * count)
    assert (model.position_embedding_type, model.window_size, model.no_rope_freq) == ("rope", 5, None)


def test_an_exaone_4_without_windows_has_positions_in_all_layers() -> None:
    model = read("exaone4", sliding_window=None)
    assert (model.position_embedding_type, model.window_size, model.no_rope_freq) == ("rope", None, None)
    assert BY_TYPE["exaone4"].write(model)["sliding_window"] is None


def test_layers_without_positions_are_those_of_a_list_or_every_so_many() -> None:
    published = {"use_sliding_window": False, "sliding_window": None, "max_window_layers": 28}
    listed = read("smollm3", **published, no_rope_layers=[1, 1, 1, 0, 1])
    assert listed == read("smollm3", **published, no_rope_layer_interval=4)
    assert (listed.no_rope_freq, listed.window_size) == ("[0]*3+[1]*1+[0]*1", None)


def test_letters_say_which_layers_have_a_window_and_the_last_one_has_none() -> None:
    model = read("exaone_moe", sliding_window_pattern="LLG")
    assert (model.window_attn_skip_freq, model.no_rope_freq) == ("[1]*2+[0]*1+[1]*1+[0]*1", "[0]*2+[1]*1+[0]*1+[1]*1")


@pytest.mark.parametrize("interleaved", [True, False])
def test_the_order_of_rotary_channels_chooses_the_layout(interleaved: bool) -> None:
    config = {"architectures": ["DeepseekV3ForCausalLM"], "rope_interleave": interleaved}
    assert (family_of(config) is FAMILIES["DeepseekV3ForCausalLM"]) == interleaved


def test_megatron_has_no_biases_of_experts_beside_a_softmax() -> None:
    model = read("ernie4_5_moe")
    with pytest.raises(ConfigError, match="biases of experts beside softmax scores cannot be expressed"):
        write_args(Config(model=model), {}, 61, MegatronGrid(1, 1, 1, 1))


def test_megatron_takes_weights_on_the_inputs_of_one_expert_a_token_alone() -> None:
    layers = layer_configs(resolve_model(dataclasses.replace(read("llama4"), moe_router_topk=1), 1))
    assert write_experts(layers)["moe_apply_probs_on_input"]
    with pytest.raises(ConfigError, match="weights on the inputs of several experts cannot be expressed"):
        write_experts(tuple(dataclasses.replace(layer, moe_router_topk=2) for layer in layers))
