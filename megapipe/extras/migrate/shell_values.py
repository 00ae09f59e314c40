"""The values of a shell script: variables, arrays, expansions and whole-number arithmetic.

A value that only a running shell would know (`$(hostname)`, a variable that nothing sets) becomes a placeholder: its
source text between the marks OPEN and CLOSE. It is never split into words, and what depends on it stays open too.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from megapipe.errors import ConfigError
from megapipe.extras.migrate.shell_syntax import ARITHMETIC, CLOSE, COMMAND, OPEN, TEXT, Part, Word, parse_fragment

MOST_CHARACTERS = 1_000_000  # of one value; a doubling loop would fill the memory
LARGEST = 2**63
PARAMETER_TEXT = re.compile(
    r"(?P<mark>[#!]?)(?P<name>[A-Za-z_]\w*|\d+|[@*#?$!-])(?:\[(?P<index>[^\]]*)\])?(?P<operation>.*)", re.DOTALL
)
DEFAULTS = re.compile(r"(:?)([-=+?])(.*)", re.DOTALL)
CUT = re.compile(r"(##?|%%?)(.*)", re.DOTALL)
REPLACED = re.compile(r"(//?)((?:\\.|[^/\\])+)(?:/(.*))?", re.DOTALL)
TOKEN = re.compile(
    r"\s*(\d+#\w+|0[xX][0-9a-fA-F]+|\d+|[A-Za-z_]\w*(?:\[[^\]]*\])?|\*\*|<<|>>|[<>=!]=|&&|\|\||[-+*/%()<>!?:&|^~])"
)
LEVELS = (("||",), ("&&",), ("|",), ("^",), ("&",), ("==", "!="), ("<=", ">=", "<", ">"), ("<<", ">>"), ("+", "-"))
PRODUCTS = ("*", "/", "%")


def placeholder(source: str) -> str:
    """Return a placeholder that shows a source text."""
    return OPEN + source + CLOSE


def is_known(text: str) -> bool:
    """Return True if a text has no placeholder."""
    return OPEN not in text


def shown(text: str) -> str:
    """Return a text with its placeholders as the script writes them."""
    return text.replace(OPEN, "").replace(CLOSE, "")


class OpenValueError(Exception):
    """A value that is not known without executing something."""


@dataclass
class Variables:
    """The variables of a script at one point of it."""

    script: str = "script.sh"
    arguments: list[str] = field(default_factory=list)  # $1, $2, ...
    values: dict[str, str | list[str]] = field(default_factory=dict)
    unset: dict[str, None] = field(default_factory=dict)  # used, but set nowhere before, in the order of their use
    used: set[str] = field(default_factory=set)  # names that expansions have read since it was last emptied
    target: str = ""  # the variable that is being assigned; unset in its own value it is empty, as in X="$X --more"

    def assign(self, name: str, value: str | list[str], *, appends: bool = False, index: str | None = None) -> None:
        """Set a variable, an element of an array, or append. Raises ConfigError if the value is too long."""
        old = self.values.get(name, [] if isinstance(value, list) else "")
        if index is not None:
            items = [old] if isinstance(old, str) and old else list(old)
            position = int(index) if index.isdecimal() else len(items)
            if position >= len(items):
                items += [""] * (min(position, 10_000) + 1 - len(items))
            items[min(position, 10_000)] = (items[position] if appends else "") + "".join(value)
            value = items
        elif appends and isinstance(value, list):
            value = ([old] if isinstance(old, str) and old else list(old)) + value
        elif appends and isinstance(old, list):
            value = ["".join(old[:1]) + "".join(value), *old[1:]]
        elif appends:
            value = "".join(old) + "".join(value)
        elif isinstance(old, list) and isinstance(value, str) and old:
            value = [value, *old[1:]]  # as bash does
        if sum(map(len, value)) > MOST_CHARACTERS:
            raise ConfigError(f"the variable {name} of the script grows over {MOST_CHARACTERS} characters")
        self.values[name] = value

    def fields(self, word: Word, *, empty_if_unset: bool = False) -> list[str]:
        """Return the words that an unexpanded word becomes: expansions outside quotes are split at blanks."""
        found: list[str] = []
        current: str | None = None
        for part in word.parts:
            for text, joins in self._values_of(part, empty_if_unset):
                if not joins and current is not None:  # the next element of "${ARRAY[@]}"
                    found.append(current)
                    current = None
                if part.quoted or part.kind == TEXT:
                    current = (current or "") + text
                    continue
                pieces = list(_split(text))
                if text[:1].isspace() and current is not None:
                    found.append(current)
                    current = None
                for number, piece in enumerate(pieces):
                    if number and current is not None:
                        found.append(current)
                        current = None
                    current = (current or "") + piece
                if pieces and text[-1:].isspace() and current is not None:
                    found.append(current)
                    current = None
        return found if current is None else [*found, current]

    def text(self, word: Word, *, empty_if_unset: bool = False) -> str:
        """Return a word expanded without splitting, as in an assignment."""
        texts: list[str] = []
        for part in word.parts:
            for number, (text, _) in enumerate(self._values_of(part, empty_if_unset)):
                texts += [" ", text] if number else [text]
        return "".join(texts)

    def _values_of(self, part: Part, empty_if_unset: bool) -> Iterator[tuple[str, bool]]:
        """Yield the values of a part, each with True if it joins the value before it."""
        if part.kind == TEXT:
            yield part.text, True
        elif part.kind == COMMAND:
            yield placeholder(f"$({self.text(parse_fragment(part.text, True), empty_if_unset=True).strip()})"), True
        elif part.kind == ARITHMETIC:
            try:
                yield str(self.number(part.text)), True
            except OpenValueError:
                yield placeholder(f"$(({part.text}))"), True
        else:
            values = self._parameter(part.text, part.quoted, empty_if_unset)
            for number, value in enumerate(values):
                yield value, number == 0

    def _parameter(self, source: str, quoted: bool, empty_if_unset: bool) -> list[str]:
        """Return the value of `$source` or `${source}`, several of an array with [@]."""
        match = PARAMETER_TEXT.fullmatch(source)
        if match is None:
            return [placeholder(f"${{{source}}}")]
        name, index, operation = match["name"], match["index"], match["operation"]
        as_written = f"${source}" if source == name else f"${{{source}}}"
        values = self.look_up(name, index)
        if match["mark"] == "!":
            if values is None or len(values) != 1 or not re.fullmatch(r"\w+", values[0]):
                return [placeholder(as_written)]
            name, values = values[0], self.look_up(values[0])
        if match["mark"] == "#":
            if values is None or not all(map(is_known, values)):
                return ["0" if values is None and empty_if_unset else placeholder(as_written)]
            return [str(len(values) if index in ("@", "*") else len("".join(values)))]
        default = DEFAULTS.fullmatch(operation)
        if default is not None:
            return self._default(name, values, default, quoted, as_written, empty_if_unset)
        if values is None and name == self.target:
            return [""]
        if values is None:
            self.unset[name] = None
            return [""] if empty_if_unset else [placeholder(f"${name}" if not operation else as_written)]
        if operation:
            values = [self._cut(value, operation, as_written) for value in values]
        return [" ".join(values)] if quoted and (index == "*" or name == "*") else values

    def look_up(self, name: str, index: str | None = None) -> list[str] | None:
        """Return the value or values of a variable; None if it is not set, or not known to be."""
        self.used.add(name)
        if name in ("@", "*"):
            return list(self.arguments)
        if name == "#":
            return [str(len(self.arguments))]
        if name.isdecimal():
            number = int(name)
            if number == 0:
                return [self.script]
            return [self.arguments[number - 1]] if number <= len(self.arguments) else None
        if name in ("$", "?", "!", "-", "RANDOM", "PWD", "HOSTNAME", "SECONDS", "BASH_SOURCE", "LINENO"):
            return [placeholder(f"${name}")]
        value = self.values.get(name)
        if value is None:
            return None
        if isinstance(value, str):
            return [value]
        if index in ("@", "*"):
            return list(value)
        try:
            position = self.number(index) if index else 0
        except OpenValueError:
            return [placeholder(f"${{{name}[{index}]}}")]
        return [value[position]] if -len(value) <= position < len(value) else None

    def _default(
        self,
        name: str,
        values: list[str] | None,
        match: re.Match[str],
        quoted: bool,
        as_written: str,
        empty_if_unset: bool,
    ) -> list[str]:
        """Return the value of `${name:-word}` and its like."""
        colon, operator, rest = match.groups()
        is_set = values is not None and not (colon and values == [""]) and not (colon and values == [])
        if operator == "+":
            if not is_set:
                self.unset[name] = None
                return [""]
            return [self.text(parse_fragment(rest, quoted))]
        if is_set:
            return values or []
        if operator == "?":
            self.unset[name] = None
            return [placeholder(as_written)]
        word = self.text(parse_fragment(rest, quoted), empty_if_unset=empty_if_unset)
        if operator == "=" and re.fullmatch(r"[A-Za-z_]\w*", name):
            self.assign(name, word)
        return [word]

    def _cut(self, value: str, operation: str, as_written: str) -> str:
        """Return a value without a prefix or suffix, with a pattern replaced, or a part of it."""
        if not is_known(value):
            return placeholder(as_written)
        found = CUT.fullmatch(operation)
        if found is not None:
            pattern = self.text(parse_fragment(found[2], True))
            if not is_known(pattern):
                return placeholder(as_written)
            lengths = range(len(value) + 1)
            longest = len(found[1]) == 2
            if found[1][0] == "#":
                cuts = [cut for cut in lengths if fnmatch.fnmatchcase(value[:cut], pattern)]
                return value[(max(cuts) if longest else min(cuts)) if cuts else 0 :]
            cuts = [cut for cut in lengths if fnmatch.fnmatchcase(value[cut:], pattern)]
            return value[: (min(cuts) if longest else max(cuts)) if cuts else len(value)]
        found = REPLACED.fullmatch(operation)
        if found is not None and not set(found[2]) & set("*?["):
            pattern, new = (self.text(parse_fragment(text or "", True)) for text in (found[2], found[3]))
            if is_known(pattern + new) and pattern:
                return value.replace(pattern, new, -1 if found[1] == "//" else 1)
        if operation in ("^^", ",,"):
            return value.upper() if operation == "^^" else value.lower()
        numbers = operation[1:].split(":") if operation.startswith(":") else []
        try:
            start, *rest = [self.number(number) for number in numbers]
        except (OpenValueError, ValueError):
            return placeholder(as_written)
        cut = value[start:] if start >= 0 else value[max(0, len(value) + start) :]
        return cut[: rest[0]] if rest else cut

    def number(self, expression: str, depth: int = 0) -> int:
        """Return the value of an arithmetic expression. Raises OpenValueError if it is not known."""
        if depth > 20:
            raise OpenValueError
        text = self.text(parse_fragment(expression, True), empty_if_unset=False)
        if not is_known(text):
            raise OpenValueError
        tokens, at = [], 0
        while text[at:].strip():
            match = TOKEN.match(text, at)
            if match is None:  # an assignment, ++, or not a number
                raise OpenValueError
            tokens.append(match[1])
            at = match.end()
        calculation = Calculation(self, tokens, depth)
        value = calculation.choice() if tokens else 0
        if calculation.at < len(tokens) or abs(value) >= LARGEST:
            raise OpenValueError
        return value


def _split(text: str) -> Iterator[str]:
    """Yield the words of a text, at blanks outside placeholders."""
    piece, depth = "", 0
    for character in text:
        depth += (character == OPEN) - (character == CLOSE)
        if depth == 0 and character in " \t\n":
            if piece:
                yield piece
            piece = ""
        else:
            piece += character
    if piece:
        yield piece


class Calculation:
    """Bash's whole-number arithmetic by precedence, on tokens."""

    def __init__(self, variables: Variables, tokens: list[str], depth: int) -> None:
        self.variables, self.tokens, self.depth, self.at = variables, tokens, depth, 0

    def next_in(self, operators: tuple[str, ...]) -> str:
        """Take the next token if it is one of some operators."""
        if self.at < len(self.tokens) and self.tokens[self.at] in operators:
            self.at += 1
            return self.tokens[self.at - 1]
        return ""

    def choice(self) -> int:
        condition = self.level(0)
        if not self.next_in(("?",)):
            return condition
        yes = self.choice()
        if not self.next_in((":",)):
            raise OpenValueError
        no = self.choice()
        return yes if condition else no

    def level(self, depth: int) -> int:
        if depth == len(LEVELS):
            return self.product()
        value = self.level(depth + 1)
        while operator := self.next_in(LEVELS[depth]):
            value = self.apply(operator, value, self.level(depth + 1))
        return value

    def product(self) -> int:
        value = self.power()
        while operator := self.next_in(PRODUCTS):
            value = self.apply(operator, value, self.power())
        return value

    def power(self) -> int:
        base = self.single()
        if not self.next_in(("**",)):
            return base
        exponent = self.power()
        if not 0 <= exponent < 64:
            raise OpenValueError
        return self.apply("**", base, exponent)

    def single(self) -> int:
        sign = self.next_in(("-", "+", "!", "~"))
        if sign:
            value = self.single()
            return {"-": -value, "+": value, "!": int(not value), "~": ~value}[sign]
        if self.next_in(("(",)):
            value = self.choice()
            if not self.next_in((")",)):
                raise OpenValueError
            return value
        if self.at >= len(self.tokens):
            raise OpenValueError
        token = self.tokens[self.at]
        self.at += 1
        name, _, index = token.rstrip("]").partition("[")
        if re.fullmatch(r"[A-Za-z_]\w*", name):
            found = self.variables.look_up(name, index or None)
            if found is None:
                self.variables.unset[name] = None
                raise OpenValueError
            return self.variables.number("".join(found), self.depth + 1)
        try:
            return int(token, 8 if re.fullmatch(r"0\d+", token) else 0)
        except ValueError:
            raise OpenValueError from None

    @staticmethod
    def apply(operator: str, left: int, right: int) -> int:
        """Return the result of an operator. Raises OpenValueError if it is undefined, or it has more than 64 bits."""
        if (operator in ("/", "%") and right == 0) or (operator in ("<<", ">>") and not 0 <= right < 64):
            raise OpenValueError
        quotient = abs(left) // abs(right) * (1 if (left < 0) == (right < 0) else -1) if right else 0
        value = {
            "||": lambda: bool(left or right),
            "&&": lambda: bool(left and right),
            "|": lambda: left | right,
            "^": lambda: left ^ right,
            "&": lambda: left & right,
            "==": lambda: left == right,
            "!=": lambda: left != right,
            "<=": lambda: left <= right,
            ">=": lambda: left >= right,
            "<": lambda: left < right,
            ">": lambda: left > right,
            "<<": lambda: left << right,
            ">>": lambda: left >> right,
            "+": lambda: left + right,
            "-": lambda: left - right,
            "*": lambda: left * right,
            "/": lambda: quotient,
            "%": lambda: left - quotient * right,
            "**": lambda: left**right,
        }[operator]()
        if abs(value) >= LARGEST:
            raise OpenValueError
        return int(value)
