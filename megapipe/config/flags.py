"""The command line: which flag sets which field, how argv is read, and `--help`.

A flag may be spelled with - or _, and its value may follow after a blank or =. All errors are reported, each in a line.
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from megapipe.config.config import all_fields, fields_by_key
from megapipe.config.fields import expected_range, nearest_word, read_value, value_text
from megapipe.config.megatron_flags import SUPPORTED, WITHOUT, megatron_flags, row_of
from megapipe.config.options import NONE_WORDS, TAKES_VALUE, ConfigField, Flag, Need
from megapipe.config.problems import Problems
from megapipe.errors import ConfigError
from megapipe.formatting import shortened


@dataclass(frozen=True)
class Request:
    """A flag that is not part of the configuration. values: "" none follows, "1" one, "?" none or one."""

    help: str
    values: str = ""
    metavar: str | None = None


REQUESTS = {
    "--config": Request(
        "YAML file with the same names, or the name of a supplied one (megapipe configs); flags win over it",
        "1",
        "FILE",
    ),
    "--print-config": Request("print the configuration with the origin of each value, and exit"),
    "--plan": Request("print the plan (grid, stages, parameters, bubble, memory), and exit"),
    "--dry-run": Request("audit all ranks, run a step of each kind, print counted and planned memory, and exit"),
    "--rank": Request("count only this rank; with --dry-run", "1", "R"),
    "--world-size": Request("plan for N ranks, not those started; with --plan, --dry-run or --print-config", "1", "N"),
    "--ranks-per-node": Request("ranks per node of that world (default: all on one node); with --world-size", "1", "N"),
    "--verify-grid": Request("compare this grid with one process, in fp64 (default) or native, and exit", "?", "MODE"),
    "--explain-defaults": Request("list the defaults that differ from Megatron's, as for a script of Megatron's"),
    "--help": Request("print this message, and exit"),
}
ABBREVIATIONS = {
    "--tp": "tp is --tensor-model-parallel-size",
    "--pp": "pp is --pipeline-model-parallel-size",
    "--cp": "cp is --context-parallel-size",
    "--dp": "dp is the number of ranks / (tp x pp x cp)",
    "--nproc-per-node": "it belongs to the launcher: megapipe launch --nproc-per-node N pretrain ...",
    "--ranks-per-gpu": "it belongs to the launcher: megapipe launch --ranks-per-gpu N pretrain ...",
    "--vpp": "chunks are --num-virtual-stages-per-pipeline-rank",
}
SYNONYMS = {  # names of other frameworks
    "--learning-rate": "--lr",
    "--min-learning-rate": "--min-lr",
    "--max-grad-norm": "--clip-grad",
    "--gradient-clipping": "--clip-grad",
    "--max-steps": "--train-iters",
    "--output-dir": "--save",
    "--num-key-value-heads": "--num-query-groups",
    "--rope-theta": "--rotary-base",
}
ANSWERS = ("--print-config", "--plan", "--dry-run", "--verify-grid")  # in place of training; one at a time
VERIFY_MODES = ("fp64", "native")  # the first is the default
MOST_DIGITS = 9  # of a number of ranks
REQUESTED_NUMBERS = {"--rank": 0, "--world-size": 1, "--ranks-per-node": 1}  # the smallest value of each


@dataclass(frozen=True)
class Requests:
    """The requests of a command line besides the configuration."""

    config_files: tuple[str, ...] = ()
    print_config: bool = False
    plan: bool = False
    dry_run: bool = False
    rank: int | None = None  # the only rank that a dry run counts; None: one of each kind
    world_size: int | None = None  # of a world that is only planned
    ranks_per_node: int | None = None
    verify_grid: str | None = None  # fp64 or native
    explain_defaults: bool = False
    help: bool = False

    @property
    def only_plans(self) -> bool:
        """True if no rank trains or computes: a plan, a dry run or the printed configuration."""
        return self.plan or self.dry_run or self.print_config


@dataclass(frozen=True)
class Setting:
    """One field set to one value by one source."""

    field: ConfigField
    value: Any
    origin: str  # 'flag --x', 'yaml FILE line N'
    subject: str  # for errors: '--bf16', 'tiny.yaml line 3: bf16'
    only_from: tuple[Any, ...] | None = None  # this and the next: as in Flag
    needs: Need | None = None
    implied_by: str = ""  # key of the field whose setting brings this one, for a field that nothing else gives


@dataclass(frozen=True)
class CommandLine:
    """A parsed argv: settings in order, requests, and the accepted flags of Megatron that change no result here."""

    settings: list[Setting]
    requests: Requests
    accepted: tuple[str, ...]  # with their values


@cache
def field_flags() -> dict[str, tuple[ConfigField, Flag]]:
    """Return flag name, with dashes -> the field it sets and how."""
    return {flag.name: (field, flag) for field in all_fields() for flag in field.flags}


def takes_values(field: ConfigField, flag: Flag) -> str:
    """Return how many values follow a flag: "" none, "1" one, "+" one or more."""
    if flag.value is not TAKES_VALUE:
        return ""
    return "+" if field.kind.many and flag.read is None else "1"


def flag_words(field: ConfigField, value: Any) -> list[str]:
    """Return the words of a command line that give a field a value."""
    flag = next(flag for flag in field.flags if flag.value is TAKES_VALUE or flag.value is value)
    if flag.value is not TAKES_VALUE:
        return [flag.name]
    values = value if isinstance(value, list | tuple) else [value]
    return [flag.name, *(NONE_WORDS[0] if each is None else str(each) for each in values)]


def normalised(token: str) -> str:
    """Return a flag's name with dashes: `--num_layers` is `--num-layers`."""
    return token.replace("_", "-")


