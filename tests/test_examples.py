"""The examples give the same results in one process and on several ranks."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
import torch

from megapipe.comm.bootstrap import World
from megapipe.pipeline import pipeline as pipeline_module
from tests.harness import run_ranks

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "vision_transformer.py"


def run_example(rank: int, world_size: int, log: str) -> None:
    """Run the unmodified script in an existing world and write its printed lines to the log."""
    pipeline_module.start = lambda *_: World(rank, world_size, "gloo", torch.device("cpu"), 60.0)
    pipeline_module.shutdown = lambda: None
    lines: list[str] = []
    runpy.run_path(str(EXAMPLE), {"print": lambda text, **_: lines.append(text)})
    Path(f"{log}.{rank}").write_text("\n".join(lines))


def losses_of(text: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^step \d+ loss ([\d.]+)$", text, re.MULTILINE)]


def test_the_vision_transformer_learns_the_same_on_one_and_on_two_ranks(tmp_path: Path) -> None:
    for ranks in (1, 2):
        run_ranks(run_example, ranks, str(tmp_path / str(ranks)))
    one, two = (losses_of((tmp_path / name).read_text()) for name in ("1.0", "2.1"))
    assert (tmp_path / "2.0").read_text() == ""
    assert len(one) == 12
    assert one[-1] < one[0] / 3
    assert two == pytest.approx(one, abs=1e-4)


def test_the_vision_transformer_is_short() -> None:
    assert len(EXAMPLE.read_text().splitlines()) < 50
