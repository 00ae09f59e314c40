"""mypy, as pyproject.toml configures it, checks every script and resolves the modules that scripts import by name."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["mypy"]
UNCHECKED = {"tests", "docs", "build", "dist"}


def unchecked(scripts: Sequence[str], files: Sequence[str]) -> set[str]:
    """Return the scripts that lie in none of these files and folders."""
    return {script for script in scripts if not any(Path(script).is_relative_to(each) for each in files)}


def test_mypy_checks_every_script() -> None:
    found = [str(path.relative_to(ROOT)) for path in ROOT.glob("*.py")]
    for folder in ROOT.iterdir():
        if folder.is_dir() and folder.name not in UNCHECKED and not folder.name.startswith("."):
            found += [str(path.relative_to(ROOT)) for path in folder.rglob("*.py")]
    assert "tools/bench/first_day.py" in found and "examples/extend_layer.py" in found
    assert not unchecked(found, SETTINGS["files"])
    assert unchecked(found, ["megapipe"]) >= {"tools/bench/first_day.py", "pretrain_gpt.py"}


def test_mypy_finds_wrong_calls_in_scripts() -> None:
    assert SETTINGS["check_untyped_defs"] and SETTINGS["disallow_untyped_defs"]
    ignored = [row["module"] for row in SETTINGS["overrides"] if row.get("ignore_missing_imports")]
    names = {name.partition(".")[0] for modules in ignored for name in modules}
    own = {path.stem for folder in (ROOT, ROOT / "tools" / "bench") for path in folder.iterdir()}
    assert not names & own and "ignore_missing_imports" not in SETTINGS, "a missing module would be taken as Any"
