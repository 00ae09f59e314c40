"""Settings of mixtures and of plain relatives of Llama: what cannot be expressed, and spellings of published files."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from megapipe.config.config import Config, resolve_model
from megapipe.config.layers import layer_configs
from megapipe.config.model import ModelConfig
from megapipe.errors import ConfigError
from megapipe.extras.convert.families import FAMILIES, family_of
from megapipe.extras.convert.megatron_args import MegatronGrid, write_args, write_experts
from tests.extras.convert.models import CASES, SIZES

BY_TYPE = {family.model_type: family for family in FAMILIES.values()}


def read(case: str, **changes: Any) -> ModelConfig:
    """Read the settings of a case with other values; a value of ... removes the key."""
    settings = SIZES | CASES[case].settings | changes
    return BY_TYPE[CASES[case].model_type].read({name: value for name, value in settings.items() if value is not ...})


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "dots1, another scoring function": ("dots1", {"scoring_func": "softmax"}, "scoring_func 'softmax' cannot be expr"),
    "dots1, one normalized weight": ("dots1", {"num_experts_per_tok": 1}, "num_experts_per_tok 1 with norm_topk_prob"),
    "minimax, another scoring function": ("minimax_m2", {"scoring_func": "softmax"}, "scoring_func 'softmax' cannot"),
    "minimax, linear attention": ("minimax_m2", {"attn_type_list": [1, 0]}, "attn_type_list: layers of another type"),
    "minimax, rotated channels": ("minimax_m2", {"rotary_dim": 4}, "partial_rotary_factor .* contradict each other"),
    "minimax, shared experts": ("minimax_m2", {"shared_intermediate_size": 8}, "this architecture has no shared exp"),
    "glm, layer types": (
        "glm4_moe_lite",
        {"mlp_layer_types": ["sparse", "dense", "sparse"], "first_k_dense_replace": 1},
        "mlp_layer_types and first_k_dense_replace 1 contradict each other",
    ),
    "glm, an unknown layer type": ("glm4_moe_lite", {"mlp_layer_types": ["x"] * 3}, "mlp_layer_types 'x' cannot be"),
    "glm, too few layer types": ("glm4_moe_lite", {"mlp_layer_types": ["sparse"]}, "has 1 entries"),
    "ernie, biases": ("ernie4_5_moe", {"use_bias": True}, "use_bias True cannot be expressed: the output layer"),
    "ernie, no experts": ("ernie4_5_moe", {"moe_layer_start_index": 9}, "leave no layer with experts"),
    "ernie, an interval of 0": ("ernie4_5_moe", {"moe_layer_interval": 0}, "moe_layer_interval 0 cannot be expressed"),
    "hunyuan, layers that differ": ("hunyuan_v1_moe", {"num_experts": [4, 6]}, "all layers have the same number here"),
    "hunyuan, several shared experts": ("hunyuan_v1_moe", {"num_shared_expert": [1, 2]}, "all layers have the same"),
    "hunyuan, two shared experts": (
        "hunyuan_v1_moe",
        {"num_shared_expert": [2, 2]},
        "one shared expert in every layer",
    ),
    "hunyuan, shared keys of layers": ("hunyuan_v1_moe", {"use_cla": True}, "use_cla True cannot be expressed"),
    "hunyuan, dynamic positions": (
        "hunyuan_v1_moe",
        {"rope_parameters": ..., "rope_scaling": {"type": "dynamic", "factor": 2.0}},
        "rope_type 'dynamic' cannot be expressed",
    ),
    "mistral, groups": ("mistral4", {"n_group": 4}, "n_group 4 cannot be expressed: groups are scored by shares"),
    "mistral, no factor on queries": (
        "mistral4",
        {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}},
        "the key llama_4_scaling_beta of rope_parameters is missing",
    ),
    "mistral, rotated part": (
        "mistral4",
        {"rope_parameters": CASES["mistral4"].settings["rope_parameters"] | {"partial_rotary_factor": 0.9}},
        "partial_rotary_factor 0.9 and .* contradict each other",
    ),
    "llama 4, windows in other layers": (
        "llama4",
        {"layer_types": ["full_attention"] * 5},
        "no_rope_layers and layer_types cannot be expressed: each of the 5 layers has rotary positions and chunks, or",
    ),
    "llama 4, too few layers": ("llama4", {"no_rope_layers": [1, 0]}, "no_rope_layers and layer_types cannot be"),
    "llama 4, no chunks": ("llama4", {"attention_chunk_size": None}, "--attention-kind chunked needs --window-size"),
    "llama 4, noise": ("llama4", {"router_jitter_noise": 0.1}, "router_jitter_noise 0.1 cannot be expressed"),
    "llama 4, no experts": ("llama4", {"moe_layers": []}, "leave no layer with experts"),
    "exaone, no window": ("exaone_moe", {"sliding_window": None}, "sliding_window null cannot be expressed: it gives"),
    "exaone 4, windows of no width": (
        "exaone4",
        {"sliding_window": None, "layer_types": ["sliding_attention"] * 5},
        "layer_types has sliding_attention, but sliding_window is null",
    ),
    "phi 3, longrope": (
        "phi3",
        {"rope_parameters": ..., "rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}},
        "rope_type 'longrope' cannot be expressed",
    ),
    "phi 3, its name of longrope": (
        "phi3",
        {"rope_parameters": ..., "rope_scaling": {"type": "yarn", "factor": 2.0}},
        "rope_type 'yarn' cannot be expressed",
    ),
    "phi 3, two rates of dropout": ("phi3", {"resid_pdrop": 0.1}, "resid_pdrop 0.1, embd_pdrop 0.0 cannot be expr"),
    "smollm 3, too few layers": ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers has 2 entries"),
    "smollm 3, windows without a use": (
        "smollm3",
        {"use_sliding_window": False, "layer_types": ["sliding_attention"] * 5},
        "layer_types has sliding_attention",
    ),
    "smollm 3, biases of attention alone": ("smollm3", {"attention_bias": True}, "attention_bias True, mlp_bias False"),
    "seed oss, biases of outputs": ("seed_oss", {"attention_out_bias": True}, "attention_out_bias True cannot be expr"),
    "seed oss, biases of the MLP": ("seed_oss", {"mlp_bias": True}, "mlp_bias True cannot be expressed"),
    "afmoe, one normalized weight": ("afmoe", {"num_experts_per_tok": 1}, "num_experts_per_tok 1 with norm_topk_prob"),
    "afmoe, groups": (
        "afmoe",
        {"num_limited_groups": 2},
        "num_limited_groups 2 cannot be expressed: this architecture",
    ),
    "afmoe, another scoring function": ("afmoe", {"score_func": "softmax"}, "score_func 'softmax' cannot be expressed"),
    "mellum, prediction": ("mellum", {"num_mtp_layers": 1}, "num_mtp_layers 1 cannot be expressed: transformers does"),
    "exaone, an unknown pattern": ("exaone_moe", {"sliding_window_pattern": "LXG"}, "sliding_window_pattern 'LXG'"),
    "granite, an unknown key": ("granitemoe", {"value_multiplier": 2.0}, "unknown keys of GraniteMoeForCausalLM"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_expressed_is_named(name: str) -> None:
    case, changes, message = REFUSED[name]
    read(case)
    with pytest.raises(ConfigError, match=message):
        read(case, **changes)


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
