"""Layers that differ: patterns mean what Megatron means by them, and mistakes in them are named."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from megapipe.config.layer_pattern import expanded, marked_layers
from megapipe.config.layers import LAYER_OPTIONS, layer_configs, layer_kinds
from megapipe.config.load import from_yaml, load_config
from megapipe.config.model import ModelConfig
from megapipe.config.yaml_file import to_yaml
from megapipe.errors import ConfigError
from tests.config.examples import job

MODEL = ModelConfig(num_layers=6, position_embedding_type="rope", window_size=8)


@pytest.mark.parametrize(
    ("text", "num_layers", "mark", "layers"),
    [
        # megatron/core/transformer/utils.py, is_layer_window_attention: layer_number % N != 0, counted from 1
        ("1", 4, 0, [0, 1, 2, 3]),
        ("2", 5, 0, [1, 3]),
        ("6", 8, 0, [5]),
        ("9", 8, 0, []),
        ("([1]*3+[0])*2", 8, 0, [3, 7]),
        ("[0]+[1]*2", 3, 0, [0]),
        # transformer_config.py: ([0] * (N - 1) + [1]) * (layers / N)
        ("1", 3, 1, [0, 1, 2]),
        ("4", 8, 1, [3, 7]),
        ("([0]*3+[1]*1)*2", 8, 1, [3, 7]),
        ("[0, 1, 1, 0]", 4, 1, [1, 2]),
        ("2*[1,0]", 4, 1, [0, 2]),
    ],
)
def test_a_frequency_or_list_names_megatrons_layers(text: str, num_layers: int, mark: int, layers: list[int]) -> None:
    assert marked_layers("--flag", text, num_layers, mark) == layers


def test_frequencies_take_the_window_or_the_rotary_positions_of_those_layers() -> None:
    layers = layer_configs(replace(MODEL, window_attn_skip_freq="3", no_rope_freq="[1]+[0]*5"))
    assert [layer.window_size for layer in layers] == [8, 8, None, 8, 8, None]
    assert [layer.position_embedding_type for layer in layers] == ["none", *["rope"] * 5]
    assert [layer.rotary is None for layer in layers] == [True, *[False] * 5]


@pytest.mark.parametrize(
    ("words", "windows"),
    [
        (["5 window_size=4", "1"], [4, 4, 4, 4, 4, 8]),
        (["2 window-size=4", "1 window_size=none", "..."], [4, 4, None, 4, 4, None]),
        (["1 window_size=4", "count=2", "..."], [4, 8, 8, 4, 8, 8]),
        (["4 window_size=3,0", "1", "..."], [4, 4, 4, 4, 8, 4]),
        (["9 window_size=4", "..."], [4] * 6),
        ([], [8] * 6),
    ],
    ids=lambda value: " ".join(map(str, value)),
)
def test_runs_of_a_pattern_are_expanded_in_order(words: list[str], windows: list[int | None]) -> None:
    layers = layer_configs(replace(MODEL, layer_pattern=tuple(words)))
    assert [layer.window_size for layer in layers] == windows


def test_alike_layers_are_one_object_and_others_are_not() -> None:
    layers = layer_configs(replace(MODEL, layer_pattern=("1 rotary_base=5", "1 rotary_base=5e0", "1", "...")))
    assert len({id(layer) for layer in layers}) == 2
    assert layers[0] is layers[1] is layers[3] and layers[2] is layers[5]
    kinds = layer_kinds(replace(MODEL, layer_pattern=("2 attention=none", "1 mlp=none", "...")))
    assert [(kind.has_attention, kind.has_mlp, numbers) for kind, numbers in kinds.items()] == [
        (False, True, [0, 1, 3, 4]),
        (True, False, [2, 5]),
    ]


def test_every_option_of_a_layer_is_an_option_of_the_model() -> None:
    assert set(LAYER_OPTIONS) <= set(vars(MODEL))


BLOCK = {"n_heads_in_group": 4, "no_op": False, "replace_with_linear": False}
WIDTH = {"ffn_mult": 2.625, "no_op": False}


def block_file(folder: Path, *blocks: object) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps({"hidden_size": 64, "block_configs": blocks}))
    return str(path)


def test_a_file_of_block_configurations_is_a_pattern(tmp_path: Path) -> None:
    """The widths are those of Megatron's heterogeneous_config.py: int(2 m h / 3), rounded up to a multiple of 256."""
    none = {"n_heads_in_group": None, "no_op": True, "window_length": None}
    file = block_file(
        tmp_path,
        {"attention": BLOCK, "ffn": WIDTH},
        {"attention": none, "ffn": {"ffn_mult": 6.5}},
        {"attention": {"num_query_groups": 8, "n_heads_in_group": 4}, "mlp": {"no_op": True, "ffn_mult": None}},
        {"attention": {"num_query_groups": None}, "mlp": {"ffn_hidden_size": 40}},
    )
    flags = ["--heterogeneous-layers-config-path", file]
    config = load_config([*job("--group-query-attention --num-query-groups 4"), *flags]).config
    layers = layer_configs(config.model)
    assert [(layer.has_attention, layer.num_query_groups) for layer in layers] == [
        (True, 2),
        (False, 4),
        (True, 8),
        (True, 4),
    ]
    assert [(layer.has_mlp, layer.ffn_hidden_size) for layer in layers] == [
        (True, 256),
        (True, 512),
        (False, None),
        (True, 40),
    ]
    assert from_yaml(to_yaml(config)) == config, "a saved configuration does not need the file"
    yaml = tmp_path / "c.yaml"
    yaml.write_text(f"heterogeneous_layers_config_path: {file}\n")
    assert load_config([*job("--group-query-attention --num-query-groups 4"), "--config", str(yaml)]).config == config


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        (None, "cannot be read: No such file"),
        ("{", "expected a JSON object with the list block_configs"),
        ("[]", "expected a JSON object with the list block_configs"),
        ('{"block_configs": 3}', "expected a JSON object with the list block_configs"),
        ([3], "block 0 lacks the object attention, ffn or mlp"),
        ([{"attention": BLOCK}], "block 0 lacks the object attention, ffn or mlp"),
        ([{"attention": BLOCK, "ffn": 3}], "block 0 lacks the object attention, ffn or mlp"),
        ([{"attention": {"replace_with_linear": True}, "ffn": WIDTH}], "block 0: replace_with_linear of its attention"),
        ([{"attention": BLOCK | {"window_length": 4}, "ffn": WIDTH}], "block 0: window_length of its attention is not"),
        ([{"attention": BLOCK, "ffn": WIDTH}] * 3, "describes 3 layers, --num-layers is 4"),
        ([{"attention": BLOCK | {"no_op": True}, "ffn": WIDTH}] * 4, "sets n_heads_in_group in a layer without atten"),
    ],
    ids=[
        "missing", "no_json", "list", "number", "block", "no_mlp", "mlp", "linear", "window", "three", "no_op",
    ],
)  # fmt: skip
def test_a_bad_file_of_block_configurations_is_one_message(tmp_path: Path, blocks: object, message: str) -> None:
    file = str(tmp_path / "config.json")
    if isinstance(blocks, str):
        Path(file).write_text(blocks)
    elif blocks is not None:
        file = block_file(tmp_path, *blocks)  # type: ignore[misc]
    with pytest.raises(ConfigError, match=message) as error:
        load_config([*job(), "--heterogeneous-layers-config-path", file])
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("layer_pattern:\n- {count: 3, window_size: 4}\n- 1", ["3 window_size=4", "1"]),
        (
            "layer_pattern:\n- {window-size: '3, 0', rotary_base: 1e4}\n- ...",
            ["1 window_size=4 rotary_base=10000", "..."],
        ),
        ("layer_pattern:\n- attention: null\n- mlp: none\n- ...", ["1 attention=none", "1 mlp=none", "..."]),
        ("layer_pattern: [3 window_size=4, '1']", ["3 window_size=4", "1"]),
    ],
    ids=["runs", "values", "parts", "words"],
)
def test_yaml_has_runs_as_mappings_or_as_words(text: str, same: list[str]) -> None:
    config = from_yaml(f"num_layers: 4\nposition_embedding_type: rope\n{text}")
    assert layer_configs(replace(config.model, layer_pattern=tuple(same))) == tuple(
        replace(layer, layer_pattern=tuple(same)) for layer in layer_configs(config.model)
    )
    assert from_yaml(to_yaml(config)) == config


def test_yaml_has_frequencies_as_numbers_or_lists() -> None:
    config = from_yaml("num_layers: 4\nwindow_size: 8\nwindow_attn_skip_freq: [1, 0, 1, 0]\nno_rope_freq: 2")
    assert [layer.window_size for layer in layer_configs(config.model)] == [8, None, 8, None]
    assert [layer.position_embedding_type for layer in layer_configs(config.model)][1::2] == ["none"] * 2
    assert from_yaml(to_yaml(config)) == config


def test_a_mapping_with_a_list_or_a_key_twice_is_refused() -> None:
    for text, message in (("{a: [1]}", "holds a mapping or nested list"), ("{count: 1, count: 2}", "already given")):
        with pytest.raises(ConfigError, match=message):
            from_yaml(f"layer_pattern: [{text}]")


def test_most_layers_of_a_run_are_limited() -> None:
    with pytest.raises(ConfigError, match="a run has 1 layer or more, not 999999"):
        expanded("--layer-pattern", ["999999 window_size=8"], 4)
