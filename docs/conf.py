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
html_static_path = ["_static"]
html_css_files = ["site.css"]
myst_heading_anchors = 4


def include_first_link(app, document, source):
    """Show the file of the repository's root that the first line of a page links to, in place of that line.

    GitHub shows the line as it is, and would show an include directive as code.
    """
    options = ":relative-docs: docs/\n:relative-images:\n"
    source[0] = re.sub(r"\A\[.*?\]\((\.\./\w+\.md)\).*\n", rf"```{{include}} \1\n{options}```\n", source[0])


def show_wide_pictures(app, relative_path, parent_docname, content):
    """Show the wide image of each `<picture>`, of which GitHub shows the narrow one on a phone, as a Markdown image.

    Sphinx copies only the images that it finds in Markdown.
    """
    picture = r'<picture>.*?<img alt="([^"]*)" src="([^"]*)">\s*</picture>'
    content[0] = re.sub(picture, r"![\1](\2)", content[0], flags=re.DOTALL)


def add_contents(app, document, source):
    """Give the index a table of contents of its links, in the sections of its headings; show the titles of pages."""
    if document == "index":
        for section in reversed(list(re.finditer(r"^## (.*)\n(?:(?!^## ).*\n)*", source[0], re.MULTILINE))):
            links = re.findall(r"\[([^]]+)\]\((\w+)\.md\)", section[0])
            entries = "\n".join(page if text == f"{page}.md" else f"{text} <{page}>" for text, page in links)
            contents = f"\n```{{toctree}}\n:hidden:\n:caption: {section[1]}\n\n{entries}\n```\n"
            source[0] = source[0][: section.end()] + contents + source[0][section.end() :]
    source[0] = re.sub(r"\[(\w+\.md)\]\((\1[^)]*)\)", r"[](\2)", source[0])


def fold_sidebar(app, page, template, context, doctree):
    """Turn every caption of the sidebar into a group that opens; the group of this page, else the first, is open."""
    groups = re.split(r'<p class="caption" role="heading">(.*?)</p>', context.get("furo_navigation_tree", ""))
    pairs = list(zip(groups[1::2], groups[2::2], strict=True))
    current = next((number for number, (_, pages) in enumerate(pairs) if "current" in pages), 0)
    context["furo_navigation_tree"] = groups[0] + "".join(
        f'<details{" open" if number == current else ""}><summary class="caption">{name}</summary>{pages}</details>'
        for number, (name, pages) in enumerate(pairs)
    )


def setup(app):
    app.connect("source-read", include_first_link)
    app.connect("source-read", add_contents)
    app.connect("include-read", show_wide_pictures)
    app.connect("html-page-context", fold_sidebar, priority=900)  # after the theme has made the tree