def read_command_line(argv: Sequence[str], problems: Problems | None = None) -> CommandLine:
    """Read argv (without the program's name). problems: receives all errors; without it they raise one ConfigError."""
    found = Problems() if problems is None else problems
    given: list[tuple[str, list[str]]] = []  # (flag with dashes, the words that follow it)
    for token in argv:
        if token.startswith("--") or token == "-h":
            name, equals, value = token.partition("=")
            flag_name = "--help" if name == "-h" else normalised(name)
            given.append((flag_name, [value] if equals else []))
        elif not given:
            found.add(f"{shortened(token)!r} follows no flag; give a YAML file as --config FILE.yaml")
            found.hides_fields = True
        else:
            given[-1][1].append(token)
    settings: list[Setting] = []
    accepted: list[str] = []
    asked: dict[str, list[str]] = {}
    for name, texts in given:
        if name in field_flags():
            field, flag = field_flags()[name]
            with found.caught(field.key, *(f"{field.section}.{other}" for other, _ in flag.also_sets)):
                settings += read_setting(name, texts)
        elif name in REQUESTS:
            with found.caught():
                check_number_of_values(name, texts)
                if name == "--config":
                    asked.setdefault(name, []).extend(texts)
                else:
                    asked[name] = texts
        elif (row := row_of(name)) is not None:
            with found.caught():
                accepted.append(row.judge(texts))
        else:
            found.add(f"unknown flag {shortened(name)}{suggestion(name)} (--help lists all flags)")
            found.hides_fields = True
            if (meant := meant_flag(name)) in field_flags():
                found.unread.add(field_flags()[meant][0].key)
    requests = read_requests(asked, found)
    if problems is None:
        found.raise_all()
    return CommandLine(settings, requests, tuple(dict.fromkeys(accepted)))


def read_setting(name: str, texts: list[str]) -> list[Setting]:
    """Return what a flag sets. texts: the words that follow it. Raises ConfigError."""
    field, flag = field_flags()[name]
    check_number_of_values(name, texts)
    value = flag.value
    if texts and flag.read is not None:
        texts = list(flag.read(texts[0]))
        if not texts:
            raise ConfigError(f"{name}: the file is empty")
    if texts:
        value = read_value(field, texts if field.kind.many else texts[0], name)
    return settings_of(field, flag, value, f"flag {name}", name)


