"""The syntax of shell scripts: text -> commands and words. Nothing is expanded and nothing is executed here.

Bash's grammar as launch scripts use it: quotes, arrays, expansions, heredocs (skipped), `if`, `case`, loops, functions,
`[[ ]]`, `(( ))`. A text inside placeholder marks is a word that an earlier expansion left open, and is kept whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from megapipe.errors import ConfigError

OPEN, CLOSE = "\ue000", "\ue001"  # marks around a value that is not known without executing something
TEXT, PARAMETER, COMMAND, ARITHMETIC = "text", "parameter", "command", "arithmetic"
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\[[^\]]*\])?(\+?)=")
REDIRECTION = re.compile(r"\d*(?:&>>?|>>|>\||>&|<&|<<<|<<-?|<>|>(?!\()|<(?!\())")
RESERVED = re.compile(r"(if|case|for|while|until|select|function|time|\[\[|!|\{)(?=[\s;(]|$)")
FUNCTION = re.compile(r"([\w.:-]+)[ \t]*\([ \t]*\)\s*")
SIMPLE_PARAMETER = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!-]")
ENDS_WORD = set(" \t\n;&|<>()")
ESCAPES = {"n": "\n", "t": "\t", "\\": "\\", "'": "'", '"': '"'}


@dataclass(frozen=True)
class Part:
    """A piece of a word: plain text, or the inside of `$X`, `${X...}`, `$(...)`, `$((...))`."""

    kind: str  # TEXT, PARAMETER, COMMAND or ARITHMETIC
    text: str
    quoted: bool


@dataclass(frozen=True)
class Word:
    """One word. elements: those of the array in `NAME=(...)`, else None."""

    parts: tuple[Part, ...]
    elements: tuple[Word, ...] | None = None

    @property
    def literal(self) -> str:
        """The text of a word without expansions, quotes removed; empty if it has any."""
        return "".join(part.text for part in self.parts) if all(part.kind == TEXT for part in self.parts) else ""

    @property
    def assigned(self) -> re.Match[str] | None:
        """The match of ASSIGNMENT (name, index, plus sign), or None if the word assigns nothing."""
        first = self.parts[0] if self.parts else None
        return ASSIGNMENT.match(first.text) if first is not None and first.kind == TEXT and not first.quoted else None


@dataclass(frozen=True)
class Simple:
    """A command of words; `[[ ... ]]` and `(( ... ))` too. heredoc: its text, empty without one."""

    words: tuple[Word, ...]
    line: int
    heredoc: str = ""


@dataclass(frozen=True)
class Chain:
    """Commands joined by `&&`, `||` or `|`; joints[i] precedes commands[i + 1]."""

    commands: tuple[Command, ...]
    joints: tuple[str, ...]


@dataclass(frozen=True)
class Negated:
    """`! command`."""

    command: Command


@dataclass(frozen=True)
class Group:
    """`{ ...; }` or `( ... )`."""

    body: tuple[Command, ...]


@dataclass(frozen=True)
class Arm:
    """One arm of an `if` or `case`. condition: the commands after `if`; patterns: those of `case`; neither: `else`."""

    text: str  # the condition as written
    line: int
    body: tuple[Command, ...]
    condition: tuple[Command, ...] = ()
    patterns: tuple[Word, ...] = ()


@dataclass(frozen=True)
class Branches:
    """`if` (subject None) or `case subject in`."""

    arms: tuple[Arm, ...]
    subject: Word | None = None


@dataclass(frozen=True)
class Loop:
    """`for name in words`, or a loop whose number of passes is not known here (words None)."""

    text: str  # the head as written
    line: int
    body: tuple[Command, ...]
    name: str = ""
    words: tuple[Word, ...] | None = None


@dataclass(frozen=True)
class Function:
    """A definition of a function."""

    name: str
    body: tuple[Command, ...]


Command = Simple | Chain | Negated | Group | Branches | Loop | Function


def parse_script(text: str, line: int = 1) -> tuple[Command, ...]:
    """Return the commands of a script. line: the number of its first line. Raises ConfigError with the line."""
    reader = Reader(text, line)
    commands = reader.commands(())
    if reader.at < len(text):
        raise reader.error(f"{text[reader.at :].split(maxsplit=1)[0]!r} opens or closes nothing")
    return commands


def parse_fragment(text: str, quoted: bool) -> Word:
    """Return a text as one word whose blanks belong to it: the inside of `${X:-...}` or of an arithmetic expression."""
    return Word(tuple(Reader(text, 1).pieces(lambda character: False, quoted)))


class Reader:
    """A reader of one text, from left to right."""

    def __init__(self, text: str, line: int) -> None:
        self.text, self.at, self.first_line = text, 0, line
        self.heredocs: list[tuple[str, bool]] = []  # end word and whether tabs before it are dropped
        self.bodies: list[str] = []

    @property
    def line(self) -> int:
        return self.first_line + self.text.count("\n", 0, self.at)

    def error(self, what: str) -> ConfigError:
        """Return the exception for a text that is not a shell script."""
        return ConfigError(f"line {self.line}: {what}; is this a shell script?")

    def peek(self, width: int = 1) -> str:
        return self.text[self.at : self.at + width]

    def blanks(self, *, newlines: bool = False) -> None:
        """Skip blanks, continued lines and comments, and newlines if asked for."""
        while self.at < len(self.text):
            if self.peek() in " \t\r":
                self.at += 1
            elif self.peek(2) == "\\\n" or self.peek(3) == "\\\r\n":
                self.at += 3 if self.peek(3) == "\\\r\n" else 2
            elif self.peek() == "#":
                end = self.text.find("\n", self.at)
                self.at = len(self.text) if end < 0 else end
            elif newlines and self.peek() == "\n":
                self.newline()
            else:
                return

    def newline(self) -> None:
        """Step over a newline and the heredocs that begin after it."""
        self.at += 1
        for end, strips in self.heredocs:
            lines = []
            while self.at < len(self.text):
                stop = self.text.find("\n", self.at)
                stop = len(self.text) if stop < 0 else stop
                found = self.text[self.at : stop]
                self.at = min(stop + 1, len(self.text))
                if (found.lstrip("\t") if strips else found).rstrip("\r") == end:
                    break
                lines.append(found)
            self.bodies.append("\n".join(lines))
        self.heredocs = []

    def separators(self) -> None:
        """Skip everything between two commands."""
        self.blanks(newlines=True)
        while (self.peek() == ";" and self.peek(2) != ";;") or (self.peek() == "&" and self.peek(2) != "&>"):
            self.at += 1
            self.blanks(newlines=True)

    def keyword(self, words: tuple[str, ...]) -> str:
        """Return the reserved word of these at this position, or nothing."""
        match = re.compile(r"([a-z]+|\}|\)|;;&?|;&)").match(self.text, self.at)
        return match[1] if match is not None and match[1] in words else ""

    def commands(self, until: tuple[str, ...]) -> tuple[Command, ...]:
        """Read commands up to one of some reserved words, which is left, or to the end."""
        found: list[Command] = []
        self.separators()
        while self.at < len(self.text) and not self.keyword(until):
            if self.keyword((")", "}", ";;")):
                break
            start = self.at
            found.append(self.chain())
            self.separators()
            if self.at == start:
                raise self.error(f"{self.peek()!r} begins no command")
        if until and not self.keyword(until):
            raise self.error(f"{' or '.join(until)} is missing")
        return tuple(found)

    def expect(self, word: str) -> None:
        self.separators()
        if self.keyword((word,)) != word:
            raise self.error(f"{word} is missing")
        self.at += len(word)

    def chain(self) -> Command:
        """Read commands joined by && || |."""
        commands = [self.command()]
        joints: list[str] = []
        while True:
            self.blanks()
            joint = next((joint for joint in ("&&", "||", "|&", "|") if self.text.startswith(joint, self.at)), "")
            if not joint:
                return commands[0] if not joints else Chain(tuple(commands), tuple(joints))
            self.at += len(joint)
            self.blanks(newlines=True)
            joints.append("|" if joint == "|&" else joint)
            commands.append(self.command())

    def command(self) -> Command:
        """Read one command, simple or compound."""
        self.blanks()
        line, start = self.line, self.at
        if self.peek(2) == "((":
            inside = self.enclosed(2, "))")
            return Simple((Word((Part(TEXT, "((", True),)), Word((Part(ARITHMETIC, inside, True),))), line)
        if self.peek() == "(":
            self.at += 1
            return self.grouped(")")
        match = RESERVED.match(self.text, self.at)
        if match is None:
            function = FUNCTION.match(self.text, self.at)
            if function is not None:
                self.at = function.end()
                return self.function(function[1])
            return self.simple()
        word = match[1]
        if word == "[[":
            return self.test(line)
        self.at = match.end()
        if word == "{":
            return self.grouped("}")
        if word == "!":
            return Negated(self.command())
        if word == "time":
            return self.command()
        if word == "if":
            return self.conditional(line)
        if word == "case":
            return self.case()
        if word == "function":
            self.blanks()
            name = self.word().literal
            named = re.compile(r"\s*(\([ \t]*\))?\s*").match(self.text, self.at)
            self.at = named.end() if named else self.at
            return self.function(name)
        return self.loop(word, start, line)

    def grouped(self, end: str) -> Command:
        body = self.commands((end,))
        self.expect(end)
        self.redirections()
        return Group(body)

    def function(self, name: str) -> Function:
        body = self.command()
        return Function(name, body.body if isinstance(body, Group) else (body,))

    def conditional(self, line: int) -> Branches:
        arms: list[Arm] = []
        while True:
            start = self.at
            condition = self.commands(("then",))
            text = " ".join(self.text[start : self.at].split()).rstrip("; ")
            self.expect("then")
            arms.append(Arm(text, line, self.commands(("elif", "else", "fi")), condition))
            end = self.keyword(("elif", "else", "fi"))
            line = self.line
            self.at += len(end)
            if end == "else":
                arms.append(Arm("else", line, self.commands(("fi",))))
                self.at += len("fi")
            if end != "elif":
                self.redirections()
                return Branches(tuple(arms))

    def case(self) -> Branches:
        self.blanks()
        subject = self.word()
        self.expect("in")
        arms: list[Arm] = []
        while True:
            self.separators()
            if self.at >= len(self.text):
                raise self.error("esac is missing")
            if self.keyword(("esac",)):
                self.at += len("esac")
                return Branches(tuple(arms), subject)
            line, start = self.line, self.at
            self.at += self.peek() == "("
            patterns: list[Word] = []
            while self.at < len(self.text) and self.peek() != ")":
                self.blanks()
                before = self.at
                patterns.append(self.word())
                self.blanks()
                self.at += self.peek() == "|"
                if self.at == before:
                    raise self.error("a pattern of case ends without )")
            text = self.text[start : self.at].strip()
            self.at += 1
            body = self.commands((";;", ";&", ";;&", "esac"))
            arms.append(Arm(text, line, body, patterns=tuple(patterns)))
            end = self.keyword((";;", ";&", ";;&"))
            self.at += len(end)

    def loop(self, word: str, start: int, line: int) -> Loop:
        name = ""
        words: tuple[Word, ...] | None = None
        if word in ("for", "select"):
            self.blanks()
            if self.peek(2) == "((":
                self.enclosed(2, "))")
            else:
                name = self.word().literal
                self.blanks(newlines=True)
                words = (Word((Part(PARAMETER, "@", True),)),)
                if self.keyword(("in",)):
                    self.at += 2
                    words = self.words()
        else:
            self.commands(("do",))
        text = " ".join(self.text[start : self.at].split()).rstrip("; ")
        self.expect("do")
        body = self.commands(("done",))
        self.expect("done")
        self.redirections()
        return Loop(text, line, body, name, words if word == "for" else None)

    def test(self, line: int) -> Simple:
        """Read `[[ ... ]]`, whose operators are separate words."""
        words: list[Word] = []
        while True:
            self.blanks(newlines=True)
            operator = next((mark for mark in ("&&", "||", "(", ")", "<", ">") if self.peek(len(mark)) == mark), "")
            if self.at >= len(self.text):
                raise self.error("]] is missing")
            if words and words[-1].literal == "=~":
                words.append(Word(tuple(self.pieces(str.isspace, quoted=False))))
            elif operator:
                self.at += len(operator)
                words.append(Word((Part(TEXT, operator, True),)))
            else:
                start = self.at
                words.append(self.word())
                if self.at == start:
                    raise self.error(f"{self.peek()!r} is not expected in [[ ]]")
                if words[-1].literal == "]]":
                    return Simple(tuple(words), line)

    def simple(self) -> Simple:
        line, before = self.line, len(self.bodies)
        waiting = len(self.heredocs)
        words = self.words()
        heredoc = ""
        if len(self.heredocs) > waiting:
            at, heredocs = self.at, self.heredocs
            end = self.text.find("\n", at)
            if end >= 0:  # look ahead; the text is read over again, and skipped, at the end of the line
                self.at = end
                self.newline()
                heredoc = "\n".join(self.bodies[before:])
                self.at, self.heredocs = at, heredocs
        if not words and self.at < len(self.text) and self.peek() in "()&":
            raise self.error(f"{self.peek()!r} is not expected here")
        return Simple(words, line, heredoc)

    def words(self) -> tuple[Word, ...]:
        """Read words up to the end of the command, without redirections."""
        found: list[Word] = []
        while True:
            self.blanks()
            if self.redirection():
                continue
            process = self.peek(2) in ("<(", ">(")
            if self.at >= len(self.text) or (self.peek() in ENDS_WORD and not process):
                return tuple(found)
            found.append(self.word())

    def redirections(self) -> None:
        """Skip redirections after a compound command."""
        self.blanks()
        while self.redirection():
            self.blanks()

    def redirection(self) -> bool:
        """Skip a redirection and return True if there is one here."""
        match = REDIRECTION.match(self.text, self.at)
        if match is None:
            return False
        self.at = match.end()
        self.blanks()
        target = self.word()
        if match[0].lstrip("0123456789") in ("<<", "<<-"):
            self.heredocs.append(("".join(part.text for part in target.parts), match[0].endswith("-")))
        return True

    def word(self) -> Word:
        """Read one word; `NAME=(...)` with its elements."""
        process = self.peek(2) in ("<(", ">(")
        if process:
            self.at += 1
            return Word((Part(COMMAND, self.enclosed(1, ")"), True),))
        parts = self.pieces(ENDS_WORD.__contains__, quoted=False)
        if self.peek() == "(" and len(parts) == 1 and ASSIGNMENT.fullmatch(parts[0].text) and not parts[0].quoted:
            self.at += 1
            elements: list[Word] = []
            while True:
                self.blanks(newlines=True)
                if self.at >= len(self.text):
                    raise self.error(f"the array {parts[0].text}( is not closed")
                if self.peek() == ")":
                    self.at += 1
                    return Word(tuple(parts), tuple(elements))
                before = self.at
                elements.append(self.word())
                if self.at == before:
                    raise self.error(f"{self.peek()!r} is not expected in an array")
        return Word(tuple(parts))

    def pieces(self, ends: Callable[[str], bool], quoted: bool) -> list[Part]:
        """Read the parts of a word. ends: returns True for the characters that end it."""
        parts: list[Part] = []
        plain: list[str] = []

        def add(part: Part) -> None:
            if plain:
                parts.append(Part(TEXT, "".join(plain), quoted))
                plain.clear()
            parts.append(part)

        while self.at < len(self.text) and not ends(self.peek()):
            character = self.peek()
            if character == "'" and not quoted:
                end = self.text.find("'", self.at + 1)
                if end < 0:
                    raise self.error("a ' is not closed")
                add(Part(TEXT, self.text[self.at + 1 : end], True))
                self.at = end + 1
            elif character == '"':
                self.at += 1
                inner = self.pieces('"'.__eq__, quoted=True) if not quoted else []
                if not quoted and self.at >= len(self.text):
                    raise self.error('a " is not closed')
                self.at += not quoted
                for part in inner or ([] if quoted else [Part(TEXT, "", True)]):
                    add(part)
            elif character == "\\":
                following = self.text[self.at + 1 : self.at + 2]
                self.at += 2
                if following != "\n" and (not quoted or following in '$`"\\'):
                    add(Part(TEXT, following, True))
                elif following != "\n":
                    plain.append("\\" + following)
            elif character == OPEN:
                end = self.closing_mark()
                add(Part(TEXT, self.text[self.at : end], True))
                self.at = end
            elif character in "$`":
                expansion = self.expansion(quoted)
                if expansion is None:
                    plain.append("$")
                    self.at += 1
                else:
                    add(expansion)
            else:
                plain.append(character)
                self.at += 1
        if plain:
            parts.append(Part(TEXT, "".join(plain), quoted))
        return parts

    def closing_mark(self) -> int:
        """Return the position after the placeholder that begins here; placeholders can hold others."""
        depth, at = 0, self.at
        while at < len(self.text):
            depth += (self.text[at] == OPEN) - (self.text[at] == CLOSE)
            at += 1
            if depth == 0:
                break
        return at

    def expansion(self, quoted: bool) -> Part | None:
        """Read `$...` or a backquoted command; None if the dollar sign is plain text."""
        if self.peek() == "`":
            end = self.at + 1
            while self.text[end : end + 1] not in ("", "`"):
                end += 2 if self.text[end] == "\\" else 1
            if end >= len(self.text):
                raise self.error("a ` is not closed")
            inside = self.text[self.at + 1 : end]
            self.at = end + 1
            return Part(COMMAND, inside, quoted)
        if self.peek(3) == "$((":
            at = self.at
            inside = self.enclosed(3, "))")
            if self.text[self.at - 2 : self.at] == "))":
                return Part(ARITHMETIC, inside, quoted)
            self.at = at
        if self.peek(2) == "$(":
            return Part(COMMAND, self.enclosed(2, ")"), quoted)
        if self.peek(2) == "${":
            return Part(PARAMETER, self.enclosed(2, "}"), quoted)
        if self.peek(2) == "$'" and not quoted:
            match = re.compile(r"\$'((?:[^'\\]|\\.)*)'", re.DOTALL).match(self.text, self.at)
            if match is None:
                raise self.error("a $' is not closed")
            self.at = match.end()
            text = re.sub(r"\\(.)", lambda found: ESCAPES.get(found[1], found[0]), match[1], flags=re.DOTALL)
            return Part(TEXT, text, True)
        match = SIMPLE_PARAMETER.match(self.text, self.at + 1)
        if match is None:
            if self.peek(2) == '$"' and not quoted:
                self.at += 2
                inner = "".join(part.text for part in self.pieces('"'.__eq__, quoted=True))
                self.at += 1
                return Part(TEXT, inner, True)
            return None
        self.at = match.end()
        return Part(PARAMETER, match[0], quoted)

    def enclosed(self, skip: int, end: str) -> str:
        """Read an inside up to its closing mark, over nested pairs and quotes, and return it."""
        opening = {")": "(", "))": "(", "}": "{"}[end]
        start = self.at + skip
        at, depth = start, 0
        while at < len(self.text):
            character = self.text[at]
            if character == "\\":
                at += 1
            elif character == "'" and end != "}":
                at = self.text.find("'", at + 1)
                if at < 0:
                    break
            elif character == '"':
                at += 1
                while self.text[at : at + 1] not in ("", '"'):
                    at += 2 if self.text[at] == "\\" else 1
            elif character == opening and (end != "}" or self.text[at - 1] == "$"):
                depth += 1
            elif character == end[0] and depth:
                depth -= 1
            elif self.text.startswith(end, at) or (character == end[0] and end == "))"):
                inside = self.text[start:at]
                self.at = at + (len(end) if self.text.startswith(end, at) else 1)
                return inside
            at += 1
        raise self.error(f"{self.text[self.at : start]} is not closed")
