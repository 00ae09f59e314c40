"""A walk through a launch script up to its calls of pretrain_gpt.py. No command of the script is executed.

Assignments, `if`, `case`, `for` over known words, functions, `eval` and `bash -c` are followed; all other commands are
only looked at for the call. A condition that depends on the machine (a file, another program) is taken as false, and an
unset variable in a condition as empty. `exit` is ignored, since it usually guards against a wrong environment.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from megapipe.errors import ConfigError
from megapipe.extras.migrate.shell_syntax import (
    TEXT,
    Arm,
    Branches,
    Chain,
    Command,
    Group,
    Loop,
    Negated,
    Simple,
    Word,
    parse_script,
)
from megapipe.extras.migrate.shell_values import OpenValueError, Variables, is_known, placeholder, shown

MOST_COMMANDS = 100_000
DEEPEST = 30  # of eval, bash -c and functions inside each other
DECLARING = ("export", "declare", "local", "readonly", "typeset")
SHELLS = ("bash", "sh", "zsh", "/bin/bash", "/bin/sh", "/usr/bin/bash")
SHOWING = ("echo", "printf", "cat", "cp", "ls", "grep", "sed", "chmod", "ln", "rm", "mv", "test", "[", "[[", "((")
INTEGER_TESTS = {
    "-eq": int.__eq__,
    "-ne": int.__ne__,
    "-lt": int.__lt__,
    "-le": int.__le__,
    "-gt": int.__gt__,
    "-ge": int.__ge__,
}
SCRIPT_NAME = re.compile(r"(?:.*/)?(pretrain_\w+\.py)")


@dataclass(frozen=True)
class Decision:
    """A condition that decided about variables of the call."""

    line: int
    condition: str
    outcome: str  # "taken" or "not taken", and why if it is not known
    names: frozenset[str]  # variables that any arm assigns


@dataclass(frozen=True)
class Call:
    """A command that starts a training script. Words are expanded; what is not known is a placeholder."""

    line: int
    launcher: tuple[str, ...]  # the words before the training script
    script: str
    arguments: tuple[str, ...]
    names: frozenset[str]  # variables that it depends on


@dataclass
class Reading:
    """The result of following a script."""

    calls: list[Call] = field(default_factory=list)
    decisions: list[Decision] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    variables: Variables = field(default_factory=Variables)


def read_script(
    text: str, name: str = "script.sh", arguments: Sequence[str] = (), given: Sequence[tuple[str, str]] = ()
) -> Reading:
    """Walk through the text of a script. given: variables of its environment. Raises ConfigError."""
    for mark in (placeholder("")[0], placeholder("")[1], "\0"):
        text = text.replace(mark, "")
    walk = Walk(Variables(name, list(arguments)))
    for key, value in [*slurm_variables(text), *given]:
        walk.variables.assign(key, value)
    try:
        walk.commands(parse_script(text.replace("\r\n", "\n")))
    except RecursionError:
        raise ConfigError(f"{name} nests expansions or commands too deeply to be read") from None
    return walk.reading


def slurm_variables(text: str) -> Iterator[tuple[str, str]]:
    """Yield the variables that SLURM sets by the `#SBATCH` lines of a script."""
    options = re.findall(r"^#SBATCH\s+(-N|-n|--[\w-]+)(?:[= ]\s*)(\d+)\b", text, re.MULTILINE)
    found = {{"-N": "--nodes", "-n": "--ntasks"}.get(option, option): int(number) for option, number in options}
    nodes = found.get("--nodes")
    if nodes is not None:
        yield from (("SLURM_NNODES", str(nodes)), ("SLURM_JOB_NUM_NODES", str(nodes)))
    per_node = found.get("--ntasks-per-node")
    if per_node is not None:
        yield "SLURM_NTASKS_PER_NODE", str(per_node)
    tasks = found.get("--ntasks", per_node * nodes if per_node and nodes else None)
    if tasks is not None:
        yield from (("SLURM_NTASKS", str(tasks)), ("SLURM_NPROCS", str(tasks)))
    for option, variable in (("--gpus-per-node", "SLURM_GPUS_PER_NODE"), ("--cpus-per-task", "SLURM_CPUS_PER_TASK")):
        if option in found:
            yield variable, str(found[option])


def assigned_names(commands: Sequence[Command]) -> Iterator[str]:
    """Yield the names of the variables that some commands assign, in all their branches."""
    for command in commands:
        if isinstance(command, Simple):
            for word in command.words:
                if word.assigned is not None:
                    yield word.assigned[1]
        elif isinstance(command, Branches):
            for arm in command.arms:
                yield from assigned_names(arm.body)
        elif isinstance(command, Chain):
            yield from assigned_names(command.commands)
        elif isinstance(command, Group | Loop):
            yield from assigned_names(command.body)


class Walk:
    """The state of a walk: variables, functions, and what was found so far."""

    def __init__(self, variables: Variables) -> None:
        self.variables = variables
        self.reading = Reading(variables=variables)
        self.functions: dict[str, tuple[Command, ...]] = {}
        self.sources: dict[str, set[str]] = {}  # variable -> those that its value was made from
        self.depth = self.num_commands = 0

    def commands(self, commands: Sequence[Command]) -> bool | None:
        """Follow some commands and return the truth of the last, None if it depends on running it."""
        truth: bool | None = True
        for command in commands:
            truth = self.command(command)
        return truth

    def command(self, command: Command) -> bool | None:
        self.num_commands += 1
        if self.num_commands > MOST_COMMANDS:
            raise ConfigError(
                f"the script has more than {MOST_COMMANDS} commands to follow; give its arguments instead"
            )
        if isinstance(command, Simple):
            return self.simple(command)
        if isinstance(command, Chain):
            return self.chain(command)
        if isinstance(command, Negated):
            truth = self.command(command.command)
            return None if truth is None else not truth
        if isinstance(command, Group):
            return self.commands(command.body)
        if isinstance(command, Branches):
            return self.branches(command)
        if isinstance(command, Loop):
            return self.loop(command)
        self.functions[command.name] = command.body
        return True

    def chain(self, chain: Chain) -> bool | None:
        """Follow commands joined by && || |: after `A &&` only if A is true, after `A ||` unless A is true.

        A condition that is not known decides nothing (`[ -f x ] || exit`); a command that is none counts as true.
        """
        truth = self.command(chain.commands[0])
        for joint, previous, command in zip(chain.joints, chain.commands, chain.commands[1:], strict=False):
            decided = truth if truth is not None or is_condition(previous) else True
            if joint == "|" or (joint == "&&" and decided) or (joint == "||" and decided is False):
                truth = self.command(command)
            else:
                truth = decided
        return truth

    def branches(self, branches: Branches) -> bool | None:
        """Follow the arm of an `if` or `case` whose condition holds."""
        names = frozenset(name for arm in branches.arms for name in assigned_names(arm.body))
        for arm in branches.arms:
            self.variables.used = set()
            truth = self.condition(branches, arm)
            if arm.text != "else":
                unset = sorted(name for name in self.variables.used if self.variables.look_up(name) is None)
                reason = ""
                if truth is None:
                    reason = ": it depends on running the script"
                elif unset:
                    reason = f": ${', $'.join(unset)} is not set in the script"
                outcome = ("taken" if truth else "not taken") + reason
                self.reading.decisions.append(Decision(arm.line, arm.text, outcome, names))
            if truth:
                return self.commands(arm.body)
        return True

    def condition(self, branches: Branches, arm: Arm) -> bool | None:
        if branches.subject is None:
            return self.commands(arm.condition) if arm.condition else True
        subject = self.variables.text(branches.subject, empty_if_unset=True)
        patterns = [self.variables.text(pattern, empty_if_unset=True) for pattern in arm.patterns]
        if "*" in patterns:
            return True
        if not is_known(subject) or not all(map(is_known, patterns)):
            return None
        return any(fnmatch.fnmatchcase(subject, pattern) for pattern in patterns)

    def loop(self, loop: Loop) -> bool | None:
        """Follow the body of `for` once for each known word; other loops are skipped."""
        words = None
        if loop.words is not None and loop.name:
            words = [text for word in loop.words for text in self.variables.fields(word, empty_if_unset=True)]
        if words is None or not all(map(is_known, words)):
            names = frozenset(assigned_names(loop.body))
            self.reading.decisions.append(Decision(loop.line, loop.text, "skipped: it depends on running it", names))
            return None
        for word in words:
            self.variables.assign(loop.name, word)
            self.commands(loop.body)
        return True

    def simple(self, command: Simple) -> bool | None:
        """Follow a command: assign, step into a function, eval or bash -c, or look for the call."""
        words = list(command.words)
        while words and words[0].assigned is not None:
            self.assign(words.pop(0))
        if not words:
            return True
        head = words[0].literal
        if head in DECLARING:
            for word in words[1:]:
                if word.assigned is not None:
                    self.assign(word)
            return True
        if head in ("[", "test", "[[", "(("):
            return self.test(head, words)
        self.variables.used = set()
        expanded = [text for word in words for text in self.variables.fields(word)]
        if not expanded:
            return True
        return self.expanded(expanded, command)

    def assign(self, word: Word) -> None:
        """Set the variable that `NAME=value` sets."""
        match = word.assigned
        assert match is not None
        name, index, appends = match[1], match[2], bool(match[3])
        self.variables.used, self.variables.target = set(), name
        value: str | list[str]
        if word.elements is not None:
            value = [text for element in word.elements for text in self.variables.fields(element)]
        else:
            first = word.parts[0]
            rest = (type(first)(TEXT, first.text[match.end() :], True), *word.parts[1:])
            value = self.variables.text(Word(rest))
        self.variables.target = ""
        self.variables.assign(name, value, appends=appends, index=index[1:-1] if index else None)
        kept = self.sources.get(name, set()) if appends or index else set()
        self.sources[name] = kept | self.variables.used

    def expanded(self, words: list[str], command: Simple) -> bool | None:
        """Follow an expanded command."""
        head, used = words[0], set(self.variables.used)
        if head in ("true", ":", "false"):
            return head != "false"
        if head == "unset":
            for name in words[1:]:
                self.variables.values.pop(name, None)
            return True
        if head == "shift":
            del self.variables.arguments[: int(words[1]) if words[1:] and words[1].isdecimal() else 1]
            return True
        if head in ("source", "."):
            if words[1:]:
                self.reading.notes.append(f"line {command.line}: {shown(words[1])} is read by the script, but not here")
            return None
        if head in self.functions:
            return self.inside(self.functions[head], words[1:])
        if head == "eval":
            return self.inside(parse_script(" ".join(words[1:]), command.line), self.variables.arguments)
        shell = next((at for at, word in enumerate(words[:-1]) if word in SHELLS and words[at + 1] != head), None)
        if shell is not None and head not in SHOWING:
            options = words[shell + 1 :]
            flag = next((at for at, word in enumerate(options) if re.fullmatch(r"-\w*c", word)), None)
            if flag is not None and all(word.startswith("-") for word in options[:flag]) and options[flag + 1 :]:
                try:
                    inner = parse_script(options[flag + 1], command.line)
                except ConfigError:  # such as a program of awk in quotes that only the inner shell joins
                    return None
                return self.inside(inner, options[flag + 3 :])
        if head not in SHOWING:
            self.look_for_call(words, command, used)
        if "pretrain_gpt.py" in command.heredoc:
            where = f"line {command.line}: a call of pretrain_gpt.py in a heredoc"
            self.reading.notes.append(f"{where} is not read; give it as a separate script")
        return None

    def inside(self, commands: Sequence[Command], arguments: Sequence[str]) -> bool | None:
        """Follow commands that have other positional arguments."""
        self.depth += 1
        if self.depth > DEEPEST:
            raise ConfigError(f"the script nests functions, eval or bash -c more than {DEEPEST} deep")
        outer, self.variables.arguments = self.variables.arguments, list(arguments)
        truth = self.commands(commands)
        self.variables.arguments = outer
        self.depth -= 1
        return truth

    def look_for_call(self, words: list[str], command: Simple, used: set[str]) -> None:
        """Keep the command if it starts pretrain_gpt.py or another training script."""
        matches = [(at, SCRIPT_NAME.fullmatch(shown(word))) for at, word in enumerate(words)]
        at = next((at for at, match in matches if match is not None), None)
        if at is None:
            return
        names, waiting = set(used), list(used)
        while waiting:
            for name in self.sources.get(waiting.pop(), ()):
                if name not in names:
                    names.add(name)
                    waiting.append(name)
        self.reading.calls.append(
            Call(command.line, tuple(words[:at]), words[at], tuple(words[at + 1 :]), frozenset(names))
        )

    def test(self, head: str, words: Sequence[Word]) -> bool | None:
        """Return the truth of `[ ... ]`, `[[ ... ]]`, `test ...` or `(( ... ))`, None if it is not known."""
        if head == "((":
            try:
                return self.variables.number(words[1].parts[0].text) != 0
            except OpenValueError:
                return None
        if head == "[[":
            texts = [self.variables.text(word, empty_if_unset=True) for word in words[1:-1]]
        else:
            texts = [text for word in words[1:] for text in self.variables.fields(word, empty_if_unset=True)]
            texts = texts[:-1] if head == "[" else texts
        condition = Condition(self.variables, texts)
        truth = condition.either()
        return truth if condition.at == len(texts) else None


def is_condition(command: Command) -> bool:
    """Return True if a command only tests something."""
    if isinstance(command, Negated):
        return is_condition(command.command)
    return isinstance(command, Simple) and bool(command.words) and command.words[0].literal in ("[", "[[", "test", "((")


class Condition:
    """The words of a test, read by precedence; an unknown truth is None."""

    def __init__(self, variables: Variables, words: list[str]) -> None:
        self.variables, self.words, self.at = variables, words, 0

    def take(self) -> str:
        self.at += 1
        return self.words[self.at - 1] if self.at <= len(self.words) else ""

    def next_in(self, words: Sequence[str]) -> bool:
        is_next = self.at < len(self.words) and self.words[self.at] in words
        self.at += is_next
        return is_next

    def either(self) -> bool | None:
        truth = self.both()
        while self.next_in(("||", "-o")):
            other = self.both()
            truth = True if True in (truth, other) else None if None in (truth, other) else False
        return truth

    def both(self) -> bool | None:
        truth = self.single()
        while self.next_in(("&&", "-a")):
            other = self.single()
            truth = False if False in (truth, other) else None if None in (truth, other) else True
        return truth

    def single(self) -> bool | None:
        if self.next_in(("!",)):
            truth = self.single()
            return None if truth is None else not truth
        if self.next_in(("(",)):
            truth = self.either()
            self.next_in((")",))
            return truth
        first = self.take()
        ends = ("&&", "||", "-a", "-o", ")")
        if re.fullmatch(r"-[a-zA-Z]", first) and self.at < len(self.words) and self.words[self.at] not in ends:
            return self.unary(first, self.take())
        if first in ("-z", "-n"):  # of an unquoted variable that is not set
            return first == "-z"
        if self.at >= len(self.words) or self.words[self.at] in ends:
            return bool(first) if is_known(first) else None
        return self.binary(first, self.take(), self.take())

    def unary(self, operator: str, text: str) -> bool | None:
        if operator == "-v":
            return text in self.variables.values
        if operator in ("-z", "-n"):
            return (text == "") == (operator == "-z") if is_known(text) else None
        return None  # files, which differ between machines

    def binary(self, left: str, operator: str, right: str) -> bool | None:
        if not is_known(left + right):
            return None
        if operator in ("=", "==", "!="):
            return fnmatch.fnmatchcase(left, right) == (operator != "!=")
        if operator in INTEGER_TESTS:
            try:
                numbers = self.variables.number(left or "0"), self.variables.number(right or "0")
            except OpenValueError:
                return None
            return bool(INTEGER_TESTS[operator](*numbers))
        return None