def settings_of(field: ConfigField, flag: Flag, value: Any, origin: str, subject: str) -> list[Setting]:
    """Return the settings of a flag's own field and of those that it also sets."""
    others = [(fields_by_key()[f"{field.section}.{name}"], constant) for name, constant in flag.also_sets]
    settings = [Setting(field, value, origin, subject, flag.only_from, flag.needs)]
    settings += [Setting(other, constant, origin, subject) for other, constant in others]
    implied = [(fields_by_key()[f"{field.section}.{name}"], constant) for name, constant in flag.or_else]
    return settings + [Setting(other, constant, origin, subject, implied_by=field.key) for other, constant in implied]


def check_number_of_values(name: str, texts: list[str]) -> None:
    """Raise ConfigError if one of our flags is followed by too few or too many words."""
    if name in field_flags():
        field, flag = field_flags()[name]
        values, meaning = takes_values(field, flag), unit_and_help(field)
    else:
        values, meaning = REQUESTS[name].values, REQUESTS[name].help
    if values == "" and texts:
        off = f"; to turn it off give {off_flag(name)}" if off_flag(name) else ""
        raise ConfigError(f"{name} takes no value, but {shortened(texts[0])} follows it{off}")
    if values in ("1", "+") and (not texts or (name in REQUESTS and texts[0] in ("", "--"))):
        raise ConfigError(f"{name} needs a value: {meaning}")
    if values in ("1", "?") and len(texts) > 1:
        raise ConfigError(f"{name} {shortened(' '.join(texts))}: expected one value, got {len(texts)}")


def read_requests(asked: dict[str, list[str]], problems: Problems) -> Requests:
    """Read the requests of a command line: name -> values of its last occurrence. problems: receives the errors."""
    numbers: dict[str, Any] = {}
    for name, least in REQUESTED_NUMBERS.items():
        text = asked[name][0] if name in asked else ""
        is_number = len(text) <= MOST_DIGITS and text.isascii() and text.isdecimal() and int(text) >= least
        if name in asked and not is_number:
            problems.add(f"{name} {shortened(text)}: expected a whole number, at least {least}")
        numbers[name[2:].replace("-", "_")] = int(text) if is_number else None
    mode = (asked["--verify-grid"] or [VERIFY_MODES[0]])[0] if "--verify-grid" in asked else None
    if mode not in (None, *VERIFY_MODES):
        problems.add(f"--verify-grid {shortened(mode)}: choose {' or '.join(VERIFY_MODES)}")
    names = ("print_config", "plan", "dry_run", "explain_defaults", "help")
    given = {name: f"--{normalised(name)}" in asked for name in names}
    requests = Requests(tuple(asked.get("--config", ())), verify_grid=mode, **given, **numbers)
    if "--ranks-per-node" in asked and "--world-size" not in asked:
        problems.add("--ranks-per-node needs --world-size N; ranks that are started know their nodes")
    if "--rank" in asked and not requests.dry_run:
        problems.add("--rank selects the rank that --dry-run counts: add it; launchers number ranks that train")
    answers = [name for name in ANSWERS if name in asked]
    if len(answers) > 1:
        hint = "; --dry-run prints the plan together with its counts" if "--dry-run" in answers else ""
        problems.add(f"{' and '.join(answers)} are different requests; give one of them{hint}")
    if "--world-size" in asked and not (requests.plan or requests.print_config or requests.dry_run):
        way = "add --plan or --dry-run; to train on them start them (torchrun --nproc-per-node, srun)"
        problems.add(f"--world-size gives the number of ranks to plan for: {way}")
    return requests


def off_flag(name: str) -> str:
    """Return the flag that turns off what this flag turns on; empty if no flag does."""
    if name not in field_flags():
        return ""
    field, flag = field_flags()[name]
    return field.flags[1].name if field.kind.scalar is bool and flag.value is True else ""


