"""The frame of every command: its options as a table, help, one error message, Ctrl-C, exit codes, several ranks.

An error that all ranks raise is printed by rank 0; the others wait for a moment, during which the launcher ends them. A
rank that lost its peer waits longer, because the peer's message is the one that helps.
"""

from __future__ import annotations

import argparse
import faulthandler
import inspect
import math
import os
import re
import select
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from megapipe.environment import Environment, allows_colour, read_environment, read_meeting_place
from megapipe.errors import CommunicationError, ConfigError, DisagreementError, MegapipeError
from megapipe.formatting import one_of

if TYPE_CHECKING:
    from megapipe.plan.hardware import Hardware

# rank 0 may find the same error later; longer than the launcher keeps other ranks alive once one has failed
OTHER_RANK_SECONDS = 4.0
AGREED_SECONDS = 1.0  # the same where rank 0 has the error already
LOST_PEER_SECONDS = 6.0
POLL_SECONDS = 1.0  # on systems without process handles
INTERRUPTED = 130
MOST_COLUMNS = 2000  # of a line of a message
EXTENSION_HELP = "--extension FILE.py or MODULE loads what extensions add (docs/extend.md); may be repeated."
TITLES = {  # exception -> first words of its message; "error" for all others
    "DataError": "data error",
    "CheckpointError": "checkpoint error",
    "CommunicationError": "communication error",
    "TrainingError": "training stopped",
    "ScheduleError": "schedule error",
    "NoProgressError": "no progress",
}
STYLES = {"bold": 1, "red": 31}  # codes of ANSI terminals
INVALID = re.compile(r"argument (\S+): invalid (int|float|choice)(?: value)?: '(.*?)'(?: \(choose from (.*)\))?")
NUMBERS = {"int": "a whole number", "float": "a number"}
METAVARS = {int: "N", float: "X", Path: "FILE"}  # type of an option -> name of its value in the help


@dataclass(frozen=True)
class Option:
    """One option or positional argument: the arguments of `ArgumentParser.add_argument`, a range for its number, and
    other options of the command.
    """

    names: tuple[str, ...]
    settings: Mapping[str, Any]
    above: float | None = None
    at_least: float | None = None
    at_most: float | None = None
    needs: str = ""  # the option without which this one is not read, an error; several: one of them is enough
    excludes: str = ""  # options that cannot be given with it

    @property
    def attribute(self) -> str:
        """The name of its value among the parsed options."""
        return str(self.settings.get("dest") or self.names[-1].lstrip("-").replace("-", "_"))

    def is_given(self, words: Iterable[str]) -> bool:
        """Return True if the option is among the words of a command line, as --name VALUE, --name=VALUE or -nVALUE."""
        short = tuple(name for name in self.names if name[0] == "-" != name[1])
        return any(word.partition("=")[0] in self.names or (short and word.startswith(short)) for word in words)

    def check(self, own: argparse.Namespace, given: Collection[str]) -> None:
        """Raise ConfigError if the value is out of range, or does not go with the options that are given."""
        name, value = self.names[-1], getattr(own, self.attribute)
        if value is not None and self.above is not None and not value > self.above:
            raise ConfigError(f"{name} {value:g} must be above {self.above:g}")
        # infinity is not at least anything
        if value is not None and self.at_least is not None and not self.at_least <= value < math.inf:
            raise ConfigError(f"{name} {value:g} must be at least {self.at_least:g}")
        if value is not None and self.at_most is not None and not value <= self.at_most:
            raise ConfigError(f"{name} {value:g} must be at most {self.at_most:g}")
        if name in given and self.needs and not any(other in given for other in self.needs.split()):
            raise ConfigError(f"{name} is only read with {' or '.join(self.needs.split())}; add that, or omit {name}")
        for other in self.excludes.split() if name in given else ():
            if other in given:
                raise ConfigError(f"{name} does not go with {other}; give one of the two")


def option(
    names: str,
    help: str = "",
    above: float | None = None,
    at_least: float | None = None,
    at_most: float | None = None,
    needs: str = "",
    excludes: str = "",
    **settings: Any,
) -> Option:
    """Return an option for the table of a command. names, needs, excludes: separated by blanks. settings: as for
    `add_argument`.

    A default gives the type of a number, and is added to the help.
    """
    default = settings.get("default")
    if isinstance(default, int | float):
        settings.setdefault("type", type(default))
    if default not in (None, []) and "default" not in help:
        help = f"{help} (default: %(default)s)".lstrip()
    if settings.get("type") in METAVARS and "choices" not in settings and names.startswith("-"):
        settings.setdefault("metavar", METAVARS[settings["type"]])
    return Option(tuple(names.split()), {"help": help, **settings}, above, at_least, at_most, needs, excludes)


