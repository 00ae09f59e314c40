"""`megapipe explain` explains every flag with the planner's cost and suggests the flag closest to a wrong name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megapipe.config.flags import field_flags
from megapipe.extras.cli.command import SUBCOMMANDS
from megapipe.extras.cli.explain import main
from megapipe.extras.report.explanation import explained, papers

PAGE = (Path(__file__).parents[3] / "docs" / "flags.md").read_text(encoding="utf-8")
FLAGS = sorted(set(re.findall(r"`(--[a-z0-9-]+)`", PAGE)))
MODEL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 8 --seq-length 32 --vocab-size 96 "
    "--micro-batch-size 1 --lr 1e-3 "
    "--train-iters 5 --bf16"
)
SMALL = f"{MODEL} --global-batch-size 4".split()
LARGE = (
    f"{MODEL} --global-batch-size 1024 --tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 "
    "--world-size 1024 --ranks-per-node 8"
)


def test_every_flag_of_the_page_can_be_explained() -> None:
    assert len(FLAGS) > 600
    assert [flag for flag in FLAGS if len(explained(flag, SMALL).splitlines()) < 2] == []


def test_the_cost_of_every_field_on_1024_ranks_is_explained() -> None:
    flags = {field.key: flag for flag, (field, _) in field_flags().items() if flag in FLAGS}  # one of each field
    assert len(flags) > 250
    assert [flag for flag in flags.values() if "  cost" not in explained(flag, LARGE.split())] == []


def test_the_cost_is_the_plans_and_refused_values_are_listed() -> None:
    text = explained("--sequence-parallel", LARGE.split())
    with_and_without = re.findall(r"^ +(true|false) +([\d.]+ \w+) ", text, re.MULTILINE)
    assert {value for value, _ in with_and_without} == {"true", "false"}
    assert with_and_without[0][1] != with_and_without[1][1]
    assert "Korthikanti" in text and "as in Megatron-LM" in text
    grid = ["--pipeline-model-parallel-size", "4", "--world-size", "4"]
    assert re.search(r"8 is refused: .*pipeline", explained("--pipeline-model-parallel-size", [*SMALL, *grid]))


def test_a_flag_without_cost_is_explained() -> None:
    text = explained("--adam-beta1", SMALL)
    assert "cost: none in memory or time" in text
    assert "sets optimizer.adam_beta1" in text


def test_without_a_configuration_only_the_text_is_printed() -> None:
    assert "give a configuration" in explained("--bf16", [])


def test_a_wrong_name_finds_the_right_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--sequence-paralel"]) == 2
    assert "did you mean --sequence-parallel?" in capsys.readouterr().err
    assert main(["--sequence-parallel", "--num-layers", "4", "--num-attention-heads", "3"]) != 0


def test_papers_belong_to_flags() -> None:
    assert [flag for flag in papers() if flag not in field_flags()] == []
    assert "explain" in SUBCOMMANDS


def test_a_pattern_of_layers_is_compared_with_alike_layers() -> None:
    flags = [*SMALL, "--seq-length", "512", "--window-size", "8", "--attention-dropout", "0", "--window-attn-skip-freq"]
    text = explained("--window-attn-skip-freq", [*flags, "2"])
    sizes = re.findall(r'^ +("2"|null) +([\d.]+ \w+) ', text, re.MULTILINE)
    assert [value for value, _ in sizes] == ['"2"', "null"]
    assert "block_configs" in explained("--heterogeneous-layers-config-path", [])
