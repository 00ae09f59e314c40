"""The command line: which flag sets which field, how argv is read, and `--help`.

Flags are made from the fields' declarations. A flag may be spelt with - or _ and its value set off by a blank or =.
Everything that is wrong on the command line is a ConfigError in one line; argparse lists and collects, its own messages are never shown.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NoReturn

from megapipe.config.fields import ConfigField, all_fields
from megapipe.config.megatron_flags import SUPPORTED, megatron_flags
from megapipe.config.option import TAKES_VALUE, Flag
from megapipe.config.values import expected_range, nearest, value_text
from megapipe.errors import ConfigError

REQUEST_HELP = {
    "--config": "YAML file with the same names, in sections or flat; flags win over it (may be given more than once: later files win)",
    "--print-config": "print the configuration with the origin of each value, and leave",
    "--plan": "print the plan (grid, stages, parameters, bubble, memory), and leave",
    "--dry-run": "audit every rank, take a step of each kind of rank without data or other ranks, print memory counted and planned, "
    "and leave",
    "--rank": "the one rank to count; with --dry-run",
    "--world-size": "plan for this many ranks instead of those that are started; with --plan, --dry-run or --print-config",
    "--ranks-per-node": "ranks of a node of that world (default: all on one node); with --world-size",
    "--verify-grid": "compare a few steps of this grid with one plain process, and leave: fp64 (the default) or native dtype",
    "--help": "print this, and leave",
}
ABBREVIATIONS = {
    "--tp": "tp is --tensor-model-parallel-size",
    "--pp": "pp is --pipeline-model-parallel-size",
    "--cp": "cp is --context-parallel-size",
    "--dp": "dp is the number of ranks / (tp x pp x cp)",
    "--vpp": "chunks are --num-virtual-stages-per-pipeline-rank",
}
VERIFY_MODES = ("fp64", "native")
REQUEST_VALUES = {
    "--config": "1",
    "--world-size": "1",
    "--ranks-per-node": "1",
    "--rank": "1",
    "--verify-grid": "?",
}  # words that follow; others: none


@dataclass(frozen=True)
class Requests:
    """What the command line asks for besides the configuration."""

    config_files: tuple[str, ...] = ()
    print_config: bool = False
    plan: bool = False
    dry_run: bool = False
    rank: int | None = None  # the one that a dry run counts; None: one of each kind
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
    """What argv says: flags of fields in their order, requests, and remarks on Megatron flags that are already so here."""

    given: tuple[GivenFlag, ...]
    requests: Requests
    remarks: tuple[str, ...]


@cache
def field_flags() -> dict[str, tuple[ConfigField, Flag]]:
    """Flag name, with dashes -> the field it sets and how."""
    return {flag.name: (field, flag) for field in all_fields() for flag in field.flags}


def takes_values(field: ConfigField, flag: Flag) -> str:
    """How many values follow a flag: "" none, "1" one, "+" one or more."""
    if flag.value is not TAKES_VALUE:
        return ""
    return "+" if field.kind.many else "1"


def normalised(token: str) -> str:
    """A flag's name with dashes: `--num_layers` is `--num-layers`."""
    return token.replace("_", "-")


def read_command_line(argv: Sequence[str]) -> CommandLine:
    """Reads argv (without the program's name). Raises ConfigError at the first thing that is wrong, with a way out."""
    known: list[str] = []
    remarks: list[str] = []
    for name, texts in flags_with_values(argv):
        if name in field_flags() or name in REQUEST_HELP or name == "-h":
            refuse_wrong_count(name, texts)
            known += [f"{name}={texts[0]}"] if len(texts) == 1 else [name, *texts]
        elif name in megatron_flags():
            remarks.append(megatron_flags()[name].judge(texts))
        else:
            raise ConfigError(f"{name} is no flag{suggestion(name)} (--help lists all flags)")
    parsed = command_line_parser().parse_args(known)
    requests = Requests(
        config_files=tuple(parsed.config or ()),
        print_config=parsed.print_config,
        plan=parsed.plan,
        dry_run=parsed.dry_run,
        rank=rank_number(parsed.rank),
        world_size=at_least_one("--world-size", parsed.world_size),
        ranks_per_node=at_least_one("--ranks-per-node", parsed.ranks_per_node),
        verify_grid=parsed.verify_grid,
        help=parsed.help,
    )
    refuse_imagined_world(requests)
    return CommandLine(given=tuple(parsed.given or ()), requests=requests, remarks=tuple(remarks))


