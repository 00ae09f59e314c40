"""A walk through a launch script up to its calls of pretrain_gpt.py. No command of the script is executed.

Read are quotes, arrays, pipes, `&&`, `||`, `if`, `for`, functions, here-documents and `{ ...; }`, without other
redirections. All else is refused with its line; the user then lets bash expand the script and gives the command that it
prints.

Assignments, `if`, `for` over known words, functions, `eval`, `bash -c` and strings and here-documents that name
pretrain_gpt.py are followed; all other commands are only looked at for the call. A value that only a running shell
would know (`$(hostname)`, a variable that nothing sets) becomes a placeholder: its source text between the marks OPEN
and CLOSE. It is never split into words, and what depends on it stays open too. A condition that depends on the machine
(a file, another program) is taken as false, and an unset variable in a condition as empty. `exit` is ignored, since it
usually guards against a wrong environment.
"""

from __future__ import annotations

import ast
import fnmatch
import operator
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from typing import NamedTuple

from megapipe.errors import ConfigError
from megapipe.formatting import count_text

# -------------------------------------------------------------------------------------------------------------- syntax

DOCUMENT = "\ue004"  # before the text of a here-document, which is a word; a ' follows if nothing in it is expanded
OPEN, CLOSE = "\ue000", "\ue001"  # marks around a value that is not known without executing something
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
PIECES_IN_QUOTES = {"$((": "))", "$(": ")", "${": "}", "`": "`", '"': '"', OPEN: CLOSE}  # opening -> closing mark
PIECES = {**PIECES_IN_QUOTES, "<(": ")", ">(": ")", "(": ")", '$"': '"'}
ATOM_IN_QUOTES = re.compile(r"\\.?|\$(?:[A-Za-z_]\w*|[0-9@*#?$!-])", re.DOTALL)  # escapes, $NAME, 'text', # comments
ATOM = re.compile(rf"{ATOM_IN_QUOTES.pattern}|'[^']*'|\$'(?:[^'\\]|\\.)*'|(?<=[\s(;])#[^\n]*", re.DOTALL)
SKIPPED = re.compile(r"(?:[ \t\r]|\\\r?\n)+|#[^\n]*")
REDIRECTION = re.compile(r"(?:\d*(<<<|<<|>>|>\||[<>]&|<>|[<>](?!\())|&>>?)[ \t]*")
OPERATOR = re.compile(r"\n|;;&?|;&|;|&&|\|\||\|&|[&|()]|[<>](?!\()")
FUNCTION = re.compile(r"([A-Za-z_][\w-]*)[ \t]*\([ \t]*\)")
SAME_AS = {"\n": ";", "&": ";", "|&": "|"}
ENDS_WORD = frozenset(" \t\r\n;&|<>()")
JOINTS = ("&&", "||", "|")
ENDS = {"if": "fi", "{": "}", "for": "done", "while": "done", "until": "done"}
INNER = ("then", "elif", "else", "do")
RESERVED = frozenset({*ENDS, *ENDS.values(), *INNER} - {"for"})
NOT_READ = ("case", "select", "coproc", "function")
TESTS = ("[", "[[", "test")


class UnreadableError(Exception):
    """A text that is not read, at a position of it."""

    def __init__(self, at: int, what: str) -> None:
        super().__init__(what)
        self.at, self.what = at, what


def refusal(line: int, what: str) -> ConfigError:
    """Return the exception for a part of a script that is not read."""
    way_out = "run the script with echo in front of its launcher and give the command that it prints"
    return ConfigError(f"line {line}: {' '.join(what.split())}; {way_out}: megapipe migrate COMMAND")


class Token(NamedTuple):
    """A word or an operator of a script; at its end an empty operator."""

    text: str
    at: int
    line: int
    is_word: bool = False


def piece_end(text: str, at: int, in_quotes: bool = False) -> int:
    """Return the end of a piece of a word: a quoted text, an expansion, or one character. Raises UnreadableError."""
    if atom := (ATOM_IN_QUOTES if in_quotes else ATOM).match(text, at):
        return atom.end()
    if text[at] == "'" and not in_quotes:
        raise UnreadableError(at, "a ' is not closed")
    pieces = PIECES_IN_QUOTES if in_quotes else PIECES
    mark = next((mark for mark in pieces if text.startswith(mark, at)), "")
    end = at + max(len(mark), 1)
    inside = in_quotes if mark == "${" else mark in ('"', '$"', "`")
    while mark and not text.startswith(pieces[mark], end):
        if end >= len(text):
            raise UnreadableError(at, f"a {mark} is not closed")
        end = piece_end(text, end, inside)
    return end + len(pieces.get(mark, ""))


