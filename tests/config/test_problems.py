"""All that is wrong with a command line is reported at once, and no value of any flag ends in a traceback."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from megapipe.config.config import Config, all_fields
from megapipe.config.files import split_shares
from megapipe.config.flags import REQUESTS, field_flags, meant_flag, read_command_line
from megapipe.config.load import load_config
from megapipe.config.megatron_flags import WITHOUT, megatron_flags
from megapipe.config.problems import UnreadError, divisors, hiding
from megapipe.errors import ConfigError
from megapipe.extras.cli.frame import MOST_COLUMNS, abridged
from megapipe.plan.resolve import resolve
from tests.config.examples import job

EVERY_NAME = sorted({*field_flags(), *REQUESTS, *megatron_flags()} - {"--help"})
NASTY = (
    "", "--", "=", "'", "nan", "-inf", "-1", "1" * 5000, "9223372036854775807", "9223372036854775808", "1e18", "1e400",
    "0,1,0", "\0", "\u0663", "[1,[2]]", "([1]*3", "x" * 10000, "0x10", " ", "a\rb\n", "{}", "*a",
)  # fmt: skip


def messages(*words: str) -> list[str]:
    """Return the lines of the error of a job with these flags."""
    with pytest.raises(ConfigError) as error:
        load_config(job(*words))
    return str(error.value).splitlines()


def test_no_value_of_a_flag_ends_in_a_traceback() -> None:
    for name in EVERY_NAME:
        for value in NASTY:
            with contextlib.suppress(ConfigError):
                read_command_line([f"{name}={value}"])


@pytest.mark.parametrize("name", EVERY_NAME)
def test_a_job_with_any_value_of_a_flag_is_planned_or_refused(name: str) -> None:
    for value in NASTY:
        with contextlib.suppress(ConfigError):
            config = load_config([*job("--global-batch-size 8"), f"{name}={value}"]).config
            resolve(config, 1)


@pytest.mark.parametrize("value", ["", "--"], ids=["empty", "dashes"])
def test_a_missing_value_is_never_accepted(value: str) -> None:
    for name in EVERY_NAME:
        if name != "--verify-grid":  # its value may be missing
            with pytest.raises(ConfigError, match=f"^{name}"):
                read_command_line([f"{name}={value}"])


def test_all_that_is_wrong_is_reported_at_once_each_in_a_line(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("model:\n  num_layer: 4\n  hidden_size: wide\noptimizer:\n  lr: fast\nmoe_input_jitter_eps: 8\n")
    found = messages(
        f"--config {path} --num-lay 3 --bf16 --fp16 --swiglu maybe --perform-rl-step --seed -1 "
        "--weight-decay-incr-style linear --rank 3"
    )
    starts = [
        "unknown flag --num-lay",
        "--swiglu takes no value, but maybe follows it",
        "--perform-rl-step is a flag of Megatron that megapipe does not support",
        "--seed -1: expected a value at least 0",
        "--rank selects the rank that --dry-run counts",
        f"{path} line 2: unknown key model.num_layer; did you mean num_layers?",
        f"{path} line 3: model.hidden_size wide: expected a whole number",
        f"{path} line 5: optimizer.lr fast: expected a number",
        f"{path} line 6: --moe-input-jitter-eps 8 is a flag of Megatron",
        "--bf16 and --fp16 contradict each other",
        "--weight-decay-incr-style linear needs --start-weight-decay and --end-weight-decay",
    ]
    assert len(found) == len(starts), found
    for line, start in zip(found, starts, strict=True):
        assert line.startswith(start), (line, start)


@pytest.mark.parametrize("text", ["num_layerz: 4", "model:\n  hiden_size: 8\n", "hidden_size: [\n"])
def test_one_mistake_in_a_file_is_not_followed_by_what_is_missing(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.yaml").write_text(text)
    for words, start in (
        (["--config", "c.yaml"], "c.yaml line "),
        (["--config", "nothing.yaml"], "--config nothing.yaml: cannot be read"),
        (["c.yaml"], "'c.yaml' follows no flag; give a YAML file as --config"),
    ):
        with pytest.raises(ConfigError) as error:
            load_config(words)
        (found,) = str(error.value).splitlines()
        assert found.startswith(start)


def test_a_rule_for_refused_runs_is_asked_of_refused_runs_only() -> None:
    def told(_: Config) -> Iterator[str]:
        yield "the checkpoint has other layers"

    load_config(job(), if_refused=(told,))
    with pytest.raises(ConfigError, match="the checkpoint has other layers"):
        load_config(job("--num-lay 3"), if_refused=(told,))


def test_rules_do_not_judge_values_that_could_not_be_read() -> None:
    assert messages("--num-attention-heads four --hidden-size 66") == [
        "--num-attention-heads four: expected a whole number, at least 1"
    ]
    assert len(messages("--num-attention-heads four --min-lr 7")) == 2  # the rule on rates has all its values


def test_a_misspelled_flag_is_not_also_missing() -> None:
    with pytest.raises(ConfigError) as error:
        load_config([word.replace("--num-layers", "--num-layer") for word in job()])
    assert str(error.value) == "unknown flag --num-layer; did you mean --num-layers? (--help lists all flags)"


def test_what_a_flag_or_file_that_could_not_be_read_may_give_is_not_missing(tmp_path: Path) -> None:
    nothing = tmp_path / "nothing.yaml"
    for words, error in (
        (["--num-expert", "4"], "unknown flag --num-expert; did you mean --num-experts? (--help lists all flags)"),
        (["--config", str(nothing)], f"--config {nothing}: cannot be read: No such file or directory"),
    ):
        with pytest.raises(ConfigError) as caught:
            load_config(words)
        assert str(caught.value) == error
    with pytest.raises(ConfigError, match="--num-layers is missing"):
        load_config(["--seed", "-1"])


def test_reading_a_hidden_field_raises() -> None:
    section = hiding(load_config(job()).config.model, ["num_layers"])
    assert section.hidden_size == 64
    with pytest.raises(UnreadError):
        _ = section.num_layers


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("--learning-rate", "--lr"),
        ("--num-layer", "--num-layers"),
        ("--sequence-paralell", "--sequence-parallel"),
        ("--bias-gelu-fusion", ""),  # there is only the opposite
        ("--disable-sequence-parallel", ""),
        ("--num-expert", "--num-experts"),
        ("--moe-latent-siz", ""),  # --moe-latent-size is refused
        ("--noop-layers", ""),
        ("--data-implementation", ""),
    ],
    ids=lambda value: value,
)
def test_a_suggestion_is_neither_refused_nor_the_opposite(name: str, meant: str) -> None:
    (line,) = messages(name)
    way = f"; did you mean {meant}?" if meant else ""
    assert line == f"unknown flag {name}{way} (--help lists all flags)"


def test_no_misspelling_leads_to_a_refused_flag() -> None:
    for row in [row for row in megatron_flags().values() if row.kind in WITHOUT][::8]:
        meant = meant_flag(row.name + "s")
        assert not meant or meant in field_flags() or megatron_flags()[meant].kind not in WITHOUT


def test_shares_in_quotes_are_the_shares() -> None:
    assert split_shares("'949,50,1'") == split_shares("949,50,1")


def test_the_last_verify_grid_wins() -> None:
    for words, mode in (
        ("--verify-grid --verify-grid native", "native"),
        ("--verify-grid native --verify-grid", "fp64"),
    ):
        assert read_command_line(words.split()).requests.verify_grid == mode


def test_a_blend_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "blend.txt"
    path.write_text("0.3 a_text_document\n0.7 b_text_document\n")
    words = [word for word in job(f"--data-args-path {path}") if word != "--mock-data"]
    assert load_config(words).config.data.data_path == ("0.3", "a_text_document", "0.7", "b_text_document")
    path.write_text("")
    assert messages(f"--data-args-path {path}") == ["--data-args-path: the file is empty"]


def test_deeply_nested_yaml_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    for text in (
        "[" * 500,
        "a: " + "{b: " * 500,
        "a: &x [*x]",
        "? [1]\n: 2",
        "a: [" * 50_000,
        "a: [\n" + "- b\n" * 99_999,
    ):
        path.write_text(text)
        assert len(messages(f"--config {path}")) == 1


def test_divisors_of_large_numbers_are_found_at_once() -> None:
    assert divisors(48, 36) == [1, 2, 3, 4, 6, 12]
    assert divisors(2**62, 2**40)[-1] == 2**40


def test_a_message_with_a_huge_value_is_cut() -> None:
    assert abridged("a\nb") == "a\nb"
    assert len(abridged("x" * 10_000)) < MOST_COLUMNS + 10


def test_every_flag_of_a_field_is_read_by_one_name() -> None:
    assert {flag.name for field in all_fields() for flag in field.flags} == set(field_flags())
