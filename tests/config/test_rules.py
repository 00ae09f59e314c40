"""Rules between configuration fields: each is broken once, with a helpful message, and accepts nearby values."""

from __future__ import annotations

import ast
import dataclasses
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.config import rules
from megapipe.config.config import Config, all_fields
from megapipe.config.files import parse_blend, split_shares
from megapipe.config.load import load_config
from megapipe.config.problems import divisors, nearest_values, use_divisors, use_multiples
from megapipe.config.rules.check import check
from megapipe.config.rules.training import job as job_rule
from megapipe.errors import ConfigError
from tests.config.examples import job
from tests.tables import rows

CASES, REMARKS = rows(Path(__file__).with_name("broken_rules.tsv")), rows(Path(__file__).with_name("remarks.tsv"))
# like CASES, but only configurations built in code can break these rules
IN_CODE = [
    ({"data": {"mock_data": False, "data_path": ()}}, "--data-path is empty"),
    (
        {"recompute": {"recompute_granularity": "selective", "recompute_modules": ()}},
        "needs at least one of --recompute-modules",
    ),
    (
        {"training": {"train_iters": None, "train_samples": 1000}, "optimizer": {"lr_decay_iters": 10}},
        "--lr-decay-iters count in steps",
    ),
]
JOBS = [
    ("job_has_a_length", {"training": {"train_iters": None}}, "--train-iters or --train-samples"),
    ("job_has_a_rate", {"optimizer": {"lr": None}}, "--lr, the highest learning rate, is missing"),
    ("job_has_data", {"data": {"mock_data": False}}, "--data-path"),
    ("job_has_data", {"data": {"mock_data": False, "valid_data_path": ("v",)}}, "add --train-data-path"),
    ("job_has_a_vocabulary", {"model": {"vocab_size": None}}, "--tokenizer-type"),
]