def each_with(*options: str | Option, needs: str = "", excludes: str = "") -> tuple[str | Option, ...]:
    """Return options and titles of a table of a command, the options all with these needs or exclusions."""
    return tuple(each if isinstance(each, str) else replace(each, needs=needs, excludes=excludes) for each in options)


def switch(name: str, help: str, excludes: str = "") -> Option:
    """Return an option without a value, for the table of a command."""
    return option(name, help, excludes=excludes, action="store_true")


HARDWARE_OPTIONS = (
    option("--gpu", "the accelerator, by its name in the hardware table (docs/planner.md)", metavar="NAME"),
    option("--hardware", "the accelerator and its links, as a YAML file", type=Path, excludes="--gpu"),
)
PREDICTION_OPTIONS = (
    *HARDWARE_OPTIONS,
    option(
        "--stack",
        "the software that seconds are predicted for (default: megapipe; docs/time_model.md has the others)",
        needs="--gpu --hardware",
        metavar="NAME",
    ),
)


def hardware_given(own: argparse.Namespace) -> Hardware | None:
    """Return the hardware of HARDWARE_OPTIONS or PREDICTION_OPTIONS, None if none is given. Raises ConfigError."""
    stack = getattr(own, "stack", None)
    if own.gpu is None and own.hardware is None:
        return None
    # here, since most commands start without plans
    from megapipe.extras.calibrate.hardware_reader import read_hardware
    from megapipe.plan.hardware import hardware_named
    from megapipe.plan.stacks import stack_named

    hardware = hardware_named(own.gpu) if own.hardware is None else read_hardware(own.hardware)
    return hardware if stack is None else replace(hardware, stack=stack_named(stack))


class Parser(argparse.ArgumentParser):
    """A parser that raises ConfigError where argparse prints its usage and exits."""

    def error(self, message: str) -> NoReturn:
        if found := INVALID.fullmatch(message):
            flag, kind, value, choices = found.groups()
            if not choices:
                raise ConfigError(f"{flag} {value}: expected {NUMBERS[kind]}")
            from megapipe.config.fields import nearest  # here, since most commands start without the configuration

            names = [name.strip("' ") for name in choices.split(",")]
            raise ConfigError(f"{flag} {value}: choose {one_of(names)}{nearest(value, names)}")
        raise ConfigError(f"{message}; see --help")


