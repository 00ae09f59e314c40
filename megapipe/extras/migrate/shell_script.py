"""A walk through a launch script up to its calls of pretrain_gpt.py. No command of the script is executed.

Read are quotes, arrays, pipes, `&&`, `||`, redirections, `if`, `for`, `while`, functions and `{ ...; }`; all else is
refused with its line.

Assignments, `if`, `for` over known words, functions, `eval` and `bash -c` are followed; all other commands are only
looked at for the call. A value that only a running shell would know (`$(hostname)`, a variable that nothing sets)
becomes a placeholder: its source text between the marks OPEN and CLOSE. It is never split into words, and what depends
on it stays open too. A condition that depends on the machine (a file, another program) is taken as false, and an unset
variable in a condition as empty. `exit` is ignored, since it usually guards against a wrong environment.
"""

from __future__ import annotations

import ast
import fnmatch
import operator
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple

from megapipe.errors import ConfigError
from megapipe.formatting import count_text

# -------------------------------------------------------------------------------------------------------------- syntax

OPEN, CLOSE = "\ue000", "\ue001"  # marks around a value that is not known without executing something
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=")
PIECES_IN_QUOTES = {"$((": "))", "$(": ")", "${": "}", "`": "`", '"': '"', OPEN: CLOSE}  # opening -> closing mark
PIECES = {**PIECES_IN_QUOTES, "<(": ")", ">(": ")", "(": ")", '$"': '"'}
VARIABLE = re.compile(r"\$(?:[A-Za-z_]\w*|[0-9@*#?$!-])")
ONE_QUOTED = re.compile(r"'[^']*'|\$'(?:[^'\\]|\\.)*'", re.DOTALL)
COMMENT = re.compile(r"(?<=[\s(;])#[^\n]*")
SKIPPED = re.compile(r"(?:[ \t\r]|\\\r?\n)+|#[^\n]*")
OPERATOR = re.compile(r"(?P<redirection>\d*(?:<<<|<<|>>|>\||[<>]&|<>|[<>](?!\())|&>>?)|\n|;;&?|;&|;|&&|\|\||\|&|[&|()]")
ENDS_WORD = frozenset(" \t\r\n;&|<>()")
JOINTS = {"&&": "&&", "||": "||", "|": "|", "|&": "|"}
CLOSING = ("then", "elif", "else", "fi", "do", "done", "esac", "}")
REFUSED_WORDS = ("case", "select", "coproc", "function")


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
    """A word or an operator of a script; at its end an empty one."""

    text: str
    at: int
    line: int
    is_operator: bool = True
    redirects: bool = False


def piece_end(text: str, at: int, in_quotes: bool = False) -> int:
    """Return the end of a piece of a word: a quoted text, an expansion, or one character. Raises UnreadableError."""
    if text[at] == "\\":
        return at + 2
    simple = VARIABLE.match(text, at)
    if simple is None and not in_quotes:
        simple = ONE_QUOTED.match(text, at) or COMMENT.match(text, at)
    if simple is not None:
        return simple.end()
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


def assigned_names(words: Iterable[str]) -> frozenset[str]:
    """Return the names of the variables that some words assign."""
    return frozenset(match[1] for match in map(ASSIGNMENT.match, words) if match)


def tokens_of(text: str, line: int = 1) -> list[Token]:
    """Return the words and operators of a script, without comments. line: the number of its first line.

    Raises ConfigError with the line.
    """
    found: list[Token] = []
    at = 0
    while at < len(text):
        skipped, operator = SKIPPED.match(text, at), OPERATOR.match(text, at)
        if skipped is not None:
            end = skipped.end()
        elif operator is not None:
            end = operator.end()
            if operator[0].lstrip("0123456789") == "<<":
                raise refusal(line, "a here-document (<<) is not read")
            found.append(Token(operator[0], at, line, True, operator["redirection"] is not None))
        else:
            try:
                end = word_end(text, at)
            except UnreadableError as error:
                raise refusal(line + text.count("\n", at, error.at), error.what) from None
            found.append(Token(text[at:end], at, line, is_operator=False))
        line += text.count("\n", at, end)
        at = end
    return [*found, Token("", len(text), line)]


def word_end(text: str, start: int) -> int:
    """Return the end of the word that begins here; `NAME=(...)` is one word."""
    at = start
    while at < len(text):
        is_array = text[at] == "(" and ASSIGNMENT.fullmatch(text, start, at) is not None
        if text[at] in ENDS_WORD and not is_array and text[at : at + 2] not in ("<(", ">("):
            break
        at = piece_end(text, at)
    return at


