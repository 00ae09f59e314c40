"""The roofline: what the page shows, what remedies gain, what is refused."""

from __future__ import annotations

import re
import shlex
from itertools import pairwise
from pathlib import Path

import pytest

from megapipe.errors import ConfigError
from megapipe.plan.hardware import hardware_named
from megapipe.plan.roofline import Forms, check_counted, configured_forms, layer_work, remedies, roofline, roofline_text
from tests.tiny import plan_for

H100 = hardware_named("h100")
PAGE = Path(__file__).parents[2] / "docs" / "gpu_roofline.md"
COMMANDS = re.findall(r"^(megapipe plan --roofline --gpu h100 .*)$", PAGE.read_text(), re.MULTILINE)
LLAMA_8B = ["--config", str(PAGE.parents[1] / "configs" / "llama3_8b.yaml"), "--global-batch-size", "4"]


@pytest.mark.parametrize("command", COMMANDS, ids=["bf16", "fp8", "tp8"])
def test_the_page_shows_what_the_command_prints(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(PAGE.parents[1])
    words = shlex.split(command.split("--gpu h100 ")[1])
    where = words.index("--world-size")
    num_ranks = int(words[where + 1])
    plan = plan_for([*words[:where], *words[where + 2 :]], num_ranks)
    assert roofline_text(plan, H100) in PAGE.read_text()


def test_every_figure_of_estimate_by_estimate_stands_in_a_table_of_the_command() -> None:
    page = PAGE.read_text()
    tables, summary = page.split("## Estimate by estimate")
    printed = re.findall(r"([\d.]+)\s+([\d.]+)%$", tables, re.MULTILINE)
    shown = {(f"{float(milliseconds):,.0f}", mfu) for milliseconds, mfu in printed}
    figures = re.findall(r"([\d,]+) ms, MFU ([\d.]+) %", summary)
    assert len(figures) == 12 and set(figures) <= shown


@pytest.mark.parametrize("flags", [[], ["--fp8-format", "hybrid"]], ids=["bf16", "fp8"])
def test_every_remedy_makes_a_step_shorter_and_keeps_its_model_flops(flags: list[str]) -> None:
    plan = plan_for([*LLAMA_8B, *flags], 8)
    found = [roofline(plan, H100, forms) for _, forms in remedies(plan)]
    assert all(before.seconds > after.seconds for before, after in pairwise(found))
    assert len({round(each.mfu * each.seconds, 9) for each in found}) == 1


def test_options_of_the_configuration_choose_the_forms() -> None:
    plan = plan_for([*LLAMA_8B, "--compile-pointwise", "--optimizer-impl", "compiled", "--tp-comm-overlap"], 8)
    assert configured_forms(plan) == Forms(compiles=True, compiles_loss=True, fuses_update=True, hides_tp=True)
    assert configured_forms(plan_for(LLAMA_8B, 8)) == Forms()


def test_a_layer_of_the_8b_shape_has_the_reviewed_times() -> None:
    """By hand: GEMMs of 10.7 TFLOP at 690 TFLOP/s, attention of 0.55 and 1.37 at 600 and 480."""
    plan = plan_for([*LLAMA_8B, "--tensor-model-parallel-size", "1"], 1)
    seconds = {work.part: work.seconds for work in layer_work(plan, H100, Forms())}
    assert seconds["attention"] == pytest.approx(0.5498e12 / 600e12 + 2.5 * 0.5498e12 / 480e12, rel=0.01)
    layer = roofline(plan, H100, Forms()).layer
    assert next(work.seconds for work in layer if work.part == "GEMMs") == pytest.approx(10.72e12 / 690e12, rel=0.01)


def test_what_was_not_counted_is_refused() -> None:
    plan = plan_for([*LLAMA_8B, "--normalization", "LayerNorm", "--hidden-dropout", "0.1"], 8)
    with pytest.raises(
        ConfigError, match=r"needs --normalization RMSNorm, --hidden-dropout 0 --attention-dropout 0; meg"
    ):
        check_counted(plan)
