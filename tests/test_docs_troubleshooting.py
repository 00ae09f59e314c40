"""Every message of docs/troubleshooting.md is in the code: a message that is reworded or removed fails here."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
PAGE = (REPOSITORY / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| `(.+?)` \| (.+) \| (.+) \|$", PAGE, re.MULTILINE)
FEWEST_CHARACTERS = 8  # of fixed text: a shorter message would be found anywhere


@cache
def texts() -> str:
    """Return the strings of the code, one a line; a value that is filled in is a NUL character."""
    return "\n".join(
        text.replace("\n", " ")
        for path in (REPOSITORY / "megapipe").rglob("*.py")
        for text in strings(path.read_text(encoding="utf-8"))
    )


def strings(source: str) -> Iterator[str]:
    """Yield the strings of Python code, f-strings with a NUL for each value, but no docstrings."""
    prose = set()
    for node in ast.walk(ast.parse(source)):  # a node comes before those inside it
        if isinstance(node, ast.Expr):
            prose.add(node.value)
        elif isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "\0" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in prose:
            yield node.value


def is_printed(message: str) -> bool:
    """Return whether one string has the fixed parts of a message, in their order."""
    parts = [part.strip() for part in message.split("...")]
    return re.search(r"[^\n]*?".join(map(re.escape, parts)), texts()) is not None


def test_every_message_of_the_page_is_in_the_code() -> None:
    assert not [message for message, _, _ in ROWS if not is_printed(message)]


def test_every_row_is_read_and_has_enough_text_to_be_found() -> None:
    lines = [line for line in PAGE.splitlines() if line.startswith("| `")]
    assert len(ROWS) == len(lines) >= 20
    assert len({message for message, _, _ in ROWS}) == len(ROWS)
    short = [message for message, _, _ in ROWS if len(message.replace("...", "").strip()) < FEWEST_CHARACTERS]
    assert not short


def test_a_message_that_is_not_in_the_code_is_missed() -> None:
    source = 'def f():\n    "no message"\n    raise E(f"no {x} at " f"all: {y}; stop")\n'
    assert next(strings(source)) == "no \0 at all: \0; stop"
    assert "no message" not in list(strings(source))
    assert is_printed("--save ... is in use by another run:")
    assert not is_printed("--save ... is used by another run:")
    assert not is_printed("is in use by another run: ... --save ... choose")
