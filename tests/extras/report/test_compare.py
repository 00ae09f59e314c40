"""`megapipe compare`: how runs are named, whose losses are shown, curves over each other, which settings differ."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from megapipe.config.load import load_config
from megapipe.extras.cli.report import compare as main
from megapipe.extras.report.folder import Run, read_run
from megapipe.extras.report.page import averaged, compare_text, differences, named, results
from megapipe.plan.resolve import resolve
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
    assert printed.index("results") < printed.index("settings that differ") < printed.index("--lr")
    text = (tmp_path / "c.html").read_text()
    found = Checked(text)
    assert found.links == [] and "Training loss over tokens" in found.text
    assert found.text.index("Results") < found.text.index("Curves") < found.text.index("Settings that differ")
    chart = ElementTree.fromstring(text[text.index("<svg") : text.index("</svg>") + 6])
    curves = json.loads(chart.findtext("metadata") or "")
    assert [(curve["name"], curve["points"][-1][0]) for curve in curves] == [("one", 14), ("two", 12)]


def test_a_run_without_a_configuration_is_named(pair: tuple[Path, Path]) -> None:
    (pair[1] / "run.jsonl").unlink()
    text = compare_text(named([read_run(path) for path in pair]))
    assert "the configuration of two is unknown: it recorded none" in text and "no setting differs" in text


def recorded_with(folder: Path, *flags: str) -> Run:
    """Return a run that has only recorded its start, with what these flags gave."""
    flags += ("--num-attention-heads", "4", "--seq-length", "8", "--vocab-size", "50", "--mock-data", "--lr", "1e-3")
    loaded = load_config([*flags, "--num-layers", "2", "--micro-batch-size", "2", "--train-iters", "4"])
    text = loaded.text(resolve(loaded.config, world_size=2).config)
    start = json.loads((RECORDED / "run.jsonl").read_text().splitlines()[0])
    folder.mkdir(parents=True)
    (folder / "run.jsonl").write_text(json.dumps(start | {"config": text}) + "\n")
    return read_run(folder)


def test_values_are_those_that_the_runs_used_also_where_they_were_not_given(tmp_path: Path) -> None:
    small = recorded_with(tmp_path / "small", "--hidden-size", "32")
    large = recorded_with(
        tmp_path / "large", "--hidden-size", "64", "--global-batch-size", "8", "--lr-decay-iters", "3"
    )
    rows = {row[0]: row[1:] for row in differences({"small": small, "large": large})[0]}
    assert rows["--hidden-size"] == ["32", "64"]
    assert rows["--kv-channels"] == ["8", "16"] and rows["--ffn-hidden-size"] == ["128", "256"]  # derived in both
    assert rows["--global-batch-size"] == ["4", "8"]  # micro-batch-size x dp
    assert rows["--lr-decay-iters"] == ["4", "3"]  # that of --train-iters
    assert not set(rows) & {"--train-samples", "--lr-decay-samples", "--max-position-embeddings"}  # follow in both
    assert {value for row in rows.values() for value in row}.isdisjoint({"", "unknown", "automatic"})


def test_a_setting_without_effect_is_shown_as_such(tmp_path: Path) -> None:
    experts = ("--num-experts", "4", "--moe-ffn-hidden-size", "16", "--moe-aux-loss-coeff", "0.01")
    runs = {
        "dense": recorded_with(tmp_path / "dense", "--hidden-size", "32"),
        "sparse": recorded_with(tmp_path / "sparse", "--hidden-size", "32", *experts),
    }
    rows = {row[0]: row[1:] for row in differences(runs)[0]}
    assert rows["--num-experts"] == ["none", "4"] and rows["--moe-ffn-hidden-size"] == ["not used", "16"]
    assert rows["--moe-aux-loss-coeff"] == ["not used", "0.01"]
    assert "--moe-router-topk" not in rows  # the default where it has an effect


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["a/x", "b/x", "c/y"], ["a/x", "b/x", "y"]),
        (["lr1/checkpoints", "lr2/checkpoints", "c"], ["lr1", "lr2", "c"]),
        (["a", "a/checkpoints"], ["a", "checkpoints"]),
        (["s/a/out", "s/b/out", "t/b/out"], ["a/out", "s/b/out", "t/b/out"]),
    ],
    ids=["suffixes", "checkpoints", "inside", "three parts"],
)
def test_runs_are_named_by_the_shortest_ends_of_their_paths(tmp_path: Path, paths: list[str], names: list[str]) -> None:
    for path in paths:
        (tmp_path / path).mkdir(parents=True, exist_ok=True)
        shutil.copy(RECORDED / "metrics.jsonl", tmp_path / path)
    assert list(named([read_run(tmp_path / path) for path in paths])) == names


def test_one_run_or_the_same_twice_is_refused(pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(pair[0])]) == 2
    assert "name at least two runs" in capsys.readouterr().err
    assert main([str(pair[0]), str(pair[0].parent / "." / "checkpoints")]) == 2
    assert "is given twice" in capsys.readouterr().err


def test_a_running_mean_begins_with_fewer_points() -> None:
    points = [(1.0, 2.0), (2.0, 4.0), (3.0, 9.0), (4.0, 2.0)]
    assert averaged(points, 2) == [(1.0, 2.0), (2.0, 3.0), (3.0, 6.5), (4.0, 5.5)]
