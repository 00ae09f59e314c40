"""Flags of a Megatron-LM command line -> what happens to each here, and the report of it.

Each flag is read by `read_command_line` and all accepted ones together by `load_config`, which read the command line of
pretrain_gpt.py: there is no second table of what is supported.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megapipe.config.config import all_fields, value_of
from megapipe.config.fields import shown as value_shown
from megapipe.config.fields import value_text
from megapipe.config.flags import REQUESTS, field_flags, normalised, read_command_line, takes_values
from megapipe.config.load import LoadedConfig, is_given, load_config
from megapipe.config.megatron_flags import NOT_SUPPORTED, WITHOUT, megatron_flags
from megapipe.config.rules.check import remarks
from megapipe.errors import ConfigError
from megapipe.extras.migrate.shell_script import CLOSE, OPEN, Call, Decision, is_known, shown
from megapipe.formatting import count_text, text_table

SAME = "the same here"
TAKEN_AS = "taken as"
NO_EFFECT = "no effect here"
REFUSED = "refused"
UNKNOWN = "unknown"
OUTSIDE = "set outside the script"
TO_CHANGE = (REFUSED, UNKNOWN)
VARIABLE = re.compile(rf"{OPEN}\$(?!\()[^{CLOSE}]*{CLOSE}", re.DOTALL)  # a word that is one placeholder of a variable
MANY = "*"  # any number of values: of a flag that is not known


@dataclass(frozen=True)
class Row:
    """One flag of the script with its values as written, and what happens to it here."""

    flag: str
    values: tuple[str, ...]
    outcome: str  # SAME, TAKEN_AS, NO_EFFECT, REFUSED, UNKNOWN or OUTSIDE
    note: str = ""

    @property
    def text(self) -> str:
        """The flag with its values."""
        return " ".join([self.flag, *self.values])


@dataclass(frozen=True)
class Judgement:
    """The judgement of all flags of a command line."""

    rows: tuple[Row, ...]
    more: tuple[str, ...]  # variables that can hold more arguments
    problems: tuple[str, ...]  # rules that the accepted flags break together
    loaded: LoadedConfig | None  # None if they cannot be read together
    unchecked: tuple[str, ...]  # flags whose values are not known, so that rules about them are not checked

    @property
    def runs(self) -> bool:
        """Whether nothing has to be changed."""
        return not self.problems and not any(row.outcome in TO_CHANGE for row in self.rows)


def judge(arguments: Sequence[str]) -> Judgement:
    """Judge the arguments of pretrain_gpt.py. What is not known in them is a placeholder."""
    rows, more, accepted, unchecked = [], [], [], []
    for flag, values in grouped(arguments):
        name, megatrons = normalised(flag), megatron_flags().get(normalised(flag))
        # how many values follow ("" none, "1" one, "+" one or more), and if any text is one, such as a path
        count = MANY if megatrons is None else megatrons.values
        takes_text = megatrons is None or not megatrons.accepts
        if name in field_flags():
            field, form = field_flags()[name]
            count = takes_values(field, form)
            is_read = field.option.read is not None or form.read is not None
            takes_text = field.kind.scalar is str and not field.option.choices and not is_read
        elif name in REQUESTS:
            count = REQUESTS[name].values
        rest = [value for value in values[count != "" :] if VARIABLE.fullmatch(value) and count not in ("+", MANY)]
        more += [shown(value) for value in rest]
        values = [value for at, value in enumerate(values) if (at == 0 and count) or value not in rest]
        texts = tuple(map(shown, values))
        if not all(map(is_known, values)) and not takes_text:
            row = Row(flag, texts, OUTSIDE)
        else:
            row = judge_flag(flag, texts)
        if row.outcome == OUTSIDE:
            unchecked += [name] if name in field_flags() else []
        elif row.outcome not in TO_CHANGE:
            accepted += [flag, *texts]
        rows.append(row)
    loaded, problems = None, []
    try:
        loaded = load_config(accepted, is_job=not unchecked)
    except ConfigError as error:
        problems = str(error).splitlines()
    return Judgement(tuple(rows), tuple(dict.fromkeys(more)), tuple(problems), loaded, tuple(unchecked))


def grouped(arguments: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Return each flag as written with the words that follow it, as `read_command_line` groups them."""
    found: list[tuple[str, list[str]]] = []
    for word in arguments:
        if word.startswith("--"):
            flag, equals, value = word.partition("=")
            found.append((flag, [value] if equals else []))
        elif found and found[-1][0].startswith("--"):
            found[-1][1].append(word)
        else:
            found.append((word, []))
    return found


def judge_flag(flag: str, values: Sequence[str]) -> Row:
    """Judge one flag with its values, regardless of others."""
    name, texts = normalised(flag), tuple(values)
    try:
        line = read_command_line([flag, *values])
    except ConfigError as error:
        is_megatrons = name in field_flags() or name in megatron_flags()
        return Row(flag, texts, REFUSED if is_megatrons else UNKNOWN, str(error))
    if line.settings:
        field, _ = field_flags()[name]
        value = line.settings[0].value
        written = tuple(values) if isinstance(value, tuple) else " ".join(values)
        if field.kind.scalar is not str or not values or value == written:
            return Row(flag, texts, SAME)
        others = [value_shown(each.field, each.value) for each in line.settings[1:]]
        return Row(flag, texts, TAKEN_AS, " ".join([value_shown(field, value), *others]))
    row = megatron_flags().get(name)
    if row is None:  # a request, such as --print-config
        return Row(flag, texts, SAME)
    return Row(flag, texts, NO_EFFECT, "it is Megatron's default" if row.kind in WITHOUT else row.note)


