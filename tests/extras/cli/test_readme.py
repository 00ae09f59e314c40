"""Claims of the README: its commands run, flags exist, links resolve, its output is that of today."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megapipe.config.flags import REQUESTS, field_flags, normalised
from megapipe.config.megatron_flags import megatron_flags
from megapipe.extras.cli.command import SUBCOMMANDS

REPOSITORY = Path(__file__).resolve().parents[3]
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
ARCHITECTURE = (REPOSITORY / "docs" / "architecture.md").read_text(encoding="utf-8")
TESTED = re.findall(r"<!-- tested -->\n```bash\n(.*?)```", README, re.DOTALL)
ALL_COMMANDS = "\n".join(re.findall(r"```bash\n(.*?)```", README, re.DOTALL))
FLAGS_OF_OTHERS = ("--output", "--gpus", "--gpu", "--schedule-svg")  # of megapipe plan


def test_the_tested_commands_of_the_readme_run_in_order(tmp_path: Path) -> None:
    for name in ("configs", "tools", "megapipe", "pretrain_gpt.py"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    shell = f"set -e\nexport PYTHONPATH={REPOSITORY} OMP_NUM_THREADS=1\n"
    shell += f'megapipe() {{ "{sys.executable}" -m megapipe "$@"; }}\npython() {{ "{sys.executable}" "$@"; }}\n'
    assert TESTED
    ended = subprocess.run(
        [shutil.which("bash") or "bash", "-c", shell + "\n".join(TESTED)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert "tp 8 x pp 16 x 8 chunks x dp 128" in ended.stdout
    assert (tmp_path / "best.yaml").is_file() and (tmp_path / "schedule.svg").is_file()


def test_the_readme_begins_with_two_commands() -> None:
    assert ALL_COMMANDS.splitlines()[:2] == ["launch/quickstart.sh", "launch/test.sh"]
    assert README.index("```bash\nlaunch/quickstart.sh\nlaunch/test.sh\n```") < README.index("\n## ")
    assert len(re.findall(r"^\| (?!\|).*[^-|]", README, re.MULTILINE)) <= 10, "rows of the table of features"


def test_the_readme_counts_the_scripts_of_the_page_on_migrating() -> None:
    page = (REPOSITORY / "docs" / "migrate.md").read_text(encoding="utf-8")
    whole = sum(map(int, re.findall(r"^All (\d+) scripts of ", page, re.MULTILINE)))
    rows = re.findall(r"^\| [\w.-]+/[\w.-]+ \| (\d+) \| (\d+) \|", page, re.MULTILINE)
    num_scripts, num_run = (whole + sum(int(row[column]) for row in rows) for column in (0, 1))
    assert f"of {num_scripts} public scripts, {num_run} run as they are" in README


def test_every_flag_of_the_readme_exists() -> None:
    named = {normalised(word) for word in re.findall(r"(?<![\w-])--[a-z][\w-]+", README)}
    own = {
        "--" + normalised(name).lstrip("-") for name in (*field_flags(), *REQUESTS, *megatron_flags(), *FLAGS_OF_OTHERS)
    }
    assert not {name for name in named if "--" + name.lstrip("-") not in own}


def test_every_subcommand_of_the_readme_exists() -> None:
    used = set(re.findall(r"(?:^|`)megapipe ([a-z-]+) ", README, re.MULTILINE)) - {"pretrains"}
    assert used and used <= set(SUBCOMMANDS)


@pytest.mark.parametrize("page", ["README.md", "docs/architecture.md"])
def test_links_and_paths_exist(page: str) -> None:
    text = (REPOSITORY / page).read_text()
    links = [link for link in re.findall(r"\]\(([^)#]+)\)", text) if not link.startswith("http")]
    paths = re.findall(r"(?<![\w/])((?:configs|docs|tools|launch|tests)/[\w./-]*\w)", text)
    assert links and paths
    folder = (REPOSITORY / page).parent  # what a link is relative to
    assert not [link for link in links if not (folder / link).exists()]
    assert not [path for path in paths if not (REPOSITORY / path).exists()]


def test_the_architecture_page_names_every_package() -> None:
    packages = {
        path.stem
        for path in (REPOSITORY / "megapipe").iterdir()
        if (path / "__init__.py").exists() or path.suffix == ".py"
    }
    packages -= {"__init__", "__main__", "__pycache__"}
    assert not {package for package in packages if f"`{package}`" not in ARCHITECTURE}


def test_the_output_in_the_readme_is_current(tmp_path: Path) -> None:
    shown = re.findall(r"<!-- output of: megapipe (.*?) -->\n```\n(.*?)```", README, re.DOTALL)
    assert shown
    for words, output in shown:
        command = [sys.executable, "-m", "megapipe", *words.split()]
        ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=200)
        assert ended.stdout == output, f"paste the output of: megapipe {words}"