def suggestion(name: str) -> str:
    """Return '; did you mean --x?', preferring the flag of a field of exactly that name."""
    if name in ABBREVIATIONS:
        return f"; {ABBREVIATIONS[name]}"
    for field in all_fields():
        if name == "--" + normalised(field.name):
            return f"; the flag of {field.key} is {field.main_flag}"
    meant = meant_flag(name)
    return f"; did you mean {meant}?" if meant else ""


def meant_flag(name: str, others: Sequence[str] = ()) -> str:
    """Return the flag that an unknown one probably means; never a refused one, nor one that says the opposite.

    others: flags besides those of pretrain_gpt.py, such as a command's own.
    """
    if name in SYNONYMS:
        return SYNONYMS[name]
    accepted = (row.name for row in megatron_flags().values() if row.kind not in WITHOUT)
    meant = nearest_word(name, [*others, *field_flags(), *REQUESTS, *accepted], cutoff=0.8)
    return meant if is_negative(meant) == is_negative(name) and are_alike(meant, name) else ""


def are_alike(name: str, other: str) -> bool:
    """Return True unless two flags of as many words differ in one that is no misspelling: num-layers, noop-layers."""
    pairs = list(zip(name.split("-"), other.split("-"), strict=False))
    is_as_long = name.count("-") == other.count("-")
    return not is_as_long or all(one == two or nearest_word(one, [two]) for one, two in pairs)


def is_negative(name: str) -> bool:
    """Return True for a flag that turns something off."""
    return name.startswith(("--no-", "--disable-"))


def help_text(schedules: Sequence[str] = ()) -> str:
    """Return the text of `--help`: every flag, grouped by section. schedules: names for --pipeline-schedule."""
    parser = argparse.ArgumentParser(
        prog="pretrain_gpt.py",
        usage="[torchrun ...] pretrain_gpt.py [--config FILE.yaml] [flags]",
        description="Pretrain a GPT with tensor, pipeline and data parallelism. Flags have Megatron's names, with - or "
        "_; [megapipe] marks flags that Megatron does not have. Values: defaults < YAML file < flags. `none` "
        "unsets an optional value or a list.",
        add_help=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=38, width=150),
    )
    group = parser.add_argument_group("requests [megapipe]")

    def add(names: tuple[str, ...], help_line: str, values: str, metavar: str | None) -> None:
        kwargs: dict[str, Any] = {"nargs": None if values == "1" else values, "metavar": metavar}
        group.add_argument(*names, help=help_line.replace("%", "%%"), **kwargs if values else {"action": "store_true"})

    for name, request in REQUESTS.items():
        add((name, "-h") if name == "--help" else (name,), request.help, request.values, request.metavar)
    for field in all_fields():
        if group.title != field.section:
            group = parser.add_argument_group(field.section)
        metavar = {int: "N", float: "X", str: "WORD" if field.option.choices else "TEXT"}.get(field.kind.scalar)
        for flag in field.flags:
            row = megatron_flags().get(flag.name)
            mark = "" if row is not None and row.kind == SUPPORTED else " [megapipe]"
            help_line = flag.help or unit_and_help(field, schedules)
            add((flag.name,), help_line + mark, takes_values(field, flag), metavar)
    return parser.format_help()


def choices_of(field: ConfigField, schedules: Sequence[str]) -> Collection[str]:
    """Return the choices of a field. schedules: those of --pipeline-schedule, which the schedule package defines."""
    return schedules if field.key == "parallel.pipeline_schedule" else field.option.choices


def unit_and_help(field: ConfigField, schedules: Sequence[str] = ()) -> str:
    """Return help, choices or range, unit and default of a field."""
    option = field.option
    choices = choices_of(field, schedules)
    text = option.help + ("; one of " + ", ".join(choices) if choices else "")
    details = (f"unit: {option.unit}" if option.unit else "", expected_range(option), default_text(field))
    return f"{text} ({'; '.join(filter(None, details))})"


def default_text(field: ConfigField) -> str:
    """Return 'required', 'default: x', or from what the value is derived."""
    if field.option.required:
        return "required"
    if field.default is None:
        return f"default: {field.option.derived or 'none'}"
    return f"default: {value_text(field.default)}"
