"""Conversion families from outside: the example and its page, and what registration proves."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from megapipe.errors import ConfigError
from megapipe.extras.cli.convert import main
from megapipe.extras.convert.extend import Family, Layout, Row, register_family
from megapipe.extras.convert.families import FAMILIES, TEXT_TOWERS
from megapipe.registry import EXTENSIONS, PYTHON_CODE

ROOT = Path(__file__).parents[3]
EXAMPLE = ROOT / "examples" / "nemotron_family.py"
NAME = "NemotronForCausalLM"
MIXTURES = ROOT / "megapipe" / "extras" / "convert" / "mixtures"


@pytest.fixture
def extension() -> Iterator[str]:
    yield str(EXAMPLE)
    EXTENSIONS.unload(str(EXAMPLE))
    FAMILIES.forget(PYTHON_CODE)


def test_a_mixture_takes_at_most_120_lines_and_is_listed() -> None:
    files = {path.stem: path.read_text() for path in MIXTURES.glob("[!_]*.py")}
    assert {name: text.count("\n") for name, text in files.items() if text.count("\n") > 120} == {}
    listed = {*FAMILIES.values(), *TEXT_TOWERS.values()}
    for name in files:
        assert import_module(f"megapipe.extras.convert.mixtures.{name}").FAMILY in listed, name


@pytest.mark.parametrize(
    "settings", [{}, {"attention_bias": True, "mlp_bias": True, "head_dim": 12}], ids=["plain", "biases"]
)
def test_the_example_converts_there_and_back_with_the_logits_of_transformers(
    tmp_path: Path, extension: str, settings: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers", reason="the optional package transformers is not installed")
    from safetensors.torch import load_file

    from tests.extras.convert.models import Case, make, save

    theirs = save(make(Case("nemotron", settings)), tmp_path / "theirs")
    assert main(["--extension", extension, str(theirs), str(tmp_path / "ours")]) == 0
    assert main(["--extension", extension, str(tmp_path / "ours"), str(tmp_path / "back")]) == 0
    assert capsys.readouterr().out.count("the models agree") == 2
    before, after = load_file(theirs / "model.safetensors"), load_file(tmp_path / "back" / "model.safetensors")
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)
    EXTENSIONS.unload(extension)
    assert main([str(theirs), str(tmp_path / "again")]) == 2
    assert f"unknown architecture {NAME}; known are GPT2LMHeadModel" in capsys.readouterr().err


def broken_rows(family: Family, wrong: str) -> tuple[Row, ...]:
    rows = {row.ours.split("#.")[-1]: row for row in family.rows}
    up, down, qkv = (rows[name] for name in ("mlp.linear_fc1", "mlp.linear_fc2", "self_attention.linear_qkv"))
    reverse = Layout(lambda parts: torch.cat(tuple(parts)), lambda whole: tuple(reversed(whole.chunk(3))))
    replaced = {
        "missing": (down, None),
        "twice": (down, dataclasses.replace(down, theirs=up.theirs)),
        "restore": (qkv, dataclasses.replace(qkv, layout=lambda model: reverse)),
        "parts": (qkv, dataclasses.replace(qkv, theirs=qkv.theirs[:1])),
    }
    before, after = replaced[wrong]
    return tuple(row if row is not before else after for row in family.rows if row is not before or after is not None)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            "missing",
            "its example: NemotronForCausalLM has no place for the tensor decoder.layers.0.mlp.linear_fc2.weight",
        ),
        (
            "twice",
            r"model.layers.0.mlp.up_proj.weight is a part of decoder.layers.0.mlp.linear_fc2.weight and of another",
        ),
        ("restore", "the layout of decoder.layers.0.self_attention.linear_qkv.weight does not restore"),
        ("parts", "the layout of decoder.layers.0.self_attention.linear_qkv.weight has 3 parts, its row 1"),
    ],
)
def test_tables_that_are_wrong_are_refused_at_registration(extension: str, wrong: str, message: str) -> None:
    EXTENSIONS.load(extension)
    family = FAMILIES[NAME]
    example = dict.fromkeys(("hidden_size", "intermediate_size", "vocab_size"), 24) | {
        "num_hidden_layers": 1, "num_attention_heads": 2
    }  # fmt: skip
    EXTENSIONS.unload(extension)
    with pytest.raises(ConfigError, match=f"conversion family {NAME!r}: {message}"):
        register_family(dataclasses.replace(family, rows=broken_rows(family, wrong)), example)
    assert NAME not in FAMILIES


def test_rules_and_names_that_are_wrong_are_refused(extension: str) -> None:
    EXTENSIONS.load(extension)
    family, example = (
        FAMILIES[NAME],
        {"vocab_size": 24, "hidden_size": 24, "intermediate_size": 24, "num_hidden_layers": 1},
    )
    with pytest.raises(ConfigError, match="its example: the key num_attention_heads is missing"):
        register_family(family, example)
    with pytest.raises(ConfigError, match="its example: unknown keys of NemotronForCausalLM: odd"):
        register_family(family, example | {"num_attention_heads": 2, "odd": 1})
    with pytest.raises(
        ConfigError, match=r"'NemotronForCausalLM' of Python code was registered by .*nemotron_family.py"
    ):
        register_family(family, example | {"num_attention_heads": 2})
    llama = FAMILIES["LlamaForCausalLM"]
    with pytest.raises(ConfigError, match="'LlamaForCausalLM' of Python code is built in"):
        register_family(llama, example | {"num_attention_heads": 2})
