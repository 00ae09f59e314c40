"""docs/flags.md, made from the declarations: `python -m megapipe.config.document > docs/flags.md` writes it anew, and a test compares."""

from __future__ import annotations

from megapipe.config.fields import ConfigField, all_fields, section_types
from megapipe.config.flags import REQUEST_HELP, default_text
from megapipe.config.megatron_flags import (
    ALREADY_SO,
    CLASSES,
    DELIBERATE_DIFFERENCES,
    REFUSED,
    SUPPORTED,
    megatron_flags,
)
from megapipe.config.values import expected_range
from megapipe.formatting import markdown_table

HEAD = """# Flags

Values come from defaults < YAML files (`--config FILE.yaml`) < flags. Flags carry Megatron's names, with `-` or `_`; a YAML file holds
the same names, or the names of the fields, in sections or flat. `none` takes back an optional value. `--print-config` shows every value
with its origin, as YAML that loads again. Flags marked * are megapipe's own.

This page is made from the declarations: `python -m megapipe.config.document > docs/flags.md`.
"""


def flag_words(field: ConfigField) -> str:
    """All flags of a field as code, our own with a star."""
    words = []
    for flag in field.flags:
        row = megatron_flags().get(flag.name)
        words.append(f"`{flag.name}`" + ("" if row is not None and row.kind == SUPPORTED else "*"))
    return " ".join(words)


def field_row(field: ConfigField) -> tuple[str, ...]:
    """Flags, meaning, unit and default of a field."""
    option = field.option
    meaning = "; ".join(
        filter(
            None, (option.help, "one of " + ", ".join(option.choices) if option.choices else "", expected_range(option))
        )
    )
    return flag_words(field), meaning, option.unit, default_text(field).removeprefix("default: ")


def flags_document() -> str:
    """The whole page."""
    parts = [
        HEAD,
        "## Requests\n",
        markdown_table(("flag", "meaning"), [(f"`{name}`*", text) for name, text in REQUEST_HELP.items()]),
    ]
    for section in section_types():
        rows = [field_row(field) for field in all_fields() if field.section == section]
        parts += [f"## {section}\n", markdown_table(("flags", "meaning", "unit", "default"), rows)]
    differences = [(f"`{d.flag}`", d.megatron, d.here, d.reason) for d in DELIBERATE_DIFFERENCES]
    parts += [
        "## Where megapipe differs from Megatron on purpose\n",
        markdown_table(("flag", "Megatron", "here", "why"), differences),
    ]
    rows_of = {kind: [row for row in megatron_flags().values() if row.kind == kind] for kind in CLASSES}
    counts = ", ".join(f"{len(rows)} {kind}" for kind, rows in rows_of.items())
    refused = [(f"`{row.name}`", f"`{row.default}`" if row.default else "", row.note) for row in rows_of[REFUSED]]
    parts += [
        "## Every flag of Megatron-LM at Megatron-Core 0.16.1\n",
        f"{len(megatron_flags())} flags: {counts}. Nothing is ignored.\n",
        "### Supported\n",
        markdown_table(("flag", "field"), [(f"`{row.name}`", f"`{row.note}`") for row in rows_of[SUPPORTED]]),
        "### Already so here: accepted\n",
        markdown_table(
            ("flag", "values", "why"),
            [(f"`{row.name}`", ", ".join(row.accepts), row.note) for row in rows_of[ALREADY_SO]],
        ),
        "### Refused, with what to do instead\n\nA refused flag is accepted where its value is Megatron's default.\n",
        markdown_table(
            ("flag", "default", "instead"),
            refused,
        ),
    ]
    return "\n".join(parts)


if __name__ == "__main__":
    print(flags_document(), end="")
