"""`megapipe compare`: which settings differ, whose losses are shown, and the page of curves over each other."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from megapipe.extras.cli.report import compare as main
from megapipe.extras.report.folder import read_run
from megapipe.extras.report.page import averaged, compare_text, differences, named, results
from tests.extras.report.test_page import RECORDED, Checked, edited


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    """Two runs in sweep/NAME/checkpoints: the recorded one, and one with another learning rate, batch and version."""
    first, second = (tmp_path / "sweep" / name / "checkpoints" for name in ("one", "two"))
    shutil.copytree(RECORDED, first)
    shutil.copytree(RECORDED, second)

    def other(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for record in records:
            if record["kind"] == "start":
                lines = record["config"].splitlines()
                lines = ["  lr: 0.5" if line.startswith("  lr:") else line for line in lines]
                lines = [line.replace("  save: ", "  save: elsewhere/") for line in lines]
                record["config"] = "\n".join(lines)
                record["versions"]["torch"] = "9.9"
        return records

    edited(second / "run.jsonl", other)

    def half(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
        for record in records:
            if record["kind"] == "step":
                record["loss"] -= 1.0
                record["consumed_tokens"] *= 2
        return [record for record in records if record["step"] <= 12]

    edited(second / "metrics.jsonl", half)
    return first, second


def test_only_what_differs_is_listed_and_where_a_run_writes_is_not(pair: tuple[Path, Path]) -> None:
    table, problems = differences(named([read_run(path) for path in pair]))
    assert table[0] == ["setting", "one", "two"] and not problems
    rows = {row[0]: row[1:] for row in table[1:]}
    assert set(rows) == {"--lr", "torch"}
    assert rows["--lr"][1] == "0.5" and rows["--lr"][0] != "0.5" and rows["torch"][1] == "9.9"


def test_results_are_those_of_each_run(pair: tuple[Path, Path]) -> None:
    head, one, two = results(named([read_run(path) for path in pair]))
    losses = [
        json.loads(line)["loss"]
        for line in (pair[0] / "metrics.jsonl").read_text().splitlines()
        if json.loads(line)["kind"] == "step"
    ]
    column = head.index("training loss")
    assert one[column] == f"{losses[13]:.4f}" and two[column] == f"{losses[11] - 1.0:.4f}"
    assert (one[head.index("steps")], two[head.index("steps")]) == ("14 of 14", "12 of 14")


def test_losses_are_also_compared_after_the_last_step_that_all_runs_were_validated_at(pair: tuple[Path, Path]) -> None:
    def evaluation(step: int, loss: float) -> dict[str, Any]:
        return {
            "kind": "evaluation",
            "split": "validation",
            "step": step,
            "loss": loss,
            "num_tokens": 1,
            "seconds": 1.0,
        }

    for path, losses in zip(pair, ({5: 4.0, 10: 3.0}, {5: 4.5, 12: 2.0}), strict=True):
        kept = [line for line in (path / "metrics.jsonl").read_text().splitlines() if '"evaluation"' not in line]
        new = [json.dumps(evaluation(step, loss)) for step, loss in losses.items()]
        (path / "metrics.jsonl").write_text("\n".join([*kept, *new]) + "\n")
    head, one, two = results(named([read_run(path) for path in pair]))
    shared, last = head.index("at step 5"), head.index("validation loss")
    assert (one[shared], two[shared], one[last], two[last]) == ("4.0000", "4.5000", "3.0000", "2.0000")


def test_the_page_overlays_the_curves(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*map(str, pair), "--output", str(tmp_path / "c.html")]) == 0
    printed = capsys.readouterr().out
    assert printed.index("settings that differ") < printed.index("results") and "--lr" in printed
    text = (tmp_path / "c.html").read_text()
    found = Checked(text)
    assert found.links == [] and "Training loss over tokens" in found.text
    assert found.text.index("Settings that differ") < found.text.index("Results") < found.text.index("Curves")
    chart = ElementTree.fromstring(text[text.index("<svg") : text.index("</svg>") + 6])
    curves = json.loads(chart.findtext("metadata") or "")
    assert [(curve["name"], curve["points"][-1][0]) for curve in curves] == [("one", 14), ("two", 12)]


def test_a_run_without_a_configuration_is_named(pair: tuple[Path, Path]) -> None:
    (pair[1] / "run.jsonl").unlink()
    text = compare_text(named([read_run(path) for path in pair]))
    assert "the configuration of two is unknown: it recorded none" in text and "no setting differs" in text


def test_one_run_or_the_same_twice_is_refused(pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(pair[0])]) == 2
    assert "name at least two runs" in capsys.readouterr().err
    assert main([str(pair[0]), str(pair[0].parent / "." / "checkpoints")]) == 2
    assert "is given twice" in capsys.readouterr().err


def test_a_running_mean_begins_with_fewer_points() -> None:
    points = [(1.0, 2.0), (2.0, 4.0), (3.0, 9.0), (4.0, 2.0)]
    assert averaged(points, 2) == [(1.0, 2.0), (2.0, 3.0), (3.0, 6.5), (4.0, 5.5)]
