"""The documentation's site builds without warnings: every link between pages resolves."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

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
    assert not list(broken_links(tmp_path / "site"))


def broken_links(site: Path) -> Iterator[str]:
    """Yield the links of a built site to files or places in them that do not exist."""
    texts = {path: path.read_text(encoding="utf-8") for path in site.rglob("*.html")}
    places = {path: set(re.findall(r'\bid="([^"]+)"', text)) for path, text in texts.items()}
    for path, text in texts.items():
        for link in set(re.findall(r'\b(?:href|src)="([^"]+)"', text)):
            if re.match(r"[a-z]+:|//|#$", link):
                continue
            name, _, place = unquote(link).partition("#")
            target = (path.parent / name.partition("?")[0]).resolve() if name else path
            if not target.exists() or (place and target in places and place not in places[target]):
                yield f"{path.name}: {link}"


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<a href="b.html#x">1</a><a href="b.html#y">2</a><a href="c.html">3</a><a href="#z">'
    )
    (tmp_path / "b.html").write_text('<p id="x"><a href="https://example.org/nothing">4</a>')
    assert sorted(broken_links(tmp_path)) == ["a.html: #z", "a.html: b.html#y", "a.html: c.html"]


def test_every_page_is_on_the_index() -> None:
    linked = set(re.findall(r"\]\((\w+)\.md\)", (DOCS / "index.md").read_text(encoding="utf-8")))
    assert {path.stem for path in DOCS.glob("*.md")} - {"index"} == linked


@pytest.mark.parametrize("page", sorted(DOCS.glob("*.md")), ids=lambda page: page.stem)
def test_links_between_pages_name_files(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = [link for link in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text) if "://" not in link]
    assert not [link for link in links if not (page.parent / link).exists()]


@pytest.mark.parametrize("page", [*sorted(DOCS.glob("*.md")), REPOSITORY / "README.md"], ids=lambda page: page.stem)
def test_no_line_of_text_begins_with_a_comment(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    found = re.findall(r"^<!--.*?-->[ \t]*\S.*", text, re.MULTILINE)
    assert not found, "the whole line would be HTML, and its links and emphasis stay as they are written"
    assert not re.findall(r"^[ \t]*%.*", text, re.MULTILINE), "MyST takes a line that begins with % as a comment"


def test_pages_that_the_code_names_exist() -> None:
    folders = ("megapipe", "tools", "launch", "configs", "examples")
    paths = [
        path for folder in folders for path in (REPOSITORY / folder).rglob("*") if path.suffix not in (".pyc", ".so")
    ]
    named: dict[str, set[str]] = {}
    for path in paths:
        if path.is_file():
            for page in re.findall(r"docs/[a-z_0-9]+\.md", path.read_text(encoding="utf-8", errors="ignore")):
                named.setdefault(page, set()).add(str(path.relative_to(REPOSITORY)))
    assert len(named) > 20
    assert not {page: by for page, by in named.items() if not (REPOSITORY / page).exists()}


def test_the_reading_path_has_existing_files_and_fits_a_day() -> None:
    guide = (REPOSITORY / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \d+ \| (.+?) \|", guide, re.MULTILINE)
    files = [name for row in rows for name in re.findall(r"`([^`]+)`", row)]
    assert len(rows) >= 10
    assert sum(len((REPOSITORY / name).read_text(encoding="utf-8").splitlines()) for name in files) <= 4000


def test_every_rule_of_the_design_names_tests_that_exist() -> None:
    page = (DOCS / "architecture.md").read_text(encoding="utf-8").partition("## Nine rules")[2].partition("\n## ")[0]
    rules = re.split(r"^\d+\. ", page, flags=re.MULTILINE)[1:]
    assert len(rules) == 9
    for rule in rules:
        tests = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", rule)
        assert tests, rule
        for path, name in tests:
            assert f"def {name}(" in (REPOSITORY / path).read_text(encoding="utf-8"), name


def test_the_page_of_composition_names_places_that_exist() -> None:
    page = (REPOSITORY / "megapipe" / "assembly" / "compose.py").read_text(encoding="utf-8")
    places = re.findall(r"^    \d  \w+ .* (\S+)$", page, re.MULTILINE)
    assert len(places) == 9
    assert all((REPOSITORY / "megapipe" / place).exists() for place in places)