@dataclass(frozen=True)
class Command:
    """A command. Called with the words after its name, it runs and returns the exit code.

    options: strings are the titles of the groups that follow them. body: gets the options, with on_ranks also the
    environment; returns the exit code or None for 0. Its docstring is the text of --help. takes_config: it also takes
    the flags of pretrain_gpt.py; body finds them in `flags` of its options. needs_words: without any word it prints its
    help and fails. interrupted: printed after Ctrl-C. refused: flags of Megatron's tools that are missing here -> what
    to do instead.
    """

    name: str
    options: Sequence[str | Option]
    body: Callable[..., int | None]
    on_ranks: bool = False
    takes_config: bool = False
    needs_words: bool = True
    interrupted: str = "interrupted"
    refused: Mapping[str, str] = field(default_factory=dict)

    def __call__(self, arguments: Sequence[str]) -> int:
        words = list(arguments)
        if "-h" in words or "--help" in words or (self.needs_words and not words):
            print(self.parser().format_help(), end="")
            return 0 if words else 2
        if self.on_ranks:
            return run_on_ranks(lambda found: self.body(self.parse(words), found) or 0, self.interrupted)

        def run() -> int:
            try:
                return self.body(self.parse(words)) or 0
            except OSError as error:
                text = f"{error.filename}: {error.strerror}" if error.filename else str(error)
                raise MegapipeError(text) from None

        return guarded(run, interrupted=self.interrupted)

    def parser(self) -> Parser:
        """Return argparse's parser of the options."""
        parser = Parser(
            prog=self.name,
            description=inspect.getdoc(self.body),
            epilog="All other flags are those of pretrain_gpt.py." if self.takes_config else EXTENSION_HELP,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        group: argparse._ActionsContainer = parser
        for each in self.options:
            if isinstance(each, str):
                group = parser.add_argument_group(each)
            else:
                group.add_argument(*each.names, **each.settings)
        return parser

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """Parse flags with - or _. Raises ConfigError for an unknown flag, with the nearest one."""
        if not self.takes_config:
            words = load_extensions_in(words)
        parser = self.parser()
        known = [flag for action in parser._actions for flag in action.option_strings]
        dashed = []
        for word in words:
            flag, equals, value = word.partition("=")
            plain = flag.replace("_", "-")
            if flag.startswith("--") and plain in known:
                word = plain + equals + value
            elif len(flag) > 2 and flag.startswith("--") and self.takes_config:
                check_spelling(plain, known)
            elif len(flag) > 2 and flag.startswith("--"):
                from megapipe.config.fields import nearest  # here, since most commands start without the configuration

                if plain in self.refused:
                    raise ConfigError(f"{plain}: {self.refused[plain]}")
                raise ConfigError(f"{plain} is not a flag of {self.name}{nearest(plain, known) or '; see --help'}")
            dashed.append(word)
        if self.takes_config:
            own, flags = parser.parse_known_args(dashed)
            own.flags = [word for word in flags if word != "--"]
        else:
            own = parser.parse_intermixed_args(dashed)  # positional arguments may come after flags
        own.command = self
        options = [each for each in self.options if isinstance(each, Option)]
        given = {name for each in options if each.is_given(dashed) for name in each.names}
        for each in options:
            each.check(own, given)
        return own


def check_spelling(flag: str, options: Sequence[str]) -> None:
    """Raise ConfigError for a flag that is none of pretrain_gpt.py, if one of a command's own options is nearest."""
    from megapipe.config.flags import meant_flag, megatron_flags  # here, since most commands start without them

    if flag not in megatron_flags() and (meant := meant_flag(flag, options)) in options:
        raise ConfigError(f"unknown flag {flag}; did you mean {meant}?")


def load_extensions_in(words: Sequence[str]) -> list[str]:
    """Run the extensions that --extension FILE.py or MODULE names, and return the other words. Raises ConfigError."""
    others: list[str] = []
    left = iter(words)
    for word in left:
        flag, equals, value = word.partition("=")
        if flag == "--extension":
            from megapipe.registry import EXTENSIONS  # here, since most commands have none

            name = value if equals else next(left, "")
            if not name or name.startswith("--"):
                raise ConfigError("--extension needs a value: FILE.py or MODULE")
            EXTENSIONS.load(name)
        else:
            others.append(word)
    return others


def command(
    name: str, options: Sequence[str | Option], **settings: Any
) -> Callable[[Callable[..., int | None]], Command]:
    """Return a decorator that makes a command of its body. settings: the other fields of Command."""
    return lambda body: Command(name, options, body, **settings)


def guarded(
    body: Callable[[], int],
    global_rank: int = 0,
    world_size: int = 1,
    interrupted: str = "interrupted",
    tell: Callable[[Exception], None] | None = None,
) -> int:
    """Run `body` and return its result, or print its error (a bug's with traceback) and return the exit code.

    interrupted: what rank 0 prints after Ctrl-C. tell: reports the error to ranks that wait for this one.
    """
    try:
        return body()
    except KeyboardInterrupt:
        if global_rank == 0:
            print(interrupted, file=sys.stderr, flush=True)
        return INTERRUPTED
    except Exception as error:
        if tell is not None and global_rank != 0:
            tell(error)
        if world_size > 1 and isinstance(error, CommunicationError):
            time.sleep(LOST_PEER_SECONDS)
        elif global_rank != 0:
            time.sleep(AGREED_SECONDS if isinstance(error, DisagreementError) else OTHER_RANK_SECONDS)
        code = 1
        if isinstance(error, MegapipeError):
            code = error.exit_code
            where = f" (rank {global_rank})" if world_size > 1 else ""
            title = next((TITLES[name] for kind in type(error).__mro__ if (name := kind.__name__) in TITLES), "error")
            head = painted(f"{title}{where}:", "red", sys.stderr)
            print(f"{head} {abridged(str(error))}", file=sys.stderr, flush=True)
        else:
            bug = "this is a bug in megapipe, please report it with the following traceback"
            print(f"rank {global_rank}: {bug}", file=sys.stderr)
            traceback.print_exception(error)
            sys.stderr.flush()
        if tell is not None and global_rank == 0:
            tell(error)
        return code


def teller(environment: Environment) -> Callable[[Exception], None] | None:
    """Return the `tell` of `guarded` for a rank; None if there are no others, or its launcher ends them at once."""
    if not environment.is_distributed or environment.ends_together:
        return None
    return partial(tell_others, environment)


def tell_others(environment: Environment, error: Exception) -> None:
    """Report to the ranks that wait for this one why it cannot start, unless they have met or know it already."""
    if isinstance(error, CommunicationError | DisagreementError):
        return
    from megapipe.comm.bootstrap import refuse  # torch

    refuse(environment, error)


def painted(text: str, style: str, stream: TextIO) -> str:
    """Return a text in one of STYLES if it goes to a terminal whose user wants colours, else as it is."""
    return f"\x1b[{STYLES[style]}m{text}\x1b[0m" if stream.isatty() and allows_colour() else text


def abridged(text: str) -> str:
    """Return a message whose lines are cut in the middle where they hold a value of thousands of characters."""
    half = MOST_COLUMNS // 2
    lines = (line if len(line) <= MOST_COLUMNS else f"{line[:half]} ... {line[-half:]}" for line in text.splitlines())
    return "\n".join(lines)


def run_on_ranks(body: Callable[[Environment], int], interrupted: str) -> int:
    """Run `body` on this rank and return the exit code. With several ranks, an error ends the process at once."""
    try:
        environment = read_environment()
    except ConfigError as error:  # the rank is unknown, so every rank prints
        print(f"error: {error}", file=sys.stderr)
        place = read_meeting_place()
        if place is not None:
            tell_others(place, error)
        return error.exit_code
    if sys.__stderr__ is not None and not faulthandler.is_enabled():
        faulthandler.enable(sys.__stderr__)  # a bus error or a crash in C says at least at which line of Python it came
    end_with_launcher(environment)
    code = guarded(
        lambda: body(environment), environment.global_rank, environment.world_size, interrupted, teller(environment)
    )
    if environment.is_distributed:
        if code:
            end_at_once(code)
        from megapipe.comm.bootstrap import shutdown  # torch

        shutdown(0)
    return code


def end_at_once(code: int) -> NoReturn:
    """End this rank without destructors of communicators and threads, which can hang or abort once a peer is gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def end_with_launcher(environment: Environment) -> None:
    """End this process when torchrun's agent or `megapipe launch` ends, if one of them started it.

    A launcher that was killed with `kill -9` cannot end its ranks, which have their own sessions. Unsaved state is
    lost, as with `kill -9` of the ranks: a restarted job must not meet ranks of the old one.
    """
    if environment.launcher != "torchrun" or environment.run_id is None:  # started by hand: the parent is a shell
        return
    launcher = environment.launcher_pid
    if launcher is None or not is_ancestor(launcher):
        launcher = os.getppid()

    def watch() -> None:
        wait_for_end(launcher)
        with suppress(OSError):  # the terminal may be gone too
            if environment.local_rank == 0:
                print(
                    f"rank {environment.global_rank}: the launcher (process {launcher}) died without an error message "
                    "(kill -9, or out of memory). The ranks of this host are terminated; saved checkpoints are intact",
                    file=sys.stderr,
                    flush=True,
                )
            end_at_once(1)
        os._exit(1)

    threading.Thread(target=watch, name="launcher-watch", daemon=True).start()


def wait_for_end(process: int) -> None:
    """Block until a process of this host has ended."""
    with suppress(OSError):  # it has ended already
        if hasattr(os, "pidfd_open"):
            select.select([os.pidfd_open(process)], [], [])
        else:  # not Linux
            while True:
                os.kill(process, 0)  # raises once the process has ended
                time.sleep(POLL_SECONDS)


def is_ancestor(process: int) -> bool:
    """Return True if this process descends from another (a process id from outside a container is unknown inside)."""
    parent = os.getppid()
    while parent > 1 and parent != process:
        try:
            with open(f"/proc/{parent}/stat", encoding="utf-8", errors="replace") as file:
                parent = int(file.read().rpartition(")")[2].split()[1])
        except OSError:
            return False
    return parent == process


def write_file(path: Path, text: str, flag: str) -> None:
    """Write a whole file or none, by way of a temporary file. flag: gives the path. Raises ConfigError if it cannot.

    What is no plain file, such as a pipe, /dev/stdout or a link, is written to and not replaced.
    """
    from megapipe.monitor.roster import replace_file  # here, since most commands write nothing

    try:
        if path.is_symlink() or (path.exists() and not path.is_file()):
            path.write_text(text, encoding="utf-8")
        else:
            replace_file(path, text.encode())
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}; say where with {flag} FILE") from None
