"""The command line: which flag sets which field, how argv is read, and `--help`.

Flags come from the fields' declarations. A flag may be spelled with - or _, and its value may follow after a blank or
=. Every error on the command line is a ConfigError of one line.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from megapipe.config.config import all_fields
from megapipe.config.fields import TAKES_VALUE, ConfigField, Flag, expected_range, nearest, value_text
from megapipe.config.megatron_flags import SUPPORTED, megatron_flags
from megapipe.errors import ConfigError


@dataclass(frozen=True)
class Request:
    """A flag that is not part of the configuration. values: "" none follows, "1" one, "?" none or one."""

    help: str
    values: str = ""
    metavar: str | None = None


REQUESTS = {
    "--config": Request(
        (
            "YAML file with the same names, in sections or flat; flags win over it (may be given several times: later "
            "files win)"
        ),
        "1",
        "FILE",
    ),
    "--print-config": Request("print the configuration with the origin of each value, and exit"),
    "--plan": Request("print the plan (grid, stages, parameters, bubble, memory), and exit"),
    "--dry-run": Request(
        "audit every rank, run a step of each kind of rank without data or other ranks, print memory counted and "
        "planned, and exit"
    ),
    "--rank": Request("count only this rank; with --dry-run", "1", "R"),
    "--world-size": Request(
        "plan for this many ranks instead of the ranks that were started; with --plan, --dry-run or --print-config",
        "1",
        "N",
    ),
    "--ranks-per-node": Request("ranks per node of that world (default: all on one node); with --world-size", "1", "N"),
    "--verify-grid": Request(
        (
            "compare a few steps of this grid with a single plain process, in fp64 (the default) or the native dtype, "
            "and exit"
        ),
        "?",
        "MODE",
    ),
    "--help": Request("print this message, and exit"),
}
ABBREVIATIONS = {
    "--tp": "tp is --tensor-model-parallel-size",
    "--pp": "pp is --pipeline-model-parallel-size",
    "--cp": "cp is --context-parallel-size",
    "--dp": "dp is the number of ranks / (tp x pp x cp)",
    "--vpp": "chunks are --num-virtual-stages-per-pipeline-rank",
}
VERIFY_MODES = ("fp64", "native")


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
    help: bool = False


@dataclass(frozen=True)
class GivenFlag:
    """One flag of the command line that belongs to a field. texts: its values as they were given."""

    field: ConfigField
    flag: Flag
    texts: tuple[str, ...]


@dataclass(frozen=True)
class CommandLine:
    """A parsed argv: flags of fields in order, requests, and remarks on Megatron flags that change nothing here."""

    given: tuple[GivenFlag, ...]
    requests: Requests
    remarks: tuple[str, ...]


@cache
def field_flags() -> dict[str, tuple[ConfigField, Flag]]:
    """Return flag name, with dashes -> the field it sets and how."""
    return {flag.name: (field, flag) for field in all_fields() for flag in field.flags}


def takes_values(field: ConfigField, flag: Flag) -> str:
    """Return how many values follow a flag: "" none, "1" one, "+" one or more."""
    if flag.value is not TAKES_VALUE:
        return ""
    return "+" if field.kind.many else "1"


def normalised(token: str) -> str:
    """Return a flag's name with dashes: `--num_layers` is `--num-layers`."""
    return token.replace("_", "-")


def read_command_line(argv: Sequence[str]) -> CommandLine:
    """Read argv (without the program's name). Raises ConfigError at the first error, with a way out."""
    given: list[GivenFlag] = []
    remarks: list[str] = []
    asked: dict[str, list[str]] = {}
    for name, texts in flags_with_values(argv):
        if name in field_flags():
            check_number_of_values(name, texts)
            given.append(GivenFlag(*field_flags()[name], tuple(texts)))
        elif name in REQUESTS:
            check_number_of_values(name, texts)
            asked.setdefault(name, []).extend(texts)
        elif name in megatron_flags():
            remarks.append(megatron_flags()[name].judge(texts))
        else:
            raise ConfigError(f"unknown flag {name}{suggestion(name)} (--help lists all flags)")
    requests = Requests(
        config_files=tuple(asked.get("--config", ())),
        print_config="--print-config" in asked,
        plan="--plan" in asked,
        dry_run="--dry-run" in asked,
        rank=whole_number(asked, "--rank", "the number of a global rank", at_least=0),
        world_size=whole_number(asked, "--world-size", "a whole number of ranks", at_least=1),
        ranks_per_node=whole_number(asked, "--ranks-per-node", "a whole number of ranks", at_least=1),
        verify_grid=[*asked["--verify-grid"], "fp64"][0] if "--verify-grid" in asked else None,
        help="--help" in asked,
    )
    check_requests(requests)
    return CommandLine(tuple(given), requests, tuple(remarks))


def flags_with_values(argv: Sequence[str]) -> Iterable[tuple[str, list[str]]]:
    """Return (flag with dashes, the words that follow it). Raises ConfigError at a word that follows no flag."""
    found: list[tuple[str, list[str]]] = []
    for token in argv:
        if token.startswith("--") or token == "-h":
            name, equals, value = token.partition("=")
            found.append(("--help" if name == "-h" else normalised(name), [value] if equals else []))
        elif not found:
            raise ConfigError(f"{token!r} follows no flag; give a YAML file as --config FILE.yaml")
        else:
            found[-1][1].append(token)
    return found


