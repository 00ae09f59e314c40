"""Commands of README.md, AGENTS.md, CONTRIBUTING.md and docs, for tests/test_docs_commands.py.

`python -m tests.docs_commands` prints a row for every command that tests/docs_commands.txt lacks.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parents[1]
TABLE = REPOSITORY / "tests" / "docs_commands.txt"
LANGUAGES = ("bash", "sh", "shell", "console")


class Command(NamedTuple):
    """A command of a page, on one line; a here-document is left out after its first line."""

    page: str
    text: str


class Row(NamedTuple):
    """A row of the table. how: 'test FILE::NAME', 'here', or 'not: REASON'."""

    command: Command
    how: str


def pages() -> list[Path]:
    """Return the pages of the project, each once: docs that only include another file have no commands."""
    named = [REPOSITORY / name for name in ("README.md", "AGENTS.md", "CONTRIBUTING.md")]
    return [*named, *sorted((REPOSITORY / "docs").rglob("*.md"))]


def commands_of(page: Path) -> list[Command]:
    """Return the commands of the fenced blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    found: dict[str, None] = {}
    for language, block in re.findall(r"^```(\w+)\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        if language not in LANGUAGES:
            continue
        block = re.sub(r"<<-?\s*'?(\w+)'?\n.*?^\1$", r"<<\1", block, flags=re.DOTALL | re.MULTILINE)
        block = re.sub(r"\\\n\s*", "", block)
        quoted = re.sub(r"'[^']*'", lambda text: text[0].replace("\n", " "), block)  # a quoted text is one argument
        for line in quoted.splitlines():
            line = " ".join(re.sub(r"\s#\s.*", "", line).split())
            if line and not line.startswith("#"):
                found[line] = None
    name = page.relative_to(REPOSITORY).as_posix() if page.is_relative_to(REPOSITORY) else page.name
    return [Command(name, line) for line in found]


def table() -> list[Row]:
    """Return the rows of tests/docs_commands.txt: lines of HOW and COMMAND under the name of each page."""
    rows, page = [], ""
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        if line.startswith("## "):
            page = line[3:]
        elif line.strip() and not line.startswith("# "):
            how, _, text = line.partition(" | ")
            rows.append(Row(Command(page, text), how))
    return rows


def main() -> None:
    """Print a row for every command without one."""
    known = {row.command for row in table()} if TABLE.exists() else set()
    for page in pages():
        missing = [command for command in commands_of(page) if command not in known]
        if missing:
            print(f"## {missing[0].page}")
            print("\n".join(f"? | {command.text}" for command in missing))


if __name__ == "__main__":
    main()
