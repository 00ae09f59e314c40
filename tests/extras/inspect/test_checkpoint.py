"""Bit-exact comparison of two checkpoints written by any layout."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megapipe.checkpoint.folder import CheckpointFolder, open_folder
from megapipe.extras.inspect import checkpoint as inspect_checkpoint
from megapipe.extras.inspect.checkpoint import TensorComparison, compare
from tests.checkpoint.layouts import LAYOUTS, Layout, global_tensors, save_layout, save_one

REPOSITORY = Path(__file__).resolve().parents[3]


def saved(folder: Path, values: torch.Tensor) -> CheckpointFolder:
    return open_folder(save_one(folder, 1, values).path)


def test_the_same_tensors_from_two_layouts_are_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspect_checkpoint, "CHUNK_ELEMENTS", 20)  # a few rows at a time
    wholes = global_tensors()
    folders = [open_folder(save_layout(tmp_path / name, layout, wholes).path) for name, layout in LAYOUTS.items()]
    for folder in folders[1:]:
        found = list(compare(folders[0], folder))
        assert [one.name.removeprefix("master/") for one in found] == sorted(wholes)
        assert all(one.is_equal and one.num_equal == wholes[one.name.removeprefix("master/")].numel() for one in found)


def test_one_element_that_differs_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspect_checkpoint, "CHUNK_ELEMENTS", 8)
    values = torch.arange(1.0, 21.0).view(5, 4)
    changed = values.clone()
    changed[3, 1] += 0.5  # 14 -> 14.5
    (found,) = compare(saved(tmp_path / "a", values), saved(tmp_path / "b", changed))
    assert (found.num_equal, found.num_elements, found.is_equal) == (19, 20, False)
    assert (found.max_abs, found.max_rel) == (0.5, pytest.approx(0.5 / 14.5))


@pytest.mark.parametrize(
    ("a", "b", "equal", "max_abs"),
    [
        (math.nan, math.nan, 4, 0.0),
        (math.inf, math.inf, 4, 0.0),
        (math.nan, 1.0, 3, math.inf),
        (math.inf, 1.0, 3, math.inf),
        (0.0, -0.0, 3, 0.0),
    ],
    ids=["nan", "inf", "nan_and_number", "inf_and_number", "zeros_of_two_signs"],
)
def test_special_values(tmp_path: Path, a: float, b: float, equal: int, max_abs: float) -> None:
    first, second = torch.ones(4), torch.ones(4)
    first[2], second[2] = a, b
    (found,) = compare(saved(tmp_path / "a", first), saved(tmp_path / "b", second))
    assert (found.num_equal, found.max_abs) == (equal, max_abs)


def test_another_dtype_or_shape_is_a_difference(tmp_path: Path) -> None:
    values = torch.arange(8.0)
    wide = saved(tmp_path / "a", values)
    (found,) = compare(wide, saved(tmp_path / "b", values.bfloat16()))
    assert (found.num_equal, found.is_equal, found.dtypes) == (8, False, ("F32", "BF16"))
    (found,) = compare(wide, saved(tmp_path / "c", values.view(2, 4)))
    assert found == TensorComparison("master/w", ((8,), (2, 4)), ("F32", "F32"))


def tool(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "megapipe", "inspect", "checkpoint", *arguments]
    return subprocess.run(
        command, cwd=REPOSITORY, env=os.environ | {"PYTHONPATH": str(REPOSITORY)}, capture_output=True, text=True
    )


def test_the_tool_reports_by_exit_code_and_in_json(tmp_path: Path) -> None:
    wholes = global_tensors()
    for name, layout in (("a", Layout(1, 1, 13)), ("b", Layout(2, 4, 16))):
        save_layout(tmp_path / name, layout, wholes)
    wholes["down"][0, 0] += 1.0
    save_layout(tmp_path / "c", Layout(1, 3, 16), wholes, step=2)
    same = tool(str(tmp_path / "a"), "--diff", str(tmp_path / "b"))
    assert (same.returncode, same.stdout.splitlines()[-1]) == (0, "6 tensors bitwise equal, 0 not"), same.stderr
    other = tool(str(tmp_path / "a"), "--diff", str(tmp_path / "c"))
    assert other.returncode == 1
    assert "master/down: 47 of 48 elements bit-equal" in other.stdout
    assert "training: {'step': 1} in the first, {'step': 2} in the second" in other.stdout
    content = json.loads(tool(str(tmp_path / "a"), "--diff", str(tmp_path / "c"), "--json").stdout)
    assert (content["num_equal"], [one["name"] for one in content["different"]]) == (5, ["master/down"])
    assert content["different"][0]["num_equal"] == 47
    listed = json.loads(tool(str(tmp_path / "a"), "--json", "--tensors", "--verify").stdout)
    assert (listed["step"], listed["damage"], listed["tensors"]["master/norm"]["shape"]) == (1, [], [6])
    nothing = tool(str(tmp_path / "a"), "--diff", str(tmp_path / "nothing"))
    assert nothing.returncode == 2 and "nothing holds no checkpoint" in nothing.stderr
