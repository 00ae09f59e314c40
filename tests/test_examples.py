"""The examples give the same results in one process and on several ranks."""

from __future__ import annotations

import contextlib
import io
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.api.ranks import as_rank
from tests.harness import run_ranks

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
LINES = {"pretrain_from_python": 25, "pipeline_any_module": 35, "vision_transformer": 45}  # at most


def run_example(rank: int, world_size: int, name: str, *arguments: str) -> str:
    """Run the unmodified script on a rank of the harness and return what it prints."""
    from megapipe.api import pipeline, trainer

    as_rank(rank, world_size, pipeline, trainer)
    trainer.end_with_launcher = lambda environment: None
    sys.argv = [name, *arguments]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    return printed.getvalue()


def losses_of(text: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^step +\d+(?:/\d+)? (?:\| )?loss ([\d.]+)", text, re.MULTILINE)]


@pytest.mark.parametrize(("name", "ranks", "arguments", "num_losses"), [
    ("vision_transformer", 2, (), 12),
    ("pipeline_any_module", 4, ("2",), 20),
    ("pretrain_from_python", 4, ("--pipeline-model-parallel-size", "2", "--log-interval", "1"), None),
], ids=["vision_transformer", "pipeline_any_module", "pretrain_from_python"])  # fmt: skip
def test_an_example_learns_the_same_on_one_rank_and_on_several(
    name: str, ranks: int, arguments: tuple[str, ...], num_losses: int | None
) -> None:
    (alone,) = run_ranks(run_example, 1, name, *(arguments[2:] if num_losses is None else ()))
    one, (first, *others) = losses_of(alone), run_ranks(run_example, ranks, name, *arguments)
    assert all(not losses_of(text) for text in others)
    assert losses_of(first) == pytest.approx(one, abs=2e-3 if num_losses is None else 1e-4)
    assert one[-1] < (0.34 if name == "vision_transformer" else 0.8) * one[0] and (
        num_losses is None or len(one) == num_losses
    )
    if num_losses is None:
        assert "a callback asked to stop" in alone and "a callback asked to stop" in first and len(one) < 60


@pytest.mark.parametrize("name", LINES)
def test_an_example_is_short(name: str) -> None:
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= LINES[name]


FAILING = """
from megapipe import Callback, Config, Trainer
class Broken(Callback):
    def on_step_end(self, trainer, summary):
        if trainer.rank == 1:
            raise ValueError("the plot has no axis")
Trainer(Config.from_flags({flags!r}), [Broken()]).run()
"""


@pytest.mark.timeout(600)
def test_the_examples_run_under_a_launcher_and_a_broken_callback_ends_all_ranks(tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "megapipe", "launch", "--nproc-per-node", "2"]
    example = str(EXAMPLES / "pipeline_any_module.py")
    ended = subprocess.run([*launch, example], capture_output=True, text=True, cwd=tmp_path)
    assert ended.returncode == 0 and len(losses_of(ended.stdout)) == 20, ended.stdout + ended.stderr
    from tests.train.jobs import TINY

    (tmp_path / "broken.py").write_text(FAILING.format(flags=f"{TINY} --train-iters 50"))
    ended = subprocess.run([*launch, "broken.py"], capture_output=True, text=True, cwd=tmp_path)
    said = ended.stdout + ended.stderr
    assert ended.returncode == 1, said
    assert "Broken.on_step_end raised ValueError" in said
    assert 'raise ValueError("the plot has no axis")' in said and "a bug in megapipe" not in said