def pieces_of(word: str, in_quotes: bool = False) -> list[str]:
    """Return the pieces of a word."""
    found, at = [], 0
    while at < len(word):
        end = piece_end(word, at, in_quotes)
        found.append(word[at:end])
        at = end
    return found


def word_end(text: str, start: int) -> int:
    """Return the end of the word that begins here; `NAME=(...)` and `((...))` are one word."""
    at = start
    while at < len(text):
        opens = text[at] == "(" and (ASSIGNMENT.fullmatch(text, start, at) or text.startswith("((", start, at + 2))
        if text[at] in ENDS_WORD and not opens and text[at : at + 2] not in ("<(", ">("):
            break
        at = piece_end(text, at)
    return at


def tokens_of(text: str, line: int = 1) -> list[Token]:
    """Return the words and operators of a script, without comments and redirections. line: that of its first token.

    Raises ConfigError with the line.
    """
    found: list[Token] = []
    documents: dict[int, int] = {}  # the end of a line -> that of its here-documents
    at, in_brackets = 0, False  # in [[ ]], where < and > compare
    while at < len(text):
        redirection = None if in_brackets else REDIRECTION.match(text, at)
        try:
            if skipped := SKIPPED.match(text, at):
                end = skipped.end()
            elif redirection:
                end = word_end(text, redirection.end())
                if end == redirection.end():
                    raise refusal(line, f"{redirection[0]} needs a file")
                if redirection[1] == "<<":
                    of_line = f"{text}\n".index("\n", end)
                    word, start = text[redirection.end() : end], documents.get(of_line, of_line) + 1
                    mark = re.escape(re.sub(r"^-|['\"\\]", "", word))
                    tabs = "\t*" if word[0] == "-" else ""
                    document = re.compile(rf"(.*?)^{tabs}{mark}$", re.DOTALL | re.MULTILINE).match(text, start)
                    if not document:
                        raise refusal(line, f"the here-document {word} has no end")
                    documents[of_line] = document.end()
                    is_plain = "'" if set("'\"\\") & set(word) else ""
                    found.append(Token(DOCUMENT + is_plain + document[1], at, line, is_word=True))
            elif (found_operator := OPERATOR.match(text, at)) and not text.startswith("((", at):
                end = documents.get(at, found_operator.end())
                found.append(Token(SAME_AS.get(found_operator[0], found_operator[0]), at, line))
            elif function := FUNCTION.match(text, at):
                end = function.end()
                found.append(Token(f"{function[1]}()", at, line, is_word=True))
            else:
                end = word_end(text, at)
                found.append(Token(text[at:end], at, line, is_word=True))
                in_brackets = text[at:end] != "]]" and (in_brackets or text[at:end] == "[[")
        except UnreadableError as error:
            raise refusal(line + text.count("\n", at, error.at), error.what) from None
        line += text.count("\n", at, end)
        at = end
    return [*found, Token("", len(text), line)]


class Step(NamedTuple):
    """A simple command, a reserved word, or the head of a `for` loop or a function."""

    words: tuple[str, ...]
    line: int
    at: int  # its position in the text
    joint: str  # the && || | before it


def steps_of(text: str, line: int = 1) -> list[Step]:
    """Return the steps of a text. line: the number of its first line. `[[ a && b ]]` is `{ [[ a ]] && [[ b ]]; }`."""
    found: list[Step] = []
    pending: list[Token] = []
    joint = ""
    is_grouped = False  # inside such a `{`
    for token in tokens_of(text, line):
        texts = [each.text for each in pending]
        in_test = "[[" in texts[:2] and texts[-1] != "]]"
        if token.is_word or (in_test and token.text not in ("&&", "||", "")):
            pending += [token] if token.text != ";" else []
            is_head = token.text in RESERVED or FUNCTION.fullmatch(token.text)
            if len(pending) > 1 or not is_head:
                continue
            texts, in_test = [token.text], False
        if in_test and token.text == "":
            raise refusal(token.line, "]] is missing")
        if in_test and (texts[0] == "!" or (is_grouped and (joint, token.text) == ("||", "&&"))):
            raise refusal(token.line, f"{token.text} after ! or || in [[ ]] is not read")
        if in_test and not is_grouped:
            found.append(Step(("{", "[["), pending[0].line, pending[0].at, joint))
            joint, is_grouped = "", True
        if pending:
            if texts[0] in NOT_READ or texts[0].startswith("("):
                what = "a command in parentheses" if texts[0].startswith("(") else texts[0]
                raise refusal(pending[0].line, f"{what} is not read")
            words = (*texts, "]]") if in_test else tuple(texts)
            found.append(Step(words, pending[0].line, pending[0].at, joint))
        if is_grouped and not in_test:
            found.append(Step(("}",), token.line, token.at, ""))
            is_grouped = False
        if not token.is_word and token.text not in ("", ";", *JOINTS):
            what = "a command in parentheses is not read" if token.text == "(" else f"{token.text!r} begins no command"
            raise refusal(token.line, what)
        pending = [Token("[[", token.at, token.line)] if in_test else []
        joint = token.text if token.text in JOINTS else ""
    return found


