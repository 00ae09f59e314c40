"""docs/schedules.md has a section and a picture for every family, and no broken links to pictures."""

import re
from pathlib import Path

from megapipe.schedule.families import SCHEDULES

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGE = (DOCS / "schedules.md").read_text(encoding="utf-8")


def test_every_family_has_a_section_with_its_picture():
    titles = {name for line in re.findall(r"^## (.+)$", PAGE, re.MULTILINE) for name in re.split(r"[,:] ", line)}
    assert set(SCHEDULES) <= titles
    assert {f"schedules/{name}.svg" for name in SCHEDULES} == set(re.findall(r"\]\((schedules/[^)]+)\)", PAGE))


def test_its_pictures_and_pages_exist():
    links = [link.partition("#") for link in re.findall(r"\]\(([^)]+)\)", PAGE) if not link.startswith("http")]
    assert links
    anchors = {title.lower().replace(" ", "-") for title in re.findall(r"^## (.+)$", PAGE, re.MULTILINE)}
    assert [
        name or anchor for name, _, anchor in links if not ((DOCS / name).exists() if name else anchor in anchors)
    ] == []
