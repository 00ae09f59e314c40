"""The notebook examples/first_steps.ipynb runs from top to bottom and shows what its sentences say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
CELLS = json.loads((REPOSITORY / "examples" / "first_steps.ipynb").read_text("utf-8"))["cells"]
# as a notebook does: one namespace, and the value of a cell's last expression is shown
RUN = """
import ast, json, sys
namespace = {"__name__": "__main__"}
for source in json.load(sys.stdin):
    cell = ast.parse(source)
    last = cell.body.pop() if isinstance(cell.body[-1], ast.Expr) else None
    exec(compile(cell, "cell", "exec"), namespace)
    if last is not None:
        value = eval(compile(ast.Expression(last.value), "cell", "eval"), namespace)
        print(value._repr_svg_() if hasattr(value, "_repr_svg_") else value, flush=True)
"""


@pytest.mark.timeout(300)
def test_the_notebook_runs(tmp_path: Path) -> None:
    sources = json.dumps(["".join(cell["source"]) for cell in CELLS if cell["cell_type"] == "code"])
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    run = [sys.executable, "-c", RUN]
    ended = subprocess.run(run, input=sources, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    for text in (
        "plan: 2 ranks = tp 1 x pp 2 x dp 1, schedule zb-h1",
        "<svg",
        "step 160/160 |",
        "same: loss, gradient norm",
        "\nBeautiful is better than ugly.\nExplicit is better than implicit.",
    ):
        assert text in ended.stdout, ended.stdout[-5000:]
    assert [path.name for path in tmp_path.iterdir()] == ["first_steps"]


def test_no_output_is_stored() -> None:
    code = [cell for cell in CELLS if cell["cell_type"] == "code"]
    assert code and all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)
