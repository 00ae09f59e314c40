"""launch/test.sh --torch: the environment that it makes, the tests that run there, and arguments that it refuses."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.launch.scripts import REPOSITORY

# the Python of the environment: it notes how pytest and pip are called
PYTHON = """#!/bin/sh
case "$*" in
    *--dry-run*) echo "Would install torch-2.14.1 filelock-4.2" ;;
    -\\ *) PYTHONPATH=$STUB exec python3 "$@" ;;
    "-m pytest"*) printf '%s\n' "$*" >>"$STUB/pytest" ;;
esac
"""
INSTALL = """#!/bin/sh
printf '%s %s\n' "$*" "$(cat "$CONSTRAINTS")" >>"$STUB/installed"
"""


def run(folder: Path, *words: str, has: str = "2.11.0+cu130", **settings: str) -> tuple[int, str]:
    """Run the script in a folder with its own launch/install.sh; return its exit code and what it said."""
    stub, root = folder / "stub", folder / "repository"
    (root / "launch").mkdir(parents=True)
    stub.mkdir()
    script = root / "launch" / "test.sh"
    texts = {
        script: (REPOSITORY / "launch" / "test.sh").read_text(),
        root / "launch" / "install.sh": INSTALL,
        stub / "python3.x": PYTHON,
        stub / "torch.py": f"__version__ = {has!r}",
        stub / "numpy.py": "__version__ = '2.5.2'",
    }
    for path, text in texts.items():
        path.write_text(text)
        path.chmod(0o755)
    (root / "pyproject.toml").write_text((REPOSITORY / "pyproject.toml").read_text())
    for name in (".venv", ".venv-torch-2.11.0", ".venv-torch-newest", "mine"):
        (root / name / "bin").mkdir(parents=True)
        (root / name / "bin" / "python").symlink_to(stub / "python3.x")
    environment = {**os.environ, "STUB": str(stub), "PYTHON": str(stub / "python3.x")} | settings
    environment = {name: value for name, value in environment.items() if name != "VENV" or name in settings}
    done = subprocess.run([script, *words], cwd=root, env=environment, capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout + done.stderr


def noted(folder: Path, name: str) -> list[str]:
    file = folder / "stub" / name
    return file.read_text().splitlines() if file.exists() else []


@pytest.mark.parametrize(("version", "pinned"), [("2.11.0", "2.11.0"), ("newest", "2.14.1")])
def test_tests_that_depend_on_torch_run_in_an_environment_of_that_torch(
    version: str, pinned: str, tmp_path: Path
) -> None:
    code, said = run(tmp_path, "--torch", version, "-x")
    assert code == 0, said
    assert noted(tmp_path, "installed") == [f"--extras test torch=={pinned}"]
    (words,) = noted(tmp_path, "pytest")
    assert words.split()[-1] == "-x"
    folders = [word for word in words.split() if word.startswith("/")]
    assert {Path(each).name for each in folders} >= {"model", "tensor_parallel", "parity", "fake_cuda", "gpu", "cuda"}
    tests = REPOSITORY / "tests"
    assert all((tests / Path(each).relative_to(tmp_path / "repository" / "tests")).exists() for each in folders)


def test_given_tests_run_instead_in_an_environment_as_it_is(tmp_path: Path) -> None:
    code, said = run(tmp_path, "--no-install", "--torch", "2.11.0", "launch", "-x")
    assert code == 0, said
    assert "torch 2.11.0" in said and not noted(tmp_path, "installed")
    (words,) = noted(tmp_path, "pytest")
    assert words.split()[-2:] == [str(tmp_path / "repository" / "launch"), "-x"] and "/model" not in words


def test_an_environment_with_another_torch_fails(tmp_path: Path) -> None:
    code, said = run(tmp_path, "--no-install", "--torch", "2.11.0", has="2.13.0+cpu", VENV="mine")
    assert code == 1 and "2.13.0+cpu" in said and "VENV" in said
    assert not noted(tmp_path, "pytest")


@pytest.mark.parametrize("words", [["--torch"], ["--torch", "old"], ["--torch", "2.11"]], ids=" ".join)
def test_a_torch_that_is_no_version_is_refused(words: list[str], tmp_path: Path) -> None:
    code, said = run(tmp_path, *words)
    assert code != 0 and "2.11.0" in said
    assert not noted(tmp_path, "installed") and not noted(tmp_path, "pytest")