def at_least_one(name: str, text: str | None) -> int | None:
    """The number that follows a request. Raises ConfigError for anything but a whole number above 0."""
    if text is None:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"{name} {text}: expected a whole number of ranks, at least 1")
    return int(text)


def rank_number(text: str | None) -> int | None:
    """The number that follows --rank. Raises ConfigError for anything but a whole number."""
    if text is not None and not text.isdecimal():
        raise ConfigError(f"--rank {text}: expected the number of a global rank, 0 or more")
    return None if text is None else int(text)


def refuse_imagined_world(requests: Requests) -> None:
    """Raises ConfigError where a world that is not started is asked for, but not its plan."""
    if requests.ranks_per_node is not None and requests.world_size is None:
        raise ConfigError(
            "--ranks-per-node belongs to --world-size N; a world that is started says itself how many ranks its nodes have"
        )
    if requests.rank is not None and not requests.dry_run:
        raise ConfigError(
            "--rank says which rank a dry run counts: add --dry-run; ranks that train get their numbers from the launcher"
        )
    if requests.dry_run and (requests.plan or requests.verify_grid is not None):
        raise ConfigError("--dry-run prints the plan and counts beside it; leave --plan and --verify-grid out")
    if requests.world_size is not None and not (requests.plan or requests.print_config or requests.dry_run):
        raise ConfigError(
            "--world-size says for how many ranks to plan: add --plan or --dry-run; to train on them start them "
            "(torchrun --nproc-per-node, srun)"
        )


def flags_with_values(argv: Sequence[str]) -> Iterable[tuple[str, list[str]]]:
    """(flag with dashes, the words that follow it). Raises ConfigError at a word that follows no flag."""
    found: list[tuple[str, list[str]]] = []
    for token in argv:
        if token.startswith("--") or token == "-h":
            name, equals, value = token.partition("=")
            found.append((normalised(name), [value] if equals else []))
        elif not found:
            raise ConfigError(f"{token!r} follows no flag; a YAML file is given as --config FILE.yaml")
        else:
            found[-1][1].append(token)
    return found


def refuse_wrong_count(name: str, texts: list[str]) -> None:
    """Raises ConfigError where a flag of ours is followed by too few or too many words."""
    if name in field_flags():
        field, flag = field_flags()[name]
        values, words = takes_values(field, flag), unit_and_help(field)
    else:
        values, words = REQUEST_VALUES.get(name, ""), REQUEST_HELP.get(name, "")
    if values == "" and texts:
        off = f"; to turn it off give {off_flag(name)}" if off_flag(name) else ""
        raise ConfigError(f"{name} takes no value, but {texts[0]} follows it{off}")
    if values in ("1", "+") and not texts:
        raise ConfigError(f"{name} needs a value: {words}")
    if values in ("1", "?") and len(texts) > 1:
        raise ConfigError(f"{name} {' '.join(texts)}: one value is expected, {len(texts)} are given")
    if values == "?" and texts and texts[0] not in VERIFY_MODES:
        raise ConfigError(f"{name} {texts[0]}: choose {' or '.join(VERIFY_MODES)}")


def off_flag(name: str) -> str:
    """The flag that turns off what this flag turns on; empty if there is none."""
    field, flag = field_flags().get(name, (None, None))
    if field is None or flag is None or field.kind.scalar is not bool or flag.value is not True:
        return ""
    return field.flags[1].name


def suggestion(name: str) -> str:
    """'; did you mean --x?', preferring the flag of a field of that very name."""
    if name in ABBREVIATIONS:
        return f"; {ABBREVIATIONS[name]}"
    for field in all_fields():
        if name == "--" + field.name.replace("_", "-"):
            return f"; the flag of {field.key} is {field.main_flag}"
    usable = [*field_flags(), *REQUEST_HELP, *(row.name for row in megatron_flags().values())]
    return nearest(name, usable)