def assigned_names(words: Iterable[str]) -> frozenset[str]:
    """Return the names of the variables that some words assign."""
    return frozenset(match[1] for match in map(ASSIGNMENT.match, words) if match)


def end_of(steps: Sequence[Step], at: int) -> int:
    """Return where the command ends that begins with a step."""
    depth, end = 0, at + (FUNCTION.fullmatch(steps[at].words[0]) is not None)
    while end < len(steps):
        head = steps[end].words[0]
        depth += (head in ENDS) - (head in ENDS.values())
        end += 1
        if depth <= 0:
            return end
    raise refusal(steps[at].line, f"{ENDS.get(steps[at].words[0], '}')} is missing")


def sections_of(steps: Sequence[Step]) -> list[tuple[Step, list[Step]]]:
    """Return the reserved words of an `if` or a loop, each with the steps that follow it."""
    found: list[tuple[Step, list[Step]]] = []
    depth = 0
    for step in steps:
        head = step.words[0]
        depth -= head in ENDS.values()
        if depth == 0 or (depth == 1 and head in INNER):
            found.append((step, []))
        else:
            found[-1][1].append(step)
        depth += head in ENDS
    return found


# ------------------------------------------------------------------------------------------------------------ the walk

MOST_WORK = 10_000_000  # characters that are assigned, and 100 for a command; a doubling loop would fill the memory
LARGEST = 2**63
BREAK, QUOTED = "\ue002", "\ue003"  # in an expanded text: between two words, and at a quoted part, which may be empty
DECLARING = ("export", "declare", "local", "readonly", "typeset")
READING = ("read", "readarray", "mapfile")
REFUSED = ("break", "continue", "return", "shift", "let", "getopts", "set --", "printf -v")
SHELLS = ("bash", "sh", "zsh", "/bin/bash", "/bin/sh", "/usr/bin/bash")
SUBMITTING = {*SHELLS, "sbatch", "srun", "salloc", "qsub"}
SHOWING = ("echo", "printf", "cat", "cp", "ls", "grep", "sed", "chmod", "ln", "rm", "mv")
OF_THE_SHELL = ("$", "?", "!", "-", "RANDOM", "PWD", "HOSTNAME", "SECONDS", "BASH_SOURCE", "LINENO")
OF_SLURM = {  # option of sbatch -> variables that it sets
    "nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "ntasks-per-node": ("SLURM_NTASKS_PER_NODE",),
    "ntasks": ("SLURM_NTASKS", "SLURM_NPROCS"),
    "gpus-per-node": ("SLURM_GPUS_PER_NODE",),
    "cpus-per-task": ("SLURM_CPUS_PER_TASK",),
}
PARAMETER = re.compile(r"([A-Za-z_]\w*|\d{1,9}|[@*#?$!-])(?:\[(\d{1,9}|[@*])\])?(.*)", re.DOTALL)
DEFAULT = re.compile(r"(:?)([-=+?])(.*)", re.DOTALL)
CUT = re.compile(r"(##?|%%?)(.*)", re.DOTALL)
REPLACED = re.compile(r"(//?)([^/\\*?[#%][^/\\*?[]*)(?:/(.*))?", re.DOTALL)
ALL_IN_QUOTES = re.compile(r'"\$(@|\{(@|\w+\[@\])\})"')
BLANKS = re.compile(rf"{OPEN}[^{CLOSE}]*{CLOSE}|[ \t\n]")
ELEMENT = re.compile(r"[A-Za-z_]\w*\[.*\]\+?=", re.DOTALL)
INDEX = re.compile(r"\[[^]]*\]\+?=")
LAYERS = re.compile(r"[][()\d+*,]+")  # `[0]*3+[1]*58`, which names no file
FILE_NAMES = re.compile(r"[*?]|\{[^{}]*(,|\.\.)[^{}]*\}")  # words that bash replaces by file names or several words
CHANGES = re.compile(r"\+\+|--|(?<![=!<>])=(?!=)")
ARITHMETIC = re.compile(r"(?!.*\d[A-Za-z_])[\w\s()+*/%<>=!&|-]{,1000}", re.DOTALL | re.ASCII)
SCRIPT_NAME = re.compile(r"(?:\S*/)?(pretrain_\w+\.py)")
NAMED = re.compile(r"(?s)(?=.*\s)(?:.*[\s/])?pretrain_\w+\.py(?:\s|$)")  # a command among other words