@pytest.mark.parametrize(("flags", "named", "fine"), CASES, ids=[case[0] for case in CASES])
def test_a_broken_rule_is_named_and_similar_valid_flags_pass(flags: str, named: str, fine: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(job(flags))
    assert any(all(word in line for word in named.split(" & ")) for line in str(error.value).splitlines())
    load_config(job(fine))


def changed(config: Config, changes: dict[str, dict[str, object]]) -> Config:
    return dataclasses.replace(
        config, **{name: dataclasses.replace(getattr(config, name), **fields) for name, fields in changes.items()}
    )


@pytest.mark.parametrize(("rule", "changes", "words"), JOBS, ids=[f"{case[0]}: {case[1]}" for case in JOBS])
def test_an_incomplete_job_is_refused(rule: str, changes: dict[str, dict[str, object]], words: str) -> None:
    config = load_config(job()).config
    check(config, [job_rule])
    broken = changed(config, changes)
    check(broken)
    with pytest.raises(ConfigError, match=words):
        check(broken, [job_rule])


@pytest.mark.parametrize(("changes", "words"), IN_CODE, ids=[words for _, words in IN_CODE])
def test_a_configuration_made_in_code_obeys_the_rules(changes: dict[str, dict[str, object]], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check(changed(load_config(job()).config, changes))


def test_every_rule_is_broken_by_a_case() -> None:
    """Every `yield` of a rule runs in some case, and every required option is left out once."""
    modules = [getattr(rules, name) for name in ("context", "model", "gpu", "optimizer", "training")]
    expected = {
        (str(module.__file__), node.lineno)
        for module in modules
        for node in ast.walk(ast.parse(Path(str(module.__file__)).read_text()))
        if isinstance(node, ast.Yield)
    }
    reached: set[tuple[str, int]] = set()

    def trace(frame: types.FrameType, event: str, argument: object) -> Any:
        reached.add((frame.f_code.co_filename, frame.f_lineno))
        return trace

    messages = []
    sys.settrace(trace)
    try:
        for flags in (job(case[0]) for case in CASES):
            with pytest.raises(ConfigError) as error:
                load_config(flags)
            messages.append(str(error.value))
        for changes in [*(changes for _, changes, _ in JOBS), *(changes for changes, _ in IN_CODE)]:
            with pytest.raises(ConfigError):
                check(changed(load_config(job()).config, changes), [job_rule])
    finally:
        sys.settrace(None)
    assert expected <= reached
    needed = {field.option.needs for field in all_fields()}
    assert not [
        need
        for need in needed
        if need is not None
        and not need.without
        and not any(f"needs {need.flag}" in m or f"need {need.flag}" in m for m in messages)
    ]


@pytest.mark.parametrize(("flags", "named"), REMARKS, ids=[case[0] for case in REMARKS])
def test_what_megatron_accepts_without_effect_is_accepted_with_one_remark(flags: str, named: str) -> None:
    (remark,) = load_config(job(flags)).remarks
    assert all(word in remark for word in named.split(" & "))


def test_defaults_break_no_rule() -> None:
    check(Config())


def test_all_broken_rules_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as error:
        load_config(job("--cp-comm-type a2a p2p a2a --global-batch-size 9 --finetune"))
    assert len(str(error.value).splitlines()) == 3


def test_a_configuration_made_in_code_is_held_to_choices_and_ranges() -> None:
    config = Config()
    broken = dataclasses.replace(config, model=dataclasses.replace(config.model, num_layers=0, normalization="Norm"))
    with pytest.raises(ConfigError) as error:
        check(broken)
    assert str(error.value).splitlines()[0] == "model.num_layers 0: expected a value at least 1 and at most 100000"
    assert "model.normalization Norm: choose LayerNorm" in str(error.value)


def test_sequence_parallelism_without_tensor_parallelism_is_accepted() -> None:
    assert load_config(job("--sequence-parallel --seq-length 31")).config.parallel.sequence_parallel


@given(st.integers(1, 400), st.integers(1, 400), st.integers(1, 400))
@settings(max_examples=50)
def test_proposed_values_work(first: int, second: int, wanted: int) -> None:
    proposed = nearest_values(divisors(first, second), wanted)
    assert proposed
    assert all(first % value == 0 and second % value == 0 for value in proposed)
    assert str(proposed[0]) in use_divisors(first, second, wanted=wanted)
    assert all(int(word) % first == 0 for word in use_multiples(first, wanted).removeprefix("use ").split(" or "))


@pytest.mark.parametrize(
    ("text", "shares"),
    [
        ("969,30,1", (0.969, 0.03, 0.001)),
        ("99, 1, 0", (0.99, 0.01, 0.0)),
        ("8/1/1", (0.8, 0.1, 0.1)),
        ("1", (1.0, 0.0, 0.0)),
        ("3,1", (0.75, 0.25, 0.0)),
    ],
    ids=lambda value: str(value),
)
def test_a_split_is_shares_that_sum_to_one(text: str, shares: tuple[float, float, float]) -> None:
    assert split_shares(text) == pytest.approx(shares)


@pytest.mark.parametrize("text", ["", "a,b", "1,2,3,4", "-1,1,1", "0,0", "nan,1", "inf,1"])
def test_a_bad_split_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--split"):
        split_shares(text)


@pytest.mark.parametrize(
    ("words", "prefixes", "weights"),
    [
        ("a", ["a"], None),
        ("a b", ["a", "b"], None),
        ("a b c", ["a", "b", "c"], None),
        ("1 a", ["a"], [1.0]),
        ("0.3 a 0.7 b", ["a", "b"], [0.3, 0.7]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_blend_is_prefixes_with_or_without_weights(words: str, prefixes: list[str], weights: list[float]) -> None:
    assert parse_blend(words.split(), "--data-path") == (prefixes, weights)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "--data-path is empty"),
        (["a", " "], "--data-path is empty"),
        (["0.3", "a", "b", "c"], "must alternate"),
        (["0.3", "a", "0.7"], "must alternate"),
        (["a", "3"], "must alternate"),
        (["0", "a", "1", "b"], "must be above 0"),
        (["-1", "a", "2", "b"], "must be above 0"),
        (["nan", "a"], "must be above 0"),
        (["inf", "a"], "must be above 0"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_bad_blend_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_blend(words, "--data-path")


@pytest.mark.parametrize(
    ("flags", "width"),
    [
        ("", 256),
        ("--swiglu", 128),
        ("--swiglu --ffn-hidden-size 40", 40),
        ("--activation geglu_tanh --hidden-size 4096", 10880),
    ],
)
def test_the_width_of_the_mlp_is_megatrons(flags: str, width: int) -> None:
    assert load_config(job(flags)).config.model.feed_forward_size() == width