class CollectFlag(argparse.Action):
    """Appends a GivenFlag to `given`."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        field, flag = field_flags()[str(option_string)]
        texts = () if flag.value is not TAKES_VALUE else (values,) if isinstance(values, str) else tuple(values)
        namespace.given = [*(namespace.given or ()), GivenFlag(field, flag, texts)]


class QuietParser(argparse.ArgumentParser):
    """An ArgumentParser whose complaint is a ConfigError."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"command line: {message}")


class HelpLayout(argparse.HelpFormatter):
    """Flags in a wide first column."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=38, width=150)


@cache
def command_line_parser() -> argparse.ArgumentParser:
    """A parser with every flag, grouped by section."""
    parser = QuietParser(
        prog="pretrain_gpt.py",
        usage="[torchrun ...] pretrain_gpt.py [--config FILE.yaml] [flags]",
        description="Pretrain a GPT with tensor, pipeline and data parallelism. Flags carry Megatron's names, with - or _; "
        "[megapipe] marks our own. Values: defaults < YAML file < flags. `none` takes back an optional value.",
        add_help=False,
        allow_abbrev=False,
        formatter_class=HelpLayout,
    )
    requests = parser.add_argument_group("requests [megapipe]")
    requests.add_argument("--config", action="append", metavar="FILE", help=REQUEST_HELP["--config"])
    requests.add_argument("--print-config", action="store_true", help=REQUEST_HELP["--print-config"])
    requests.add_argument("--plan", action="store_true", help=REQUEST_HELP["--plan"])
    requests.add_argument("--dry-run", action="store_true", help=REQUEST_HELP["--dry-run"])
    requests.add_argument("--rank", metavar="R", help=REQUEST_HELP["--rank"])
    requests.add_argument("--world-size", metavar="N", help=REQUEST_HELP["--world-size"])
    requests.add_argument("--ranks-per-node", metavar="N", help=REQUEST_HELP["--ranks-per-node"])
    requests.add_argument("--verify-grid", nargs="?", const="fp64", metavar="MODE", help=REQUEST_HELP["--verify-grid"])
    requests.add_argument("--help", "-h", action="store_true", help=REQUEST_HELP["--help"])
    groups: dict[str, argparse._ArgumentGroup] = {}
    for field in all_fields():
        if field.section not in groups:
            groups[field.section] = parser.add_argument_group(field.section)
        add_field(groups[field.section], field)
    parser.set_defaults(given=None)
    return parser


def add_field(group: argparse._ArgumentGroup, field: ConfigField) -> None:
    """Adds all flags of a field to its group."""
    for flag in field.flags:
        help_text = unit_and_help(field) if flag is field.flags[0] or flag.name == field.main_flag else flag.help
        if field.kind.scalar is bool and flag.value is False:
            help_text = f"turns {field.main_flag} off"
        nargs: Any = {"": 0, "1": None, "+": "+"}[takes_values(field, flag)]
        group.add_argument(
            flag.name,
            action=CollectFlag,
            dest="given",
            default=argparse.SUPPRESS,
            nargs=nargs,
            metavar=None if nargs == 0 else metavar(field),
            help=(help_text + own_mark(flag)).replace("%", "%%"),
        )


def metavar(field: ConfigField) -> str:
    """What stands for the value in --help."""
    return {int: "N", float: "X", str: "WORD" if field.option.choices else "TEXT", bool: ""}[field.kind.scalar]


def own_mark(flag: Flag) -> str:
    """' [megapipe]' for a flag that Megatron does not have."""
    row = megatron_flags().get(flag.name)
    return "" if row is not None and row.kind == SUPPORTED else " [megapipe]"


def unit_and_help(field: ConfigField) -> str:
    """Help, choices or range, unit and default of a field."""
    option = field.option
    parts = [option.help]
    if option.choices:
        parts.append("one of " + ", ".join(option.choices))
    details = [f"unit: {option.unit}"] if option.unit else []
    if expected_range(option):
        details.append(expected_range(option))
    details.append(default_text(field))
    return "; ".join(parts) + f" ({'; '.join(details)})"


def default_text(field: ConfigField) -> str:
    """'required', 'default: x', or what the value is derived from."""
    if field.option.required:
        return "required"
    if field.default is None:
        return f"default: {field.option.derived}" if field.option.derived else "default: none"
    return f"default: {value_text(field.default)}"


def help_text() -> str:
    """What `--help` prints."""
    return command_line_parser().format_help()