@dataclass(frozen=True)
class World:
    """The ranks that a launcher starts; None where it does not say."""

    size: int | None
    ranks_per_node: int | None


def world_of(launcher: Sequence[str], variables: Mapping[str, Sequence[str]]) -> World:
    """Return the ranks that the words before the training script start. variables: those of the script."""
    text = " ".join(word for word in launcher if is_known(word))

    def number(names: str) -> int | None:
        match = re.search(rf"(?:^|\s)(?:{names})[= ](\d+)(?=\s|$)", text)
        return int(match[1]) if match else None

    def variable(name: str) -> int | None:
        value = "".join(variables.get(name, ""))
        return int(value) if value.isdecimal() else None

    per_node = number("--nproc[-_]per[-_]node")
    if per_node is not None or re.search(r"torchrun|torch\.distributed", text):
        given = any(re.match(r"--nnodes", word) for word in launcher)
        nodes = number("--nnodes") if given else 1
        return World(per_node * nodes if per_node and nodes else None, per_node)
    if re.search(r"(?:^|[\s/])(mpirun|mpiexec|mpirun_rsh)(?=\s|$)", text):
        return World(number("-n|-np|--np|-c"), number("--npernode|-npernode|-ppn"))
    size, per_node = variable("SLURM_NTASKS"), variable("SLURM_NTASKS_PER_NODE")
    return World(number("--ntasks|-n") or size, number("--ntasks-per-node") or per_node)


# ---------------------------------------------------------------------------------------------------------- the report

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

    @property
    def remarks(self) -> tuple[str, ...]:
        """The lines that a run prints at its start about options that are accepted without their own effect."""
        return () if self.judgement.loaded is None else tuple(remarks(self.judgement.loaded.config))

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


def text_report(migration: Migration) -> Iterator[str]:
    """Yield the lines of the report."""
    call, judgement = migration.call, migration.judgement
    num_flags = count_text(len(judgement.rows), "flag")
    where = f", line {call.line}" if call.line else ""
    yield f"{migration.source}{where}: {shown(call.script)} with {num_flags}"
    table = [("flag of the script", "here")]
    for row in judgement.rows:
        note = row.note.removeprefix(row.text).removeprefix(f" {NOT_SUPPORTED}")
        outcome = f"{row.outcome}: {note.removeprefix(': ')}" if note else row.outcome
        if row.outcome == TAKEN_AS:
            outcome = f"{TAKEN_AS} {row.note}"
        table.append((row.text if len(row.text) <= WIDEST else f"{row.text[: WIDEST - 3]}...", outcome))
    yield from text_table(table, left=(0, 1))
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
    yield from headed("a run says at its start", migration.remarks)
    yield from headed("to change", migration.to_change)
    verdict = "runs as it is" if migration.runs else "runs after these changes"
    but = " with files that are missing or named outside it" if migration.missing or migration.outside() else ""
    yield f"the script {verdict}{but if migration.runs else ''}; the command:"
    yield migration.command()


def written(migration: Migration) -> str:
    """Return the configuration as YAML that --config reads: what the script gives, with every decision as a comment.

    Raises ConfigError if the flags cannot be read together.
    """
    judgement, loaded = migration.judgement, migration.judgement.loaded
    if loaded is None or judgement.unchecked:
        is_open = (f"the value of {name} is open: give --set NAME=VALUE" for name in judgement.unchecked)
        why = dict.fromkeys(judgement.problems or is_open)
        raise ConfigError("\n".join(f"--write: {line}" for line in why))
    lines = [f"# from {migration.source}: {migration.world}"]
    for row in judgement.rows:
        if row.outcome in (*TO_CHANGE, NO_EFFECT, TAKEN_AS):
            note = row.note.removeprefix(row.text).removeprefix(f" {NOT_SUPPORTED}").removeprefix(": ")
            word = "left out" if row.outcome in TO_CHANGE else row.outcome
            lines.append(f"# {row.text}: {word}" + (f": {note}" if note else ""))
    lines += [f"# {each.condition} (line {each.line}): {each.outcome}" for each in migration.decisions]
    lines += [f"# {text}" for text in (*migration.remarks, *migration.grid_problems)]
    lines += [f"# set outside the script: {what} ({', '.join(flags)})" for what, flags in migration.outside().items()]
    section = ""
    for field in all_fields():
        if is_given(loaded.origins[field.key]) or value_of(loaded.config, field) != field.default:
            lines += [] if field.section == section else ["", f"{field.section}:"]
            section = field.section
            origin = loaded.origins[field.key].removeprefix("flag ")
            lines.append(f"  {field.name}: {value_text(value_of(loaded.config, field))}  # {origin}")
    return "\n".join(lines) + "\n"


def headed(title: str, lines: list[str] | tuple[str, ...]) -> Iterator[str]:
    """Yield a title and indented lines, or nothing without lines."""
    if lines:
        yield f"{title}:"
        yield from (f"  {line}" for line in lines)


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
        "remarks": list(migration.remarks),
        "to_change": list(migration.to_change),
        "command": migration.command(),
    }
