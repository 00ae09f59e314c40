"""Tables of tests in text files: a case a line, its columns between tabs or |, remarks behind #."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def rows(table: Path, names: Mapping[str, str] | None = None) -> list[list[str]]:
    """Return the columns of each row. names: texts that stand in the table as {NAME}; other braces stay."""
    text = re.sub(r"{(\w+)}", lambda found: (names or {}).get(found[1], found[0]), table.read_text("utf-8"))
    # the layout of a pipeline holds | without blanks around it
    columns = re.compile(r"\t" if "\t" in text else r"\s\|(?=\s|$)")
    return [
        [column.strip() for column in columns.split(line)] for line in text.splitlines() if not line.startswith("#")
    ]


def options(words: str, sets: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of words name=value and NAME of a set of options; later words win.

    Values are literals of Python, but for strings without quotes and tuples without parentheses. again=MODULES is
    selective recompute of these modules.
    """
    found: dict[str, Any] = {}
    for word in words.split():
        name, _, text = word.partition("=")
        if name == "again":
            found |= {"recompute_granularity": "selective", "recompute_modules": tuple(text.split(","))}
        elif text:
            parts = [value(part) for part in text.split(",") if part]
            found[name] = tuple(parts) if "," in text else parts[0]
        else:
            found |= sets[name]
    return found


def value(text: str) -> Any:
    """Return the value of a literal of Python; a text that is none stands for itself."""
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text