def divided(left: int, right: int) -> int:
    """Return a quotient rounded towards zero, as the shell does. Raises ZeroDivisionError."""
    return abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1)


OPERATORS: dict[type[ast.AST], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: divided,
    ast.Mod: lambda left, right: left - divided(left, right) * right,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
INTEGER_TESTS = {"-eq": "==", "-ne": "!=", "-lt": "<", "-le": "<=", "-gt": ">", "-ge": ">="}


class UnknownValueError(Exception):
    """A value that is not known without executing something."""


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
    # name -> elements; one of a variable that is no array
    variables: dict[str, list[str]] = field(default_factory=dict)


def placeholder(source: str) -> str:
    """Return a placeholder that shows a source text."""
    return OPEN + shown(source) + CLOSE


def is_known(text: str) -> bool:
    """Return True if a text has no placeholder."""
    return OPEN not in text


def shown(text: str) -> str:
    """Return a text with its placeholders as the script writes them."""
    return text.replace(OPEN, "").replace(CLOSE, "")


def plain(text: str) -> str:
    """Return an expanded text without its marks."""
    return text.replace(BREAK, " ").replace(QUOTED, "")


def read_script(
    text: str, name: str = "script.sh", arguments: Sequence[str] = (), given: Sequence[tuple[str, str]] = ()
) -> Reading:
    """Walk through the text of a script. given: variables of its environment. Raises ConfigError."""
    text = re.sub(f"[{OPEN}{CLOSE}{BREAK}{QUOTED}{DOCUMENT}\0]", "", text).replace("\r\n", "\n")
    walk = Walk(script=name)
    walk.set_by_slurm(text)
    walk.given |= dict(given)
    walk.variables |= {key: [value] for key, value in given}
    try:
        walk.follow(text, steps_of(text), arguments)
        for variable, values in [] if walk.calls else list(walk.variables.items()):
            if NAMED.search(" ".join(values)):
                walk.notes.append(f"${variable} is taken as a command that the script runs")
                walk.follow_text(" ".join(values), 0)
    except RecursionError:
        raise ConfigError(f"{name} nests expansions or commands too deeply to be read") from None
    except UnreadableError as error:
        raise refusal(walk.line, error.what) from None
    unread = walk.given.keys() - walk.asked - {each for names in OF_SLURM.values() for each in names}
    walk.notes += [
        f"--set {name}={walk.given[name]} has no effect: the script does not read it" for name in sorted(unread)
    ]
    return walk


@dataclass
class Walk(Reading):
    """A walk: what was found so far, and the state at one point of the script."""

    source: str = ""  # the text that is followed
    script: str = ""  # $0
    arguments: list[str] = field(default_factory=list)  # $1, $2, ...
    functions: dict[str, tuple[str, Sequence[Step]]] = field(default_factory=dict)
    sources: dict[str, set[str]] = field(default_factory=dict)  # variable -> those that its value was made from
    used: set[str] = field(default_factory=set)  # names that expansions have read since it was last emptied
    asked: set[str] = field(default_factory=set)  # names that were looked up or assigned anywhere
    given: dict[str, str] = field(default_factory=dict)  # variables of the environment, of --set
    outer: set[str] = field(default_factory=set)  # names that the eval, bash -c or function call around was made from
    locals: dict[str, list[str] | None] = field(default_factory=dict)  # of a function: the values to restore
    target: str = ""  # the variable that is being assigned; unset in its own value it is empty: X="$X --more"
    unset_is_empty: bool = False  # in conditions
    line: int = 0
    work: int = 0

    def refused(self, what: str) -> ConfigError:
        """Return the exception for a part of the present command that is not read."""
        return refusal(self.line, f"{shown(what)} is not read")

    def spend(self, amount: int) -> None:
        """Count work. Raises ConfigError where a script takes too much of it."""
        self.work += amount
        if self.work > MOST_WORK:
            raise ConfigError("the script takes too many steps to be followed; give its arguments instead")

    def set_by_slurm(self, text: str) -> None:
        """Set the variables that SLURM sets for the `#SBATCH` lines of a script."""
        options = re.findall(r"^#SBATCH\s+--?([\w-]+)(?:[= ]\s*)(\d{1,9})\b", text, re.MULTILINE)
        numbers = {{"N": "nodes", "n": "ntasks"}.get(name, name): int(number) for name, number in options}
        if {"nodes", "ntasks-per-node"} <= numbers.keys():
            numbers.setdefault("ntasks", numbers["nodes"] * numbers["ntasks-per-node"])
        for option in OF_SLURM.keys() & numbers.keys():
            self.variables |= {name: [str(numbers[option])] for name in OF_SLURM[option]}

    def follow_text(self, text: str, line: int) -> None:
        """Follow a string or here-document that names a training script; one that is no script is noted."""
        try:
            self.set_by_slurm(text)
            self.follow(text, steps_of(text, line), self.arguments)
        except ConfigError as error:
            self.notes.append(f"a text in the script is not read: {error}")

    def follow(self, text: str, steps: Sequence[Step], arguments: Sequence[str]) -> bool | None:
        """Follow steps of a text: a script, the body of a function, the words of `eval` or `bash -c`."""
        before = self.source, self.arguments, self.outer, self.locals, self.line
        self.source, self.arguments, self.outer = text, list(arguments), self.outer | self.all_used()
        self.locals = {}
        truth = self.run(steps)
        self.restore(self.locals)
        self.source, self.arguments, self.outer, self.locals, self.line = before
        return truth

    def run(self, steps: Sequence[Step]) -> bool | None:
        """Follow some steps. Returns the truth of the last command, None if it depends on running it.

        After `A &&` a command is followed only if A is true, after `A ||` unless A is true. A condition that is not
        known decides nothing (`[ -f x ] || exit`); a command that is none counts as true.
        """
        compound = {"if": self.branches, "for": self.loop, "while": self.loop, "until": self.loop}
        truth: bool | None = True
        is_test, at = False, 0
        while at < len(steps):
            step, start, at = steps[at], at, end_of(steps, at)
            head = step.words[0]
            truth = truth if truth is not None or is_test else True
            if step.joint in ("", "|") or truth is (step.joint == "&&"):
                self.spend(100)
                self.line = step.line
                if head in (*INNER, *ENDS.values()):
                    raise refusal(step.line, f"{head!r} begins no command")
                if FUNCTION.fullmatch(head):
                    self.functions[head[:-2]] = self.source, steps[start + 2 : at - 1]
                    truth = True
                elif head == "{":
                    truth = self.run(steps[start + 1 : at - 1])
                else:
                    truth = compound[head](steps[start:at]) if head in compound else self.simple(step.words)
            is_test = not set(step.words[:2]).isdisjoint(TESTS)
        return truth

    def branches(self, steps: Sequence[Step]) -> bool | None:
        """Follow the arm of an `if` whose condition holds."""
        sections = sections_of(steps)
        names = assigned_names(word for step in steps for word in step.words)
        for (keyword, body), (following, arm) in pairwise(sections):
            if keyword.words[0] == "else":
                return self.run(body)
            if keyword.words[0] in ("if", "elif"):
                self.used = set()
                truth = self.run(body)
                reason = ": it depends on running the script" if truth is None else self.unset_names()
                outcome = ("taken" if truth else "not taken") + reason
                condition = self.written(keyword.at + len(keyword.words[0]), following.at)
                self.decisions.append(Decision(keyword.line, condition, outcome, names))
                if truth:
                    return self.run(arm)
        return True

    def loop(self, steps: Sequence[Step]) -> bool | None:
        """Follow the body of `for` once for each known word. What other loops assign is not known after them."""
        (head, _), (do, body) = sections_of(steps)[:2]
        _, name, *words = (*head.words, "")
        names = assigned_names(word for step in steps for word in step.words) | {name}
        words = words[1:-1] if words[:1] == ["in"] else ['"$@"']
        condition = self.written(head.at, do.at)
        self.used, self.unset_is_empty = set(), True
        fields = [text for word in words for text in self.fields(word)]
        self.unset_is_empty = False
        if head.words[0] != "for" or name.startswith("(") or not all(map(is_known, fields)):
            self.variables |= {name: [placeholder(f"${name}")] for name in names}
            self.decisions.append(Decision(head.line, condition, "skipped: it depends on running it", names))
            return None
        if unset := self.unset_names():
            outcome = f"followed for {count_text(len(fields), 'word')}{unset}"
            self.decisions.append(Decision(head.line, condition, outcome, names))
        for text in fields:
            self.assign_text(name, text)
            self.run(body)
        return True

    def written(self, start: int, end: int) -> str:
        """Return a part of the text in one line."""
        return " ".join(self.source[start:end].split()).rstrip("; ")

    def unset_names(self) -> str:
        """Return the variables of a condition that are not set, as the reason for its outcome; empty if all are."""
        unset = sorted(name for name in self.used if self.look_up(name) is None)
        return f": ${', $'.join(unset)} is not set in the script" if unset else ""

    def simple(self, words: Sequence[str]) -> bool | None:
        """Follow a command: assign, step into a function, eval or bash -c, or look for the call."""
        if words[0] == "!":
            truth = self.simple(words[1:]) if words[1:] else None
            return None if truth is None else not truth
        prefixes = list(takewhile(ASSIGNMENT.match, words))
        words = words[len(prefixes) :]
        if words and ELEMENT.match(words[0]):
            raise self.refused(words[0])
        if words and words[0] in DECLARING:
            return self.declared(words)
        if words and words[0] in TESTS:
            return self.test(words)
        self.used = set()
        expanded = [text for word in words for text in self.fields(word)]
        if expanded and expanded[0] in READING:
            prefixes = []  # such as IFS for what is read
        before, used = {name: self.variables.get(name) for name in assigned_names(prefixes)}, self.used
        for prefix in prefixes:
            self.assign(prefix)
        if not expanded:
            return True
        self.used = used
        truth = self.expanded(expanded)
        self.restore(before)  # `NAME=value command` sets it for the command only
        return truth

    def restore(self, values: dict[str, list[str] | None]) -> None:
        """Set variables back to earlier values, None for unset."""
        for name, value in values.items():
            self.variables.pop(name, None)
            if value is not None:
                self.variables[name] = value

    def declared(self, words: Sequence[str]) -> bool:
        """Follow `export`, `local` and the like."""
        for word in words[1:]:
            match = ASSIGNMENT.match(word)
            if re.match(r"-\w*[Ain]", word) or (match is None and set("=$`") & set(word)):
                raise self.refused(f"{words[0]} {word}")
            if words[0] == "local":
                name = match[1] if match else word
                self.locals.setdefault(name, self.variables.get(name))
            if match:
                self.assign(word)
        return True

    def assign(self, word: str) -> None:
        """Set the variable that `NAME=value` sets."""
        match = ASSIGNMENT.match(word)
        assert match is not None
        name, source = match[1], word[match.end() :]
        if name == "IFS":
            raise self.refused(word)
        self.used, self.target = set(), name
        old = self.variables.get(name, []) if match[2] else []
        if source.startswith("("):
            elements = [token.text for token in tokens_of(source[1:-1], self.line) if token.is_word]
            if any(INDEX.match(element) for element in elements):
                raise self.refused("[INDEX]= in an array")
            self.variables[name] = old + [text for element in elements for text in self.fields(element)]
        else:
            self.assign_text(name, "".join(old[:1]) + self.text(source))
        self.target = ""
        self.asked.add(name)
        if name in self.given and name not in self.used and self.variables[name] != [self.given[name]]:
            self.notes.append(f"--set {name}={self.given[name]} has no effect: line {self.line} sets {shown(word)}")
        self.spend(sum(map(len, self.variables[name])))
        self.sources[name] = self.all_used() | (self.sources.get(name, set()) if match[2] else set())

    def assign_text(self, name: str, text: str) -> None:
        """Set a variable to a text; of an array, bash sets the first element."""
        self.variables[name] = [text, *self.variables.get(name, [])[1:]]

    def all_used(self) -> set[str]:
        """Return the names that expansions have read, and those that their values were made from."""
        return self.used.union(*(self.sources.get(name, set()) for name in self.used))

    def expanded(self, words: list[str]) -> bool | None:
        """Follow an expanded command."""
        documents = [word[1:] for word in words if word.startswith(DOCUMENT)]
        words = [word for word in words if not word.startswith(DOCUMENT)]
        head = words[0] if words else ":"
        for text in documents:
            if NAMED.search(shown(text)) or set(words) & SUBMITTING:  # `sbatch <<EOF`; `cat` into a file that is run
                self.follow_text(text, self.line + 1)
        if refused := {head, " ".join(words[:2])}.intersection(REFUSED):
            raise self.refused(refused.pop())
        if head in ("true", ":", "false"):
            return head != "false"
        if head == "unset" or head in READING:  # what is read is not known, as if it were set elsewhere
            for name in words[1:]:
                self.variables.pop(name, None)
        elif head in ("source", ".") and words[1:]:
            self.notes.append(f"line {self.line}: {shown(words[1])} is read by the script, but not here")
        elif head in self.functions:
            return self.follow(*self.functions[head], words[1:])
        elif head == "eval":
            text = " ".join(words[1:])
            return self.follow(text, steps_of(text, self.line), self.arguments)
        elif head not in SHOWING:
            shell = next((at for at, word in enumerate(words) if word in SHELLS), len(words))
            options = words[shell + 1 :]
            flag = next((at for at, word in enumerate(options) if re.fullmatch(r"-\w*c", word)), None)
            if flag is not None and all(word.startswith("-") for word in options[:flag]) and options[flag + 1 :]:
                text = options[flag + 1]
                return self.follow(text, steps_of(text, self.line), options[flag + 3 :])
            script = next((at for at, word in enumerate(words) if SCRIPT_NAME.fullmatch(shown(word))), None)
            if script is None:  # `ssh host "cd x; torchrun pretrain_gpt.py ..."`
                for text in (word for word in words if NAMED.search(shown(word))):
                    self.follow_text(text, self.line)
            else:
                before, after = tuple(words[:script]), tuple(words[script + 1 :])
                names = frozenset(self.outer | self.all_used())
                self.calls.append(Call(self.line, before, words[script], after, names))
        return None

    def test(self, words: Sequence[str]) -> bool | None:
        """Return the truth of `[ ... ]`, `[[ ... ]]` or `test ...`, None if it is not known."""
        self.unset_is_empty = True
        in_brackets = words[0] == "[["  # where no word is split
        texts = [text for word in words[1:] for text in ([self.text(word)] if in_brackets else self.fields(word))]
        self.unset_is_empty = False
        texts = texts if words[0] == "test" else texts[:-1]
        negated = texts[:1] == ["!"]
        # the last word of `[[ ... ]]` as written, which can be a pattern
        pattern = words[-2] if in_brackets and words[1:] else None
        truth = None  # of files, which differ between machines, and of what is not read
        match texts[negated:]:
            case [text] if is_known(text):
                truth = bool(text)
            case ["-z" | "-n" as test, text] if is_known(text):
                truth = (text == "") == (test == "-z")
            case [left, "=" | "==" | "!=" as test, right] if is_known(left + right):
                if pattern is None or not set("*?[") & set(right):
                    truth = (left == right) == (test != "!=")
                elif not set("'\"\\") & set(pattern):
                    truth = fnmatch.fnmatchcase(left, right) == (test != "!=")
            case [left, test, right] if test in INTEGER_TESTS:
                with suppress(UnknownValueError):
                    truth = self.number(f"({left or 0}) {INTEGER_TESTS[test]} ({right or 0})") != 0
        return truth if truth is None else truth != negated

    def fields(self, word: str) -> list[str]:
        """Return the words that a word becomes: expansions outside quotes are split at blanks."""
        if word.startswith(DOCUMENT):
            return [DOCUMENT + (word[2:] if word[1:2] == "'" else self.document(word[1:]))]
        marks = "".join(piece if len(piece) == 1 else "_" for piece in pieces_of(word))
        if FILE_NAMES.search(marks) and not LAYERS.fullmatch(word):
            return [placeholder(self.text(word))]
        return [text.replace(QUOTED, "") for text in self.expand(word, splits=True).split(BREAK) if text]

    def document(self, text: str) -> str:
        """Return the text of a here-document expanded; quotation marks stand for themselves."""
        found, at = [], 0
        while at < len(text):
            is_mark = text[at] == '"' or text.startswith('\\"', at)
            end = at + 1 if is_mark else piece_end(text, at, in_quotes=True)
            found.append(text[at] if is_mark else self.piece(text[at:end], True, False))
            at = end
        return plain("".join(found))

    def text(self, word: str, in_quotes: bool = False) -> str:
        """Return a word expanded without splitting, as in an assignment."""
        return plain(self.expand(word, in_quotes))

    def expand(self, word: str, in_quotes: bool = False, splits: bool = False) -> str:
        """Return an expanded word with its marks BREAK and QUOTED. splits: at blanks of expansions outside quotes."""
        return "".join(self.piece(piece, in_quotes, splits) for piece in pieces_of(word, in_quotes))

    def piece(self, piece: str, in_quotes: bool, splits: bool) -> str:
        """Return a piece of a word expanded."""
        first, inside = piece[0], piece[1:-1]
        if len(piece) == 1:
            return BREAK if splits and not in_quotes and piece in " \t\n" else piece
        if first == "\\":
            return piece if in_quotes and piece[1] not in '$`"\\\n' else QUOTED + piece[1].strip("\n")
        if first == "'":
            return QUOTED + inside
        if first == '"':
            text = self.expand(inside, in_quotes=True)
            return text if ALL_IN_QUOTES.fullmatch(piece) else QUOTED + text
        if piece.startswith("$(("):
            if CHANGES.search(piece):
                raise self.refused(piece)
            try:
                return str(self.number(self.text(piece[3:-2], in_quotes=True)))
            except UnknownValueError:
                return placeholder(piece)
        if first in "`<>" or piece.startswith("$("):
            parts = pieces_of(inside.removeprefix("("), in_quotes=first == "`")
            text = "".join(part if part[0] == "'" else self.piece(part, True, False) for part in parts)
            return placeholder(f"$({plain(text).strip()})")
        if first == "$" and piece[1] not in "'\"":
            return self.parameter(piece, in_quotes, splits)
        return placeholder(piece) if first == "$" else piece

    def parameter(self, piece: str, in_quotes: bool, splits: bool) -> str:
        """Return the value of `$NAME` or `${NAME...}`, with several words of an array with [@]."""
        match = PARAMETER.fullmatch(piece[2:-1] if piece[1] == "{" else piece[1:])
        if match is None:  # such as ${!X} and ${#X}
            return placeholder(piece)
        name, index, operation = match.groups()
        self.used.add(name)
        values = self.look_up(name)
        if values is not None and name not in "@*" and index not in ("@", "*"):
            at = int(index or 0)
            values = values[at : at + 1] or (None if index else [""])
        is_empty = name == self.target or self.unset_is_empty  # if it is not set
        default = DEFAULT.fullmatch(operation)
        if default is not None:
            colon, kind, rest = default.groups()
            is_set = values is not None and (not colon or any(values))
            if kind == "+" and not (is_empty if values is None else is_known("".join(values))):
                return placeholder(piece)
            if kind == "+" and not is_set:
                return ""
            if kind == "+" or (kind != "?" and not is_set):
                text = self.expand(rest, in_quotes, splits)
                if kind == "=":
                    self.assign_text(name, plain(text))
                return text
        elif values is not None and operation:
            values = [self.cut(value, operation, piece) for value in values]
        if values is None:
            return "" if is_empty else placeholder(piece if operation else f"${name}")
        if in_quotes:
            return " ".join(values) if "*" in (name, index) else BREAK.join(QUOTED + value for value in values)
        if splits:
            values = [BLANKS.sub(lambda found: BREAK if found[0].isspace() else found[0], value) for value in values]
        return (BREAK if splits else " ").join(values)

    def look_up(self, name: str) -> list[str] | None:
        """Return the value or values of a variable; None if it is not set, or not known to be."""
        self.asked.add(name)
        if name in ("@", "*"):
            return list(self.arguments)
        if name == "#":
            return [str(len(self.arguments))]
        if name.isdecimal():
            return [self.script, *self.arguments][int(name) : int(name) + 1] or None
        return [placeholder(f"${name}")] if name in OF_THE_SHELL else self.variables.get(name)

    def cut(self, value: str, operation: str, written: str) -> str:
        """Return a value without a prefix or suffix, or with a text replaced; a placeholder if that is not known."""
        cut, replaced = CUT.fullmatch(operation), REPLACED.fullmatch(operation)
        match = cut or replaced
        pattern, new = (self.text(text or "") for text in (match[2], replaced and replaced[3])) if match else ("", "")
        if match is None or not is_known(value + pattern + new):
            return placeholder(written)
        if replaced:
            return value.replace(pattern, new, -1 if match[1] == "//" else 1)
        of_prefix = match[1][0] == "#"
        rests = [value[:at] if of_prefix else value[at:] for at in range(len(value) + 1)]
        cuts = [at for at, rest in enumerate(rests) if fnmatch.fnmatchcase(rest, pattern)]
        if not cuts:
            return value
        at = max(cuts) if (len(match[1]) == 2) == of_prefix else min(cuts)
        return value[at:] if of_prefix else value[:at]

    def number(self, text: str) -> int:
        """Return the value of an arithmetic expression in whole numbers. Raises UnknownValueError."""
        if not ARITHMETIC.fullmatch(text) or CHANGES.search(text):
            raise UnknownValueError
        try:
            tree = ast.parse(f"({text.strip() or 0})".replace("&&", " and ").replace("||", " or "), mode="eval")
            value = self.calculated(tree.body)
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
            raise UnknownValueError from None
        if abs(value) >= LARGEST:
            raise UnknownValueError
        return value

    def calculated(self, node: ast.expr) -> int:
        """Return the value of a part of an expression. Operators that Python and bash read differently are unknown."""
        match node:
            case ast.Constant(value=int() as value) if not isinstance(value, bool):
                return value
            case ast.Name(id=name):
                self.used.add(name)
                if values := self.look_up(name):
                    return self.number(values[0])
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self.calculated(operand)
            case ast.BoolOp(op=joint, values=parts):
                truths = [self.calculated(part) != 0 for part in parts]
                return int(all(truths) if isinstance(joint, ast.And) else any(truths))
            case ast.BinOp(left=left, op=sign, right=right) | ast.Compare(left=left, ops=[sign], comparators=[right]):
                if type(sign) in OPERATORS:
                    return int(OPERATORS[type(sign)](self.calculated(left), self.calculated(right)))
        raise UnknownValueError
