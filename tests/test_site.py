"""The documentation's site builds without warnings: every link between pages resolves."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
DOCS = REPOSITORY / "docs"


@pytest.mark.timeout(300)
def test_the_site_builds_and_every_link_resolves(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sphinx", "-W", "-q", DOCS, tmp_path / "site"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 0, f"(pip install 'megapipe[docs]' installs sphinx)\n{ended.stderr}"
    pages = {path.stem for path in DOCS.glob("*.md")}
    assert {path.stem for path in (tmp_path / "site").glob("*.html")} >= pages
    index = (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    assert pages - {"index"} <= set(re.findall(r'class="reference internal" href="(\w+)\.html"', index))


def test_every_page_is_on_the_index() -> None:
    linked = set(re.findall(r"\]\((\w+)\.md\)", (DOCS / "index.md").read_text(encoding="utf-8")))
    assert {path.stem for path in DOCS.glob("*.md")} - {"index"} == linked


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.stem)
def test_links_between_pages_name_files(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text) if "://" not in link]
    assert not [link for link in links if not (page.parent / link).exists()]
