"""docs/tutorial.md runs from top to bottom, and pictures of docs/concepts.md and docs/long_context.md are those that
their commands draw.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from megapipe.extras.cli.command import main
from tests.launch.scripts import REPOSITORY

TUTORIAL = (REPOSITORY / "docs" / "tutorial.md").read_text(encoding="utf-8")
CONCEPTS = (REPOSITORY / "docs" / "concepts.md").read_text(encoding="utf-8")
MODEL = re.search(r'MODEL="(.*)"', CONCEPTS)
LONG_CONTEXT = (REPOSITORY / "docs" / "long_context.md").read_text(encoding="utf-8")
EXPERTS = (REPOSITORY / "docs" / "experts.md").read_text(encoding="utf-8")
DRAWN = re.findall(r"<!-- drawn by: megapipe (.*) -->", CONCEPTS + LONG_CONTEXT + EXPERTS)


@pytest.mark.timeout(1200)
def test_the_tutorial_runs(tmp_path: Path) -> None:
    commands = "\n".join(re.findall(r"```bash\n(.*?)```", TUTORIAL, re.DOTALL))
    assert commands.count("megapipe ") >= 10
    shell = f"set -e\nexport PYTHONPATH={REPOSITORY} OMP_NUM_THREADS=1\n"
    shell += f'megapipe() {{ "{sys.executable}" -m megapipe "$@"; }}\npython() {{ "{sys.executable}" "$@"; }}\n'
    bash = [shutil.which("bash") or "bash", "-c", shell + commands]
    ended = subprocess.run(bash, cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]
    for text in (
        "step 20/40 |",
        "continuing after step 20",
        "step 40/40 |",
        "same: loss, gradient norm",
        "perplexity",
        "\n> In asyncio.tasks.\n",
    ):
        assert text in ended.stdout, ended.stdout[-6000:]
    assert (tmp_path / "run" / "report.html").is_file() and (tmp_path / "exported" / "config.json").is_file()


@pytest.mark.parametrize("line", DRAWN)
def test_the_pictures_of_the_axes_are_drawn_by_their_commands(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert MODEL is not None
    monkeypatch.chdir(tmp_path)
    words = shlex.split(line.replace("$MODEL", MODEL[1]))
    drawn = Path(words[-1])
    drawn.parent.mkdir(parents=True)
    assert main(words) == 0
    assert drawn.read_text() == (REPOSITORY / drawn).read_text()
    assert f"]({drawn.relative_to('docs')})" in CONCEPTS + LONG_CONTEXT + EXPERTS


def test_the_grid_shows_which_experts_a_rank_has_in_the_layers_that_have_some(tmp_path: Path) -> None:
    assert MODEL is not None
    path = tmp_path / "a.svg"
    experts = "--num-experts 8 --moe-layer-freq [0,1] --disable-bias-linear --expert-model-parallel-size 2"
    parallel = "--tensor-model-parallel-size 1 --num-layers 2"
    assert main(["plan", "--world-size", "2", *f"{MODEL[1]} {parallel} {experts}".split(), "--svg", str(path)]) == 0
    found = ElementTree.parse(path).getroot()
    texts = [each.text for each in found.iter("{http://www.w3.org/2000/svg}text")]
    assert {"embedding", "layer 0", "layer 1", "head"} < set(texts)
    assert [text for text in texts if text and text.startswith("experts ")] == ["experts 0 to 3", "experts 4 to 7"]
    filled = [each.attrib for each in found.iter("{http://www.w3.org/2000/svg}rect") if each.get("height") == "13"]
    assert len(filled) == 2 * (4 + 2)  # of each rank: four rows, and two places of experts in one of them


@pytest.mark.parametrize("size", [1, 16])
def test_context_parallelism_of_one_or_many_ranks_is_not_drawn(
    size: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert MODEL is not None
    words = ["plan", "--world-size", str(size), *MODEL[1].split(), "--context-parallel-size", str(size)]
    assert main([*words, "--context-svg", str(tmp_path / "a.svg")]) == 2
    assert f"needs --context-parallel-size 2 to 8, not {size}" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_grid_that_is_too_large_is_not_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert MODEL is not None
    assert main(["plan", "--world-size", "256", *MODEL[1].split(), "--svg", str(tmp_path / "a.svg")]) == 2
    assert "too large for a drawing; plan for at most 128 ranks" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_configurations_are_copied_but_never_over_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["configs", "--copy", str(tmp_path / "a")]) == 0
    names = {path.name for path in (REPOSITORY / "configs").glob("*.yaml")}
    assert {path.name for path in (tmp_path / "a").iterdir()} == names
    (tmp_path / "a" / "llama3_8b.yaml").write_text("mine")
    assert main(["configs", "--copy", str(tmp_path / "a")]) == 2
    assert "already holds" in capsys.readouterr().err
    assert (tmp_path / "a" / "llama3_8b.yaml").read_text() == "mine"
