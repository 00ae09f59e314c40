#!/usr/bin/env python3
"""Print docs/flags.md from the declarations of the flags: `python tools/write_flags_page.py > docs/flags.md`.

A test compares the two.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from megapipe.config.config import all_fields, section_types
from megapipe.config.fields import expected_range
from megapipe.config.flags import REQUESTS, choices_of, default_text
from megapipe.config.megatron_flags import (
    ALREADY_SO,
    CLASSES,
    DELIBERATE_DIFFERENCES,
    NEUTRAL,
    REFUSED,
    SUPPORTED,
    TO_DROP,
    MegatronFlag,
    megatron_flags,
)
from megapipe.config.options import ConfigField
from megapipe.plan.schedule_choice import SCHEDULE_NAMES

HEAD = """# Flags

Values come from defaults < YAML files (`--config FILE.yaml`) < flags. Flags have Megatron's names, with `-` or `_`; a
YAML file has the same names, or the names of the fields, in sections or flat. `none` unsets an optional value or a
list. `--print-config` shows every value with its origin, as YAML that can be loaded again. Flags marked * are not in
Megatron.

This page is generated from the declarations: `python tools/write_flags_page.py > docs/flags.md`.
"""


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown, with a newline at the end; `|` in cells is escaped."""
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    lines += ["| " + " | ".join(text.replace("|", "\\|") for text in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def flag_words(field: ConfigField) -> str:
    """Return all flags of a field as code, those that are not in Megatron with a star."""
    words = []
    for flag in field.flags:
        row = megatron_flags().get(flag.name)
        words.append(f"`{flag.name}`" + ("" if row is not None and row.kind == SUPPORTED else "*"))
    return " ".join(words)


def field_row(field: ConfigField) -> tuple[str, ...]:
    """Return flags, meaning, unit and default of a field."""
    option = field.option
    choices = choices_of(field, SCHEDULE_NAMES)
    parts = (option.help, "one of " + ", ".join(choices) if choices else "", expected_range(option))
    meaning = "; ".join(filter(None, parts))
    return flag_words(field), meaning, option.unit, default_text(field).removeprefix("default: ")


def accepted_table(rows: Iterable[MegatronFlag]) -> str:
    """Return the table of flags that are accepted without an effect."""
    cells = [(f"`{row.name}`", ", ".join(row.accepts), row.note) for row in rows]
    return markdown_table(("flag", "values", "why"), cells)


def refused_table(rows: Iterable[MegatronFlag]) -> str:
    """Return the table of refused flags."""
    cells = [(f"`{row.name}`", f"`{row.default}`" if row.default else "", row.note) for row in rows]
    return markdown_table(("flag", "default", "instead"), cells)


def flags_document() -> str:
    """Return the whole page."""
    parts = [
        HEAD,
        "## Requests\n",
        markdown_table(("flag", "meaning"), [(f"`{name}`*", request.help) for name, request in REQUESTS.items()]),
    ]
    for section in section_types():
        rows = [field_row(field) for field in all_fields() if field.section == section]
        parts += [f"## {section}\n", markdown_table(("flags", "meaning", "unit", "default"), rows)]
    differences = [(f"`{d.flag}`", d.megatron, d.here, d.reason) for d in DELIBERATE_DIFFERENCES]
    parts += [
        "## Where megapipe deliberately differs from Megatron\n",
        markdown_table(("flag", "Megatron", "here", "why"), differences),
    ]
    rows_of = {kind: [row for row in megatron_flags().values() if row.kind == kind] for kind in CLASSES}
    counts = ", ".join(f"{len(rows)} {kind}" for kind, rows in rows_of.items())
    parts += [
        "## Every flag of Megatron-LM at megatron-core 0.19.2\n",
        f"{len(megatron_flags())} flags, with those that only other versions have: {counts}. None is ignored.\n",
        "### Supported\n",
        markdown_table(("flag", "field"), [(f"`{row.name}`", f"`{row.note}`") for row in rows_of[SUPPORTED]]),
        "### Accepted: megapipe always does what the flag asks for\n",
        accepted_table(rows_of[ALREADY_SO]),
        "### Accepted: the flag changes no result here\n",
        accepted_table(rows_of[NEUTRAL]),
        "### Refused, with what to do instead: the result differs without the flag\n\n"
        "A refused flag is accepted if its value is Megatron's default, here and in the next table.\n",
        refused_table(rows_of[REFUSED]),
        "### Refused, to drop: no result changes without the flag\n",
        refused_table(rows_of[TO_DROP]),
    ]
    return "\n".join(parts)


if __name__ == "__main__":
    print(flags_document(), end="")
