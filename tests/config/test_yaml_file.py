"""The YAML form: round trips, PyYAML's pitfalls, errors with file and line."""

from __future__ import annotations

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.config.config import Config, all_fields, fields_by_key, make_config, value_of
from megapipe.config.fields import value_text
from megapipe.config.load import from_yaml, load_config
from megapipe.config.yaml_file import to_yaml
from megapipe.errors import ConfigError
from tests.config.examples import job, values

ANY_CONFIG = st.fixed_dictionaries({field.key: values(field) for field in all_fields()}).map(make_config)


@settings(max_examples=12)
@given(config=ANY_CONFIG)
def test_any_configuration_reads_back_from_its_yaml(config: Config) -> None:
    assert from_yaml(to_yaml(config)) == config


@settings(max_examples=6)
@given(config=ANY_CONFIG)
def test_yaml_of_a_configuration_means_the_same_to_another_yaml_reader(config: Config) -> None:
    loaded = yaml.safe_load(to_yaml(config))
    for field in all_fields():
        value = value_of(config, field)
        assert loaded[field.section][field.name] == (list(value) if isinstance(value, tuple) else value), field.key


@settings(max_examples=60)
@given(data=st.data())
def test_a_list_of_strings_survives_any_character(data: st.DataObject) -> None:
    characters = st.characters(codec="utf-8", exclude_characters="\0")  # no path holds it, so it is refused
    paths = tuple(data.draw(st.lists(st.text(characters, min_size=1, max_size=8), min_size=1, max_size=3)))
    assert from_yaml(f"data_path: {value_text(paths)}").data.data_path == paths


def test_default_configuration_round_trips_through_from_yaml() -> None:
    assert from_yaml(to_yaml(Config())) == Config()


def test_an_empty_file_is_the_defaults() -> None:
    assert from_yaml("") == Config()
    assert from_yaml("# nothing\nmodel:\n") == Config()


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("optimizer: {lr: 1e-3}", "optimizer.lr", 0.001),
        ("lr: 3e-4", "optimizer.lr", 0.0003),
        ("optimizer:\n  min-lr: 0", "optimizer.min_lr", 0.0),
        ("optimizer: sgd", "optimizer.optimizer", "sgd"),
        ("sequence_parallel: on", "parallel.sequence_parallel", True),
        ("sequence-parallel: yes", "parallel.sequence_parallel", True),
        ("add_bias_linear: off", "model.add_bias_linear", False),
        ("save: on", "checkpoint.save", "on"),
        ("save: 12:30:45", "checkpoint.save", "12:30:45"),
        ("save: 0123", "checkpoint.save", "0123"),
        ("save: 2024-01-01", "checkpoint.save", "2024-01-01"),
        ("save: 'none'", "checkpoint.save", "none"),
        ("save: none", "checkpoint.save", None),
        ("save:", "checkpoint.save", None),
        ("train_samples: 1e6", "training.train_samples", 1_000_000),
        ("seed: 010", "training.seed", 10),
        ("position_embedding_type: none", "model.position_embedding_type", "none"),
        ("data_path: a b", "data.data_path", ("a b",)),
        ("data_path: [0.3, a, 0.7, b]", "data.data_path", ("0.3", "a", "0.7", "b")),
        ("rampup_batch_size: 2 2 100\nglobal_batch_size: 8", "training.rampup_batch_size", (2, 2, 100)),
        (
            "recompute_granularity: selective\nrecompute_modules: [mlp, layernorm]",
            "recompute.recompute_modules",
            ("mlp", "layernorm"),
        ),
        ("bf16: true", "precision.dtype", "bf16"),
        ("bf16: false", "precision.dtype", "fp32"),
        ("disable_bias_linear: true", "model.add_bias_linear", False),
        ("disable-bias-linear: false", "model.add_bias_linear", True),
        ("disable-bias-linear: false", "model.activation", "gelu_tanh"),
        ("disable_bias_linear: true", "model.activation", "gelu"),
        ("add_bias_linear: false", "model.activation", "gelu_tanh"),
        ("model: {swiglu: true}", "model.activation", "swiglu"),
        ("split: 8,1,1", "data.split", "8,1,1"),
    ],
)
def test_text_is_read_by_the_type_of_its_field(text: str, key: str, value: object) -> None:
    found = value_of(from_yaml(text), fields_by_key()[key])
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model:\n  num_layers: 12:30:45", ["f.yaml line 2", "model.num_layers", "12:30:45", "whole number"]),
        ("model:\n  num_layers: on", ["line 2", "num_layers", "on", "whole number"]),
        ("model:\n  num_layers: 0x10", ["line 2", "0x10", "whole number"]),
        ("num_layers: 2.5", ["2.5", "whole number"]),
        ("num_layers:", ["num_layers is empty"]),
        ("num_layers: [1, 2]", ["num_layers", "one value"]),
        ("lr: .inf", ["lr", ".inf", "number"]),
        ("lr: fast", ["lr", "fast", "number"]),
        ("sequence_parallel: 1", ["sequence_parallel", "1", "true or false"]),
        ("swiglu: 3", ["swiglu", "true or false"]),
        ("model:\n  num_layer: 4", ["line 2", "model.num_layer", "did you mean num_layers?"]),
        ("num-layer: 4", ["num_layer", "did you mean num_layers?"]),
        ("model:\n  lr: 1", ["line 2", "belongs to the section optimizer"]),
        ("modle:\n  num_layers: 4", ["unknown section modle", "model"]),
        ("num_layers: 4\nnum-layers: 5", ["line 2", "was already given on line 1"]),
        ("- a\n- b", ["f.yaml", "key: value"]),
        ("model: {num_layers: {a: 1}}", ["line 1", "num_layers", "flat list"]),
        ("model:\n  num_layers: [1, 2", ["f.yaml line", "not readable as YAML"]),
        ("a: b: c", ["f.yaml line 1", "not readable as YAML"]),
        ("lr: \x01", ["f.yaml", "not readable as YAML"]),
        ("---\na: 1\n---\nb: 2", ["f.yaml", "not readable as YAML"]),
        ("normalization: rmsnorm", ["normalization", "did you mean RMSNorm?"]),
        ("mtp_hybrid_override_pattern: M", ["line 1", "--mtp-hybrid-override-pattern M", "not support"]),
        ("swiglu: true\nactivation: relu", ["contradict", "swiglu", "relu"]),
        ("rampup_batch_size: [1, 2]", ["rampup_batch_size", "3 values", "got 2"]),
        ("<<: {a: 1}", ["<<"]),
    ],
    ids=lambda value: value.replace("\n", " ") if isinstance(value, str) else "",
)
def test_a_bad_line_is_named_with_file_key_value_and_expectation(text: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        from_yaml(text, "f.yaml")
    for word in words:
        assert word in str(error.value)


@pytest.mark.parametrize("kind", ["missing", "directory", "binary"])
def test_an_unreadable_file_is_a_message(tmp_path, kind: str) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "c.yaml"
    if kind == "directory":
        path.mkdir()
    elif kind == "binary":
        path.write_bytes(b"model:\n  save: \xff\xfe\n")
    with pytest.raises(ConfigError, match=r"--config .*c\.yaml"):
        load_config(job(f"--config {path}"))


def test_a_megatron_switch_that_is_already_so_is_remarked_in_yaml_too(tmp_path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "c.yaml"
    path.write_text("use_mcore_models: true\nnum_experts: null\nmoe_layer_freq:\nno_mmap_bin_files: false\n")
    assert load_config(job(f"--config {path}")).accepted == ("--use-mcore-models",)