# ------------------------------------------------------------------------------------------------------------ the walk

MOST_COMMANDS = 100_000
MOST_CHARACTERS = 1_000_000  # of one value; a doubling loop would fill the memory
DEEPEST = 30  # of eval, bash -c and functions inside each other
LARGEST = 2**63
BREAK, QUOTED = "\ue002", "\ue003"  # in an expanded text: between two words, and at a quoted part, which may be empty
TESTS = ("[", "[[", "test")
DECLARING = ("export", "declare", "local", "readonly", "typeset")
READING = ("read", "readarray", "mapfile")
REFUSED = ("break", "continue", "return", "shift", "let", "getopts", "set --", "printf -v")
SHELLS = ("bash", "sh", "zsh", "/bin/bash", "/bin/sh", "/usr/bin/bash")
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
FILE_NAMES = re.compile(r"[*?]|\{[^{}]*(,|\.\.)[^{}]*\}")  # words that bash replaces by file names or several words
CHANGES = re.compile(r"\+\+|--|(?<![=!<>])=(?!=)")
ARITHMETIC = re.compile(r"(?!.*\d[A-Za-z_])[\w\s()+*/%<>=!&|-]{,1000}", re.DOTALL | re.ASCII)
SCRIPT_NAME = re.compile(r"(?:.*/)?(pretrain_\w+\.py)")


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
    variables: dict[str, list[str]] = field(
        default_factory=dict
    )  # name -> elements; one of a variable that is no array


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
    text = re.sub(f"[{OPEN}{CLOSE}{BREAK}{QUOTED}\0]", "", text).replace("\r\n", "\n")
    walk = Walk(script=name)
    walk.variables |= slurm_variables(text) | {key: [value] for key, value in given}
    try:
        walk.follow(text, 1, arguments)
    except RecursionError:
        raise ConfigError(f"{name} nests expansions or commands too deeply to be read") from None
    except UnreadableError as error:
        raise refusal(walk.line, error.what) from None
    return walk


def slurm_variables(text: str) -> dict[str, list[str]]:
    """Return the variables that SLURM sets by the `#SBATCH` lines of a script."""
    options = re.findall(r"^#SBATCH\s+--?([\w-]+)(?:[= ]\s*)(\d{1,9})\b", text, re.MULTILINE)
    given = {{"N": "nodes", "n": "ntasks"}.get(option, option): int(number) for option, number in options}
    if {"nodes", "ntasks-per-node"} <= given.keys():
        given.setdefault("ntasks", given["nodes"] * given["ntasks-per-node"])
    return {name: [str(given[option])] for option, names in OF_SLURM.items() if option in given for name in names}


