"""The report of `megapipe migrate`: a table of flags, what is missing, and the command to run; as text and as JSON."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from megapipe.extras.migrate.judge import TAKEN_AS, TO_CHANGE, Judgement, Row
from megapipe.extras.migrate.shell_script import Call, Decision, shown
from megapipe.formatting import count_text, text_table

WIDEST = 60  # of the left column; longer values are cut in the table, not in the command and the JSON


@dataclass(frozen=True)
class Migration:
    """Everything that the report says of one call of pretrain_gpt.py."""

    source: str  # the script, or "the command line"
    call: Call
    judgement: Judgement
    decisions: tuple[Decision, ...]
    notes: tuple[str, ...]
    world: str  # the ranks and the grid in words
    grid_problems: tuple[str, ...]
    missing: tuple[tuple[str, str], ...]  # (flag, path)

    @property
    def runs(self) -> bool:
        """Whether the script runs as it is, but for missing files."""
        return self.judgement.runs and not self.grid_problems

    @property
    def to_change(self) -> tuple[str, ...]:
        """Return the changes that are needed, a line each."""
        rows = [row.note for row in self.judgement.rows if row.outcome in TO_CHANGE]
        return (*dict.fromkeys(rows), *self.judgement.problems, *self.grid_problems)

    def outside(self) -> dict[str, list[str]]:
        """Return what is set outside the script -> the flags that use it."""
        found: dict[str, list[str]] = {}
        for row in self.judgement.rows:
            if any("$" in value for value in row.values):
                found.setdefault(" ".join(value for value in row.values if "$" in value), []).append(row.flag)
        return found

    def command(self) -> str:
        """Return the command to run: that of the script, without the flags that are refused or unknown."""
        words = [*map(shown, self.call.launcher), "pretrain_gpt.py"]
        lines = [" ".join(map(quoted, words))]
        for row in self.judgement.rows:
            if row.outcome not in TO_CHANGE:
                lines.append(" ".join([row.flag, *map(quoted, row.values)]))
        lines += list(self.judgement.more)
        return " \\\n    ".join(lines)


def quoted(word: str) -> str:
    """Return a word for a shell; one that the shell expands is put in double quotes."""
    if "$" not in word:
        return shlex.quote(word)
    return word if word.startswith("--") else '"' + word.replace('"', '\\"') + '"'


def right_column(row: Row) -> str:
    """Return the outcome of a flag in the words of the table."""
    if row.outcome == TAKEN_AS:
        return f"{TAKEN_AS} {row.note}"
    note = row.note.removeprefix(row.text).removeprefix(" is a flag of Megatron that megapipe does not support")
    return f"{row.outcome}: {note.removeprefix(': ')}" if note else row.outcome


def text_report(migration: Migration) -> Iterator[str]:
    """Yield the lines of the report."""
    call, judgement = migration.call, migration.judgement
    num_flags = count_text(len(judgement.rows), "flag")
    where = f", line {call.line}" if call.line else ""
    yield f"{migration.source}{where}: {shown(call.script)} with {num_flags}"
    table = [(cut(row.text), right_column(row)) for row in judgement.rows]
    yield from text_table([("flag of the script", "here"), *table], left=(0, 1))
    counts = Counter(row.outcome for row in judgement.rows)
    yield "  " + ", ".join(f"{number} {outcome}" for outcome, number in counts.items())
    yield from headed("set outside the script", [f"{what} ({', '.join(flags)})" for what, flags in
                                                 migration.outside().items()])  # fmt: skip
    if judgement.more:
        yield f"  more arguments, if they are set: {' '.join(judgement.more)}"
    if judgement.unchecked:
        names = ", ".join(dict.fromkeys(judgement.unchecked))
        yield f"  rules between flags are not checked, since {names} is open: give --set NAME=VALUE"
    decided = [f"line {each.line}: {each.condition}: {each.outcome}" for each in migration.decisions]
    yield from headed("conditions of the script that decide about these flags", decided)
    yield from headed("not followed", migration.notes)
    yield f"ranks: {migration.world}"
    yield from headed("files that are not here", [f"{path} ({flag})" for flag, path in migration.missing])
    if any(row.flag.replace("_", "-") == "--load" for row in judgement.rows):
        yield "--load: a checkpoint of Megatron-LM is converted first: megapipe convert (docs/convert.md)"
    yield from headed("to change", migration.to_change)
    verdict = "runs as it is" if migration.runs else "runs after these changes"
    but = " with files that are missing or named outside it" if migration.missing or migration.outside() else ""
    yield f"the script {verdict}{but if migration.runs else ''}; the command:"
    yield migration.command()


def headed(title: str, lines: list[str] | tuple[str, ...]) -> Iterator[str]:
    """Yield a title and indented lines, or nothing without lines."""
    if lines:
        yield f"{title}:"
        yield from (f"  {line}" for line in lines)


def cut(text: str) -> str:
    """Return a text for the left column."""
    return text if len(text) <= WIDEST else f"{text[: WIDEST - 3]}..."


def json_report(migration: Migration) -> dict[str, Any]:
    """Return the report as values for JSON."""
    judgement = migration.judgement
    return {
        "script": migration.source,
        "line": migration.call.line,
        "runs": migration.runs,
        "flags": [asdict(row) for row in judgement.rows],
        "set_outside": migration.outside(),
        "more_arguments": list(judgement.more),
        "unchecked": list(judgement.unchecked),
        "conditions": [
            {"line": each.line, "condition": each.condition, "outcome": each.outcome} for each in migration.decisions
        ],
        "not_followed": list(migration.notes),
        "ranks": migration.world,
        "missing_files": [{"flag": flag, "path": path} for flag, path in migration.missing],
        "to_change": list(migration.to_change),
        "command": migration.command(),
    }
