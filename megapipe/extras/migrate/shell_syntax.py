"""The syntax of launch scripts in bash: text -> commands, whose words are kept as written. Nothing is executed.

Read are quotes, arrays, pipes, `&&`, `||`, redirections, `if`, `for`, `while`, functions and `{ ...; }`. All else is
refused with its line. A text inside placeholder marks is a value that an earlier expansion left open.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from megapipe.errors import ConfigError

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
REFUSED = ("case", "select", "coproc", "function")


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
    """A word or an operator of a script."""

    text: str
    at: int
    line: int
    is_operator: bool = True
    redirects: bool = False


@dataclass(frozen=True)
class Simple:
    """A command of words as written; `[[ ... ]]` without && and || too."""

    words: tuple[str, ...]
    line: int


@dataclass(frozen=True)
class Chain:
    """Commands joined by `&&`, `||` or `|`; joints[i] precedes commands[i + 1]."""

    commands: tuple[Command, ...]
    joints: tuple[str, ...]


@dataclass(frozen=True)
class Group:
    """`{ ...; }`, or the definition of a function if it has a name."""

    body: tuple[Command, ...]
    name: str = ""


@dataclass(frozen=True)
class Arm:
    """One arm of an `if`. condition: the commands after `if`, none of `else`."""

    text: str  # the condition as written
    line: int
    condition: tuple[Command, ...]
    body: tuple[Command, ...]


@dataclass(frozen=True)
class Branches:
    """`if`, with its arms."""

    arms: tuple[Arm, ...]
    names: frozenset[str]  # variables that any arm assigns


@dataclass(frozen=True)
class Loop:
    """`for name in words`, or a loop whose number of passes is not known here (words None)."""

    text: str  # the head as written
    line: int
    body: tuple[Command, ...]
    names: frozenset[str]  # variables that the loop assigns
    name: str
    words: tuple[str, ...] | None


Command = Simple | Chain | Group | Branches | Loop


def parse_script(text: str, line: int = 1) -> tuple[Command, ...]:
    """Return the commands of a script. line: the number of its first line. Raises ConfigError with the line."""
    try:
        return Parser(text, line).commands()
    except UnreadableError as error:
        raise refusal(line + text.count("\n", 0, error.at), error.what) from None


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
    """Return the words and operators of a script, without comments. Raises UnreadableError."""
    found: list[Token] = []
    at = 0
    while at < len(text):
        skipped, operator = SKIPPED.match(text, at), OPERATOR.match(text, at)
        if skipped is not None:
            end = skipped.end()
        elif operator is not None:
            end = operator.end()
            if operator[0].lstrip("0123456789") == "<<":
                raise UnreadableError(at, "a here-document (<<) is not read")
            found.append(Token(operator[0], at, line, True, operator["redirection"] is not None))
        else:
            end = word_end(text, at)
            found.append(Token(text[at:end], at, line, is_operator=False))
        line += text.count("\n", at, end)
        at = end
    return found


def word_end(text: str, start: int) -> int:
    """Return the end of the word that begins here; `NAME=(...)` is one word."""
    at = start
    while at < len(text):
        is_array = text[at] == "(" and ASSIGNMENT.fullmatch(text, start, at) is not None
        if text[at] in ENDS_WORD and not is_array and text[at : at + 2] not in ("<(", ">("):
            break
        at = piece_end(text, at)
    return at


class Parser:
    """The parser of one script, token after token."""

    def __init__(self, text: str, line: int) -> None:
        self.text, self.at = text, 0
        self.tokens = tokens_of(text, line)
        self.end = Token("", len(text), line + text.count("\n"))

    def peek(self, ahead: int = 0) -> Token:
        """Return a token that follows, the empty one at the end."""
        return self.tokens[self.at + ahead] if self.at + ahead < len(self.tokens) else self.end

    def take(self, *expected: str) -> Token:
        """Step over the next token, which must be one of those expected if there are any."""
        token = self.peek()
        if expected and token.text not in expected:
            raise UnreadableError(token.at, f"{' or '.join(expected)} is missing")
        self.at += 1
        return token

    def skip(self, *texts: str) -> None:
        """Step over some tokens."""
        while self.peek().text in texts:
            self.at += 1

    def written(self, start: int) -> str:
        """Return the text from a position up to the next token, in one line."""
        return " ".join(self.text[start : self.peek().at].split()).rstrip("; ")

    def commands(self, *until: str) -> tuple[Command, ...]:
        """Read commands up to one of some reserved words, which is left, or to the end."""
        found: list[Command] = []
        self.skip("\n", ";", "&")
        while self.peek() is not self.end and self.peek().text not in until:
            found.append(self.chain())
            self.skip("\n", ";", "&")
        if until and self.peek() is self.end:
            raise UnreadableError(self.end.at, f"{' or '.join(until)} is missing")
        return tuple(found)

    def chain(self) -> Command:
        """Read commands joined by && || |."""
        commands = [self.command()]
        joints: list[str] = []
        while self.peek().text in JOINTS:
            joints.append(JOINTS[self.take().text])
            self.skip("\n")
            commands.append(self.command())
        return Chain(tuple(commands), tuple(joints)) if joints else commands[0]

    def command(self) -> Command:
        """Read one command, simple or compound."""
        token = self.peek()
        if [self.peek(1).text, self.peek(2).text] == ["(", ")"] and not token.is_operator:
            self.at += 3
            self.skip("\n")
            return self.group(token.text)
        if token.text in REFUSED:
            raise UnreadableError(token.at, f"{token.text} is not read")
        if token.text == "(":
            raise UnreadableError(token.at, "a command in parentheses is not read")
        if token.text in CLOSING or (token.is_operator and not token.redirects):
            raise UnreadableError(token.at, f"{token.text!r} begins no command")
        command: Command
        match token.text:
            case "if":
                command = self.branches()
            case "for" | "while" | "until":
                command = self.loop()
            case "{":
                command = self.group()
            case _:
                first = self.peek(1) if token.text == "!" else token
                return self.test() if first.text == "[[" else Simple(self.words(), token.line)
        after = self.peek()
        if self.words():  # only redirections follow
            raise UnreadableError(after.at, f"{after.text!r} is not expected after a compound command")
        return command

    def group(self, name: str = "") -> Group:
        """Read `{ ...; }`, the body of a function if there is a name."""
        self.take("{")
        body = self.commands("}")
        self.take()
        return Group(body, name)

    def branches(self) -> Branches:
        """Read `if ...; fi`."""
        arms: list[Arm] = []
        start, keyword = self.at, self.take()
        while keyword.text != "fi":
            is_else = keyword.text == "else"
            condition = () if is_else else self.commands("then")
            text = self.written(keyword.at + len(keyword.text))
            if not is_else:
                self.take()
            body = self.commands("fi") if is_else else self.commands("elif", "else", "fi")
            arms.append(Arm(text, keyword.line, condition, body))
            keyword = self.take()
        return Branches(tuple(arms), assigned_names(token.text for token in self.tokens[start : self.at]))

    def loop(self) -> Loop:
        """Read `for`, `while` or `until` up to `done`."""
        keyword = self.take()
        name = ""
        words: tuple[str, ...] | None = None
        if keyword.text != "for":
            self.commands("do")
        elif self.peek().text == "(":
            while self.peek() is not self.end and self.peek().text != "do":
                self.take()
        else:
            name, words = self.take().text, ('"$@"',)
            self.skip("\n")
            if self.peek().text == "in":
                self.take()
                words = self.words()
            self.skip("\n", ";")
        text = self.written(keyword.at)
        self.take("do")
        start, body = self.at, self.commands("done")
        names = assigned_names([f"{name}=", *(token.text for token in self.tokens[start : self.at])])
        self.take()
        return Loop(text, keyword.line, body, names, name, words)

    def words(self) -> tuple[str, ...]:
        """Read words up to the end of the command, without redirections."""
        found: list[str] = []
        while self.peek().redirects or not self.peek().is_operator:
            token = self.take()
            if not token.redirects:
                found.append(token.text)
            elif self.take().is_operator:
                raise UnreadableError(token.at, f"{token.text} needs a file")
        return tuple(found)

    def test(self) -> Command:
        """Read `[[ ... ]]`, with && or || a chain of tests."""
        words: list[str] = []
        tests: list[Simple] = []
        joints: list[str] = []
        while "]]" not in words:
            token = self.take()
            if token is self.end:
                raise UnreadableError(token.at, "]] is missing")
            if token.text in ("&&", "||"):
                if words[0] == "!" or (token.text == "&&" and "||" in joints):
                    raise UnreadableError(token.at, f"{token.text} after ! or || in [[ ]] is not read")
                joints.append(token.text)
                tests.append(Simple((*words, "]]"), token.line))
                words = ["[["]
            elif token.text != "\n":
                words.append(token.text)
        return Chain((*tests, Simple(tuple(words), token.line)), tuple(joints))