@dataclass
class Walk(Reading):
    """A walk: what was found so far, and the state at one point of the script.

    Commands are followed as they are read. Where `live` is False they are only read: arms that are not taken, the
    bodies of functions, of loops to find their end.
    """

    source: str = ""  # the text that is read: the script, or the words of eval or bash -c
    tokens: list[Token] = field(default_factory=list)
    at: int = 0  # the next token
    live: bool = True
    is_test: bool = False  # the command that was read last only tests something
    script: str = ""  # $0
    arguments: list[str] = field(default_factory=list)  # $1, $2, ...
    functions: dict[str, tuple[str, list[Token], int]] = field(default_factory=dict)  # text, tokens, body
    sources: dict[str, set[str]] = field(default_factory=dict)  # variable -> those that its value was made from
    used: set[str] = field(default_factory=set)  # names that expansions have read since it was last emptied
    outer: set[str] = field(default_factory=set)  # names that the eval, bash -c or function call around was made from
    locals: list[dict[str, list[str] | None]] = field(default_factory=list)  # of each function: the values to restore
    target: str = ""  # the variable that is being assigned; unset in its own value it is empty: X="$X --more"
    unset_is_empty: bool = False  # in conditions
    line: int = 0
    num_commands: int = 0

    def refused(self, what: str) -> ConfigError:
        """Return the exception for a part of the present command that is not read."""
        return refusal(self.line, f"{shown(what)} is not read")

    def peek(self, ahead: int = 0) -> Token:
        """Return a token that follows."""
        return self.tokens[min(self.at + ahead, len(self.tokens) - 1)]

    def has_ended(self) -> bool:
        return self.at >= len(self.tokens) - 1

    def take(self, *expected: str) -> Token:
        """Step over the next token, which must be one of those expected if there are any."""
        token = self.peek()
        if expected and token.text not in expected:
            raise refusal(token.line, f"{' or '.join(expected)} is missing")
        self.at += 1
        return token

    def skip(self, *texts: str) -> None:
        """Step over some tokens."""
        while self.peek().text in texts:
            self.at += 1

    def written(self, start: int) -> str:
        """Return the text from a position up to the next token, in one line."""
        return " ".join(self.source[start : self.peek().at].split()).rstrip("; ")

    def follow(self, text: str, line: int, arguments: Sequence[str]) -> bool | None:
        """Follow the commands of a text. line: the number of its first line."""
        return self.inside(text, tokens_of(text, line), 0, arguments)

    def inside(self, text: str, tokens: list[Token], at: int, arguments: Sequence[str], *until: str) -> bool | None:
        """Follow commands elsewhere, with other positional arguments, up to one of some reserved words or the end."""
        if len(self.locals) > DEEPEST:
            raise ConfigError(f"the script nests functions, eval or bash -c more than {DEEPEST} deep")
        before = self.source, self.tokens, self.at, self.arguments, self.outer, self.line
        self.source, self.tokens, self.at = text, tokens, at
        self.arguments, self.outer = list(arguments), self.outer | self.all_used()
        self.locals.append({})
        truth = self.commands(*until)
        self.restore(self.locals.pop())
        self.source, self.tokens, self.at, self.arguments, self.outer, self.line = before
        return truth

    def commands(self, *until: str) -> bool | None:
        """Follow commands up to one of some reserved words, which is left, or to the end.

        Returns the truth of the last one, None if it depends on running it.
        """
        truth: bool | None = True
        self.skip("\n", ";", "&")
        while not self.has_ended() and self.peek().text not in until:
            truth = self.chain()
            self.skip("\n", ";", "&")
        if until and self.has_ended():
            raise refusal(self.peek().line, f"{' or '.join(until)} is missing")
        return truth

    def block(self, live: bool, *until: str) -> bool | None:
        """Follow commands, or only read them."""
        before, self.live = self.live, live
        truth = self.commands(*until)
        self.live = before
        return truth

    def chain(self) -> bool | None:
        """Follow commands joined by && || |: after `A &&` only if A is true, after `A ||` unless A is true.

        A condition that is not known decides nothing (`[ -f x ] || exit`); a command that is none counts as true.
        """
        live, truth = self.live, self.command()
        while self.peek().text in JOINTS:
            joint = JOINTS[self.take().text]
            self.skip("\n")
            decided = truth if truth is not None or self.is_test else True
            self.live = live and {"|": True, "&&": decided is True, "||": decided is False}[joint]
            found = self.command()
            truth = found if self.live else decided
        self.live = live
        return truth

    def command(self) -> bool | None:
        """Follow one command, simple or compound."""
        token = self.peek()
        self.num_commands += self.live
        if self.num_commands > MOST_COMMANDS:
            raise ConfigError(
                f"the script has more than {MOST_COMMANDS} commands to follow; give its arguments instead"
            )
        if [self.peek(1).text, self.peek(2).text] == ["(", ")"] and not token.is_operator:
            self.at += 3
            self.skip("\n")
            self.take("{")
            if self.live:
                self.functions[token.text] = self.source, self.tokens, self.at
            self.block(False, "}")
            self.take()
            self.is_test = False
            return True
        if token.text in REFUSED_WORDS:
            raise refusal(token.line, f"{token.text} is not read")
        if token.text == "(":
            raise refusal(token.line, "a command in parentheses is not read")
        if token.text in CLOSING or (token.is_operator and not token.redirects):
            raise refusal(token.line, f"{token.text!r} begins no command")
        match token.text:
            case "if":
                truth = self.branches()
            case "for" | "while" | "until":
                truth = self.loop()
            case "{":
                self.take()
                truth = self.commands("}")
                self.take()
            case _:
                first = self.peek(1) if token.text == "!" else token
                return self.brackets() if first.text == "[[" else self.simple(self.words(), token.line)
        after, self.is_test = self.peek(), False
        if self.words():  # only redirections follow
            raise refusal(after.line, f"{after.text!r} is not expected after a compound command")
        return truth

    def names_until(self, read: Callable[[], object]) -> frozenset[str]:
        """Return the variables that a compound command assigns, which is read and then begins again."""
        start, self.live = self.at, False
        read()
        names = assigned_names(token.text for token in self.tokens[start : self.at])
        self.at, self.live = start, True
        return names

    def branches(self) -> bool | None:
        """Follow the arm of an `if` whose condition holds."""
        names = self.names_until(self.branches) if self.live else frozenset()
        keyword, live = self.take(), self.live
        result: bool | None = True
        while keyword.text != "fi":
            truth: bool | None = True
            if keyword.text != "else":
                self.used = set()
                truth = self.block(live, "then")
                text = self.written(keyword.at + len(keyword.text))
                self.take()
                if live:
                    reason = ": it depends on running the script" if truth is None else self.unset_names()
                    outcome = ("taken" if truth else "not taken") + reason
                    self.decisions.append(Decision(keyword.line, text, outcome, names))
            is_taken = live and truth is True
            found = self.block(is_taken, *(("fi",) if keyword.text == "else" else ("elif", "else", "fi")))
            if is_taken:  # the arms that follow are only read
                result, live = found, False
            keyword = self.take()
        return result

    def unset_names(self) -> str:
        """Return the variables of a condition that are not set, as the reason for its outcome; empty if all are."""
        unset = sorted(name for name in self.used if self.look_up(name) is None)
        return f": ${', $'.join(unset)} is not set in the script" if unset else ""

    def loop(self) -> bool | None:
        """Follow the body of `for` once for each known word. What other loops assign is not known after them."""
        keyword, name = self.take(), ""
        words: Sequence[str] | None = None
        if keyword.text != "for":
            self.block(False, "do")
        elif self.peek().text == "(":
            while not self.has_ended() and self.peek().text != "do":
                self.take()
        else:
            name, words = self.take().text, ['"$@"']
            self.skip("\n")
            if self.peek().text == "in":
                self.take()
                words = self.words()
            self.skip("\n", ";")
        condition = self.written(keyword.at)
        self.take("do")
        begin = self.at
        self.block(False, "done")
        names = assigned_names([f"{name}=", *(token.text for token in self.tokens[begin : self.at])])
        self.take()
        if not self.live:
            return None
        after, self.used, self.unset_is_empty, self.line = self.at, set(), True, keyword.line
        fields = None if words is None else [text for word in words for text in self.fields(word)]
        self.unset_is_empty = False
        if fields is None or not all(map(is_known, fields)):
            self.variables |= {name: [placeholder(f"${name}")] for name in names}
            self.decisions.append(Decision(keyword.line, condition, "skipped: it depends on running it", names))
            return None
        if unset := self.unset_names():
            outcome = f"followed for {count_text(len(fields), 'word')}{unset}"
            self.decisions.append(Decision(keyword.line, condition, outcome, names))
        for text in fields:
            self.assign_text(name, text)
            self.at = begin
            self.commands("done")
        self.at = after
        return True

    def words(self) -> list[str]:
        """Read words up to the end of the command, without redirections."""
        found: list[str] = []
        while self.peek().redirects or not self.peek().is_operator:
            token = self.take()
            if not token.redirects:
                found.append(token.text)
            elif self.take().is_operator:
                raise refusal(token.line, f"{token.text} needs a file")
        return found

    def brackets(self) -> bool | None:
        """Follow `[[ ... ]]`, with && or || a chain of tests."""
        words: list[str] = []
        joints = [""]
        truth: bool | None = True
        while "]]" not in words:
            token = self.peek()
            if self.has_ended():
                raise refusal(token.line, "]] is missing")
            self.take()
            if token.text != "\n" and token.text not in ("&&", "||"):
                words.append(token.text)
            if "]]" not in words and token.text not in ("&&", "||"):
                continue
            if token.text in ("&&", "||") and (words[0] == "!" or (token.text == "&&" and "||" in joints)):
                raise refusal(token.line, f"{token.text} after ! or || in [[ ]] is not read")
            if joints[-1] == "" or truth is (joints[-1] == "&&"):
                truth = self.simple(words if words[-1] == "]]" else [*words, "]]"], token.line)
            if token.text in ("&&", "||"):
                joints.append(token.text)
                words = ["[["]
        self.is_test = True
        return truth

    def simple(self, words: list[str], line: int) -> bool | None:
        """Follow a command: assign, step into a function, eval or bash -c, or look for the call."""
        self.is_test = not set(words[:2]).isdisjoint(TESTS)
        if not self.live:
            return None
        self.line = line
        if words[:1] == ["!"]:
            truth = self.simple(words[1:], line)
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
                self.locals[-1].setdefault(name, self.variables.get(name))
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
            elements = [token.text for token in tokens_of(source[1:-1], self.line) if token.text not in ("\n", "")]
            if any(element.startswith("[") for element in elements):
                raise self.refused("[INDEX]= in an array")
            self.variables[name] = old + [text for element in elements for text in self.fields(element)]
        else:
            self.assign_text(name, "".join(old[:1]) + self.text(source))
        self.target = ""
        if sum(map(len, self.variables[name])) > MOST_CHARACTERS:
            raise ConfigError(f"the variable {name} of the script grows over {MOST_CHARACTERS} characters")
        self.sources[name] = self.all_used() | (self.sources.get(name, set()) if match[2] else set())

    def assign_text(self, name: str, text: str) -> None:
        """Set a variable to a text; of an array, bash sets the first element."""
        self.variables[name] = [text, *self.variables.get(name, [])[1:]]

    def all_used(self) -> set[str]:
        """Return the names that expansions have read, and those that their values were made from."""
        return self.used.union(*(self.sources.get(name, set()) for name in self.used))

    def expanded(self, words: list[str]) -> bool | None:
        """Follow an expanded command."""
        head = words[0]
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
            return self.inside(*self.functions[head], words[1:], "}")
        elif head == "eval":
            return self.follow(" ".join(words[1:]), self.line, self.arguments)
        elif head not in SHOWING:
            shell = next((at for at, word in enumerate(words) if word in SHELLS), len(words))
            options = words[shell + 1 :]
            flag = next((at for at, word in enumerate(options) if re.fullmatch(r"-\w*c", word)), None)
            if flag is not None and all(word.startswith("-") for word in options[:flag]) and options[flag + 1 :]:
                return self.follow(options[flag + 1], self.line, options[flag + 3 :])
            script = next((at for at, word in enumerate(words) if SCRIPT_NAME.fullmatch(shown(word))), None)
            if script is not None:
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
        truth = self.tested(texts[negated:], words[-2] if in_brackets and words[1:] else None)
        return truth if truth is None else truth != negated

    def tested(self, texts: list[str], pattern: str | None) -> bool | None:
        """Return the truth of one test. pattern: the last word of `[[ ... ]]` as written."""
        match texts:
            case [text] if is_known(text):
                return bool(text)
            case ["-z" | "-n" as test, text] if is_known(text):
                return (text == "") == (test == "-z")
            case [left, "=" | "==" | "!=" as test, right] if is_known(left + right):
                if pattern is None or not set("*?[") & set(right):
                    return (left == right) == (test != "!=")
                if not set("'\"\\") & set(pattern):
                    return fnmatch.fnmatchcase(left, right) == (test != "!=")
            case [left, test, right] if test in INTEGER_TESTS:
                with suppress(UnknownValueError):
                    return self.number(f"({left or 0}) {INTEGER_TESTS[test]} ({right or 0})") != 0
        return None  # files, which differ between machines, and what is not read

    def fields(self, word: str) -> list[str]:
        """Return the words that a word becomes: expansions outside quotes are split at blanks."""
        if FILE_NAMES.search("".join(piece if len(piece) == 1 else "_" for piece in pieces_of(word))):
            return [placeholder(self.text(word))]
        return [text.replace(QUOTED, "") for text in self.expand(word, splits=True).split(BREAK) if text]

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

    def number(self, text: str, depth: int = 0) -> int:
        """Return the value of an arithmetic expression in whole numbers. Raises UnknownValueError."""
        if depth > DEEPEST or not ARITHMETIC.fullmatch(text) or CHANGES.search(text):
            raise UnknownValueError
        try:
            tree = ast.parse(f"({text.strip() or 0})".replace("&&", " and ").replace("||", " or "), mode="eval")
            value = self.calculated(tree.body, depth)
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
            raise UnknownValueError from None
        if abs(value) >= LARGEST:
            raise UnknownValueError
        return value

    def calculated(self, node: ast.expr, depth: int) -> int:
        """Return the value of a part of an expression. Operators that Python and bash read differently are unknown."""
        match node:
            case ast.Constant(value=int() as value) if not isinstance(value, bool):
                return value
            case ast.Name(id=name):
                self.used.add(name)
                if values := self.look_up(name):
                    return self.number(values[0], depth + 1)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self.calculated(operand, depth)
            case ast.BoolOp(op=joint, values=parts):
                truths = [self.calculated(part, depth) != 0 for part in parts]
                return int(all(truths) if isinstance(joint, ast.And) else any(truths))
            case ast.BinOp(left=left, op=sign, right=right) | ast.Compare(left=left, ops=[sign], comparators=[right]):
                if type(sign) in OPERATORS:
                    return int(OPERATORS[type(sign)](self.calculated(left, depth), self.calculated(right, depth)))
        raise UnknownValueError
