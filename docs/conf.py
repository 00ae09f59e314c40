"""Settings of the documentation's site: `python -m sphinx -W docs build/site` builds it."""

import re
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
sys.path.insert(0, str(DOCS.parent))

from megapipe import __version__  # noqa: E402

project = "megapipe"
author = "the megapipe authors"
copyright = "the megapipe authors, Apache-2.0"
version = release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton"]
autodoc_member_order = "bysource"
highlight_language = "text"  # of blocks without a language, which show output
smartquotes = False  # -- is the beginning of a flag
html_theme = "furo"
html_title = f"megapipe {version}"
html_show_sphinx = False
myst_heading_anchors = 4


def add_contents(app, document, source):
    """Give the index a table of contents of its links, in the sections of its headings; name pages without .md."""
    if document != "index":
        return
    source[0] = re.sub(r"\[(\w+)\.md\]\(", lambda link: f"[{link[1].replace('_', ' ')}](", source[0])
    for section in reversed(list(re.finditer(r"^## (.*)\n(?:(?!^## ).*\n)*", source[0], re.MULTILINE))):
        pages = re.findall(r"\]\((\w+)\.md\)", section[0])
        entries = "\n".join(dict.fromkeys(pages))
        contents = f"\n```{{toctree}}\n:hidden:\n:caption: {section[1]}\n\n{entries}\n```\n"
        source[0] = source[0][: section.end()] + contents + source[0][section.end() :]


def setup(app):
    app.connect("source-read", add_contents)
