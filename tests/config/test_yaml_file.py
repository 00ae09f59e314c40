"""The YAML form: round trips, PyYAML's pitfalls, errors with file and line."""

from __future__ import annotations

from pathlib import Path

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
from tests.tables import rows, value

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


LINES = rows(Path(__file__).with_name("yaml_lines.tsv"))


@pytest.mark.parametrize(("text", "key", "wanted"), [row[1:] for row in LINES if row[0] == "value"])
def test_text_is_read_by_the_type_of_its_field(text: str, key: str, wanted: str) -> None:
    found, expected = value_of(from_yaml(value(text)), fields_by_key()[key]), value(wanted)
    assert found == expected
    assert type(found) is type(expected)


@pytest.mark.parametrize(("text", "words"), [row[1:] for row in LINES if row[0] == "bad"])
def test_a_bad_line_is_named_with_file_key_value_and_expectation(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        from_yaml(value(text), "f.yaml")
    for word in words.split(" & "):
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