def check_number_of_values(name: str, texts: list[str]) -> None:
    """Raise ConfigError if one of our flags is followed by too few or too many words."""
    if name in field_flags():
        field, flag = field_flags()[name]
        values, meaning = takes_values(field, flag), unit_and_help(field)
    else:
        values, meaning = REQUESTS[name].values, REQUESTS[name].help
    if values == "" and texts:
        off = f"; to turn it off give {off_flag(name)}" if off_flag(name) else ""
        raise ConfigError(f"{name} takes no value, but {texts[0]} follows it{off}")
    if values in ("1", "+") and not texts:
        raise ConfigError(f"{name} needs a value: {meaning}")
    if values in ("1", "?") and len(texts) > 1:
        raise ConfigError(f"{name} {' '.join(texts)}: expected one value, got {len(texts)}")
    if values == "?" and texts and texts[0] not in VERIFY_MODES:
        raise ConfigError(f"{name} {texts[0]}: choose {' or '.join(VERIFY_MODES)}")


def whole_number(asked: dict[str, list[str]], name: str, expected: str, at_least: int) -> int | None:
    """Return the number that follows a request, None without the request. Raises ConfigError if it is not one."""
    if name not in asked:
        return None
    text = asked[name][-1]
    if not text.isdecimal() or int(text) < at_least:
        raise ConfigError(f"{name} {text}: expected {expected}, at least {at_least}")
    return int(text)


def check_requests(requests: Requests) -> None:
    """Raise ConfigError if the plan of a world is described, but no plan is asked for."""
    if requests.ranks_per_node is not None and requests.world_size is None:
        raise ConfigError(
            "--ranks-per-node needs --world-size N; a world that is started knows the number of ranks on its nodes"
        )
    if requests.rank is not None and not requests.dry_run:
        raise ConfigError(
            "--rank selects the rank that a dry run counts: add --dry-run; ranks that train get their numbers from the "
            "launcher"
        )
    if requests.dry_run and (requests.plan or requests.verify_grid is not None):
        raise ConfigError("--dry-run prints the plan together with its counts; leave --plan and --verify-grid out")
    if requests.world_size is not None and not (requests.plan or requests.print_config or requests.dry_run):
        raise ConfigError(
            "--world-size gives the number of ranks to plan for: add --plan or --dry-run; to train on them start them "
            "(torchrun --nproc-per-node, srun)"
        )


def off_flag(name: str) -> str:
    """Return the flag that turns off what this flag turns on; empty if no flag does."""
    field, flag = field_flags().get(name, (None, None))
    if field is None or flag is None or field.kind.scalar is not bool or flag.value is not True:
        return ""
    return field.flags[1].name


def suggestion(name: str) -> str:
    """Return '; did you mean --x?', preferring the flag of a field of exactly that name."""
    if name in ABBREVIATIONS:
        return f"; {ABBREVIATIONS[name]}"
    for field in all_fields():
        if name == "--" + field.name.replace("_", "-"):
            return f"; the flag of {field.key} is {field.main_flag}"
    return nearest(name, [*field_flags(), *REQUESTS, *megatron_flags()])


def help_text(schedules: Sequence[str] = ()) -> str:
    """Return the text of `--help`: every flag, grouped by section. schedules: names for --pipeline-schedule."""
    parser = argparse.ArgumentParser(
        prog="pretrain_gpt.py",
        usage="[torchrun ...] pretrain_gpt.py [--config FILE.yaml] [flags]",
        description="Pretrain a GPT with tensor, pipeline and data parallelism. Flags have Megatron's names, with - or "
        "_; [megapipe] marks flags that Megatron does not have. Values: defaults < YAML file < flags. `none` "
        "unsets an optional value.",
        add_help=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=38, width=150),
    )
    group = parser.add_argument_group("requests [megapipe]")
    for name, request in REQUESTS.items():
        names = (name, "-h") if name == "--help" else (name,)
        group.add_argument(*names, help=request.help, **parsing(request.values, request.metavar))
    for field in all_fields():
        if group.title != field.section:
            group = parser.add_argument_group(field.section)
        for flag in field.flags:
            help_line = unit_and_help(field, schedules) if flag.name == field.main_flag else flag.help
            if field.kind.scalar is bool and flag.value is False:
                help_line = f"turns {field.main_flag} off"
            row = megatron_flags().get(flag.name)
            mark = "" if row is not None and row.kind == SUPPORTED else " [megapipe]"
            word = {int: "N", float: "X", str: "WORD" if field.option.choices else "TEXT", bool: None}[
                field.kind.scalar
            ]
            help_line = (help_line + mark).replace("%", "%%")
            group.add_argument(flag.name, help=help_line, **parsing(takes_values(field, flag), word))
    return parser.format_help()


def parsing(values: str, metavar: str | None) -> dict[str, Any]:
    """Return argparse's settings for a flag that is followed by that many values."""
    if values == "":
        return {"action": "store_true"}
    return {"nargs": None if values == "1" else values, "metavar": metavar}


def choices_of(field: ConfigField, schedules: Sequence[str]) -> Sequence[str]:
    """Return the choices of a field. schedules: those of --pipeline-schedule, which the schedule package defines."""
    return schedules if field.key == "parallel.pipeline_schedule" else field.option.choices


def unit_and_help(field: ConfigField, schedules: Sequence[str] = ()) -> str:
    """Return help, choices or range, unit and default of a field."""
    option = field.option
    parts = [option.help]
    if choices := choices_of(field, schedules):
        parts.append("one of " + ", ".join(choices))
    details = [f"unit: {option.unit}"] if option.unit else []
    if expected_range(option):
        details.append(expected_range(option))
    details.append(default_text(field))
    return "; ".join(parts) + f" ({'; '.join(details)})"


def default_text(field: ConfigField) -> str:
    """Return 'required', 'default: x', or from what the value is derived."""
    if field.option.required:
        return "required"
    if field.default is None:
        return f"default: {field.option.derived}" if field.option.derived else "default: none"
    return f"default: {value_text(field.default)}"
