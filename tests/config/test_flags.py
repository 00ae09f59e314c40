"""The command line: every flag sets its field, and every error is one readable line."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.config.config import all_fields, value_of
from megapipe.config.flags import field_flags, help_text, read_command_line
from megapipe.config.load import load_config
from megapipe.config.options import TAKES_VALUE, ConfigField, Flag
from megapipe.errors import ConfigError
from tests.config.examples import has_values, job, values
from tests.tables import rows

EVERY_FLAG = [
    pytest.param(field, flag, id=flag.name)
    for field in all_fields()
    for flag in field.flags
    if flag.read is None and has_values(field)
]
MEGATRON_FLAGS = rows(Path(__file__).with_name("megatron_flags.tsv"))
WRONG_VALUES = rows(Path(__file__).with_name("wrong_values.tsv"))
PLAIN = "abcdefghijklmnopqrstuvwxyz/_.XYZ0123456789"


def test_no_flag_belongs_to_two_fields() -> None:
    names = [flag.name for field in all_fields() for flag in field.flags]
    assert len(names) == len(set(names))
    assert all(name == name.replace("_", "-") for name in names)


def words_of(value: Any) -> list[str]:
    """Format a value as command-line words."""
    if value is None:
        return ["none"]
    return [str(item) for item in value] if isinstance(value, tuple) else [str(value)]


@pytest.mark.parametrize(("field", "flag"), EVERY_FLAG)
def test_every_flag_sets_its_field_with_dashes_and_underscores(field: ConfigField, flag: Flag) -> None:
    texts: list[str] = []
    if flag.value is TAKES_VALUE:
        sample = (
            tuple(field.option.choices)[-1]
            if field.option.choices
            else "8"
            if field.kind.scalar in (int, float) and field.option.at_most != 1
            else "1"
        )
        if field.option.below == 1:
            sample = "0.5"
        if field.option.at_most == 2:
            sample = "2"
        texts = [sample] * (field.kind.length or 1)
    for name in (flag.name, "--" + flag.name[2:].replace("-", "_")):
        setting = read_command_line([name, *texts]).settings[0]
        assert setting.field is field
        if flag.value is not TAKES_VALUE:
            assert setting.value == flag.value
        else:
            assert words_of(setting.value) == texts or [float(word) for word in words_of(setting.value)] == [
                float(text) for text in texts
            ]


@settings(max_examples=60)
@given(data=st.data())
def test_a_value_given_as_a_flag_is_the_value(data: st.DataObject) -> None:
    field = data.draw(
        st.sampled_from(
            [
                field
                for field in all_fields()
                if field.kind.scalar is not bool and field.option.read is None and has_values(field)
            ]
        )
    )
    value = data.draw(values(field))
    if field.kind.scalar is str and not field.option.choices and value is not None:
        text = st.text(PLAIN, min_size=1, max_size=9).filter(lambda word: word.lower() not in ("none", "null"))
        value = tuple(data.draw(st.lists(text, min_size=1, max_size=3))) if field.kind.many else data.draw(text)
    words = words_of(value)
    argv = (
        [f"{field.main_flag}={words[0]}"] if len(words) == 1 and data.draw(st.booleans()) else [field.main_flag, *words]
    )
    assert read_command_line(argv).settings[0].value == value


@pytest.mark.parametrize(
    ("flags", "key", "value"), MEGATRON_FLAGS, ids=[f"{row[0]} {row[1]}" for row in MEGATRON_FLAGS]
)
def test_a_megatron_flag_means_what_it_means_there(flags: str, key: str, value: str) -> None:
    section, name = key.split(".")
    assert getattr(getattr(load_config(job(flags)).config, section), name) == json.loads(value)


def test_a_number_of_query_groups_that_megatron_ignores_is_refused(tmp_path: Path) -> None:
    rule = r"--num-query-groups 2 without --group-query-attention: Megatron ignores the number, and each of the 8"
    with pytest.raises(ConfigError, match=rule):
        load_config(job("--num-query-groups 2"))
    yaml = tmp_path / "groups.yaml"
    yaml.write_text("num_query_groups: 4\n")
    assert load_config(job(f"--config {yaml}")).config.model.num_query_groups == 4
    assert load_config(job(f"--config {yaml} --num-query-groups 2")).config.model.num_query_groups == 2
    load_config(job("--num-query-groups 2 --load old --use-checkpoint-args"))  # compared with the checkpoint's


@pytest.mark.parametrize(
    ("words", "size"),
    [("--swiglu", 128), ("--quick-geglu", 256), ("--activation geglu_tanh", 128), ("--squared-relu", 256)],
    ids=["swiglu", "quick_geglu", "geglu_tanh", "squared_relu"],
)
def test_only_swiglu_is_narrower_in_megatron(words: str, size: int) -> None:
    assert load_config(job(words)).config.model.feed_forward_size() == size


@pytest.mark.parametrize(("flags", "named"), WRONG_VALUES, ids=[flags for flags, _ in WRONG_VALUES])
def test_an_error_is_one_line_that_names_what_is_wrong(
    flags: str, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(job(flags))
    assert "\n" not in str(error.value)
    assert all(word in str(error.value) for word in named.split(" & ")), str(error.value)
    assert capsys.readouterr() == ("", "")


def test_a_word_before_any_flag_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'tiny.yaml' .*--config"):
        load_config(["tiny.yaml"])


@settings(max_examples=80)
@given(
    argv=st.lists(
        st.sampled_from(
            [*field_flags(), "--plan", "--x", "-1", "0", "1e-3", "a", "none", "true", "-x", "", "--", "--lr=", "="]
        ),
        max_size=6,
    )
)
def test_any_command_line_loads_or_raises_config_error(argv: list[str]) -> None:
    with contextlib.suppress(ConfigError):  # a user would see any other exception as a traceback
        load_config(argv)


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        ("--plan", "plan", True),
        ("--print-config", "print_config", True),
        ("--print_config", "print_config", True),
        ("--verify-grid", "verify_grid", "fp64"),
        ("--verify-grid native", "verify_grid", "native"),
        ("--seed 1", "verify_grid", None),
        ("--plan --world_size 1024", "world_size", 1024),
        ("--print-config --world-size 16 --ranks-per-node 8", "ranks_per_node", 8),
    ],
)
def test_requests_are_read_apart_from_the_configuration(words: str, name: str, value: object) -> None:
    assert getattr(load_config(job(words)).requests, name) == value


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("--plan --verify-grid native", "--plan and --verify-grid"),
        ("--print-config --plan", "--print-config and --plan"),
        ("--dry-run --verify-grid", "--dry-run and --verify-grid"),
    ],
)
def test_of_several_requests_none_is_left_out_in_silence(words: str, names: str) -> None:
    with pytest.raises(ConfigError, match=f"{names} are different requests; give one of them"):
        load_config(job(words))


def test_help_lists_every_flag_with_unit_default_and_owner(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        load_config(["--help"])
    assert leaving.value.code == 0
    text = capsys.readouterr().out
    flat = " ".join(text.split())
    for name in field_flags():
        assert f"{name} " in flat, name
    assert "--lr-warmup-iters N steps of linear warm-up (unit: steps; at least 0; default: 0)" in flat
    assert (
        "--z-loss X weight of log(sum(exp(logits)))^2 in the loss; 0: none (at least 0; default: 0.0) [megapipe]"
        in flat
    )
    assert "--num-layers N transformer layers (unit: layers; at least 1 and at most 100000; required)" in flat
    lines = [line for line in text.splitlines() if line.strip().startswith("--num-layers ")]
    assert lines
    assert "[megapipe]" not in lines[0]


def test_every_field_has_a_help_text_and_a_default() -> None:
    config = load_config(job()).config
    for field in all_fields():
        assert field.option.help, field.key
        assert value_of(config, field) is not None or field.kind.optional, field.key


def test_help_imports_no_torch() -> None:
    program = (
        "import sys; from megapipe.config.load import load_config\n"
        "try: load_config(['--help'])\n"
        "finally: print('torch' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert done.stderr.strip() == "False"


def test_help_lines_have_at_most_150_columns() -> None:
    assert all(len(line) <= 150 for line in help_text().splitlines())


@pytest.mark.parametrize("flag", ["--num-layers", "--lr"])
def test_a_number_of_more_than_308_digits_is_refused(flag: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{flag} 10+\.\.\. \(321 characters\): expected a .*number"):
        read_command_line([flag, "1" + "0" * 320])
