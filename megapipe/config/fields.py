"""Configuration fields: how one is declared, the type of its values, and its values as text.

Flags, YAML reading, `--help`, `--print-config`, docs/flags.md and the checks of single values are derived from the
declarations. A text is read by the type of its field, never by what it looks like, so that YAML's own guesses play no
part: `1e-3` is a number for a number and a string for a string, `on` is a boolean only for a boolean.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import operator
import re
import types
import typing
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from megapipe.errors import ConfigError
from megapipe.formatting import one_of
from megapipe.registry import EXTENSIONS, Registry

TAKES_VALUE: Any = object()  # as the value of a Flag: the value follows it on the command line
NONE_WORDS = ("none", "null", "~")
BOOL_WORDS = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
EXPECTED = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
MOST_SHOWN = 120  # characters of a value in a message
MOST_INT = 2**63 - 1  # torch's largest size
LIMITS = {"at least": operator.ge, "above": operator.gt, "at most": operator.le, "below": operator.lt}
PLAIN_TEXT = re.compile(r"[A-Za-z_./][A-Za-z0-9_./-]*")
RESERVED = (*NONE_WORDS, *BOOL_WORDS, "y", "n", ".", "..", ".nan", ".inf")  # in YAML 1.1


@dataclass(frozen=True)
class Need:
    """Another option without which a field has no effect; setting the field without it is an error, or is remarked."""

    key: str  # 'section.name' of the other field
    flag: str  # how to give it, for the message
    values: tuple[str, ...] = ()  # the values that will do; empty: any but None, False and 0
    without: str = ""  # if given, setting the field alone is accepted, as in Megatron, and this is said
    above: int = 0  # numbers have to be above

    def is_met(self, value: Any) -> bool:
        """Return True if this value of the other field will do."""
        if self.values:
            return value in self.values
        return value > self.above if isinstance(value, int) else bool(value)


EXPERTS = Need("model.num_experts", "--num-experts N")  # of options in several sections


@dataclass(frozen=True)
class Flag:
    """One spelling on the command line that sets a field."""

    name: str
    value: Any = TAKES_VALUE  # or the constant that the bare flag sets
    # constants for other fields of the section: `--rotary-seq-len-interpolation-factor 4` also selects linear scaling
    also_sets: tuple[tuple[str, Any], ...] = ()
    # the same, only for fields that nothing else gives: `--checkpoint-activations` recomputes groups of one layer
    or_else: tuple[tuple[str, Any], ...] = ()
    # if given, the constant is set only where the field would otherwise hold one of these values:
    # `--no-bias-gelu-fusion` turns tanh GELU into erf GELU and leaves SwiGLU alone, as in Megatron
    only_from: tuple[Any, ...] | None = None
    needs: Need | None = None  # another option without which this spelling is an error
    # if given, makes the words of the field from the one value of this flag: a file's content from its path
    read: Callable[[str], Sequence[str]] | None = None
    help: str = ""  # by default, the equivalent use of the field's main flag


@dataclass(frozen=True)
class Option:
    """The declaration of one field. Ranges hold for numbers and for each member of a tuple of numbers."""

    help: str
    unit: str = ""
    choices: Collection[str] = ()  # a Registry also takes the names of extensions
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    flag: str | None = None  # instead of --field-name
    off_flag: str | Flag | None = None  # for booleans: instead of --no-field-name
    more_flags: tuple[Flag, ...] = ()
    read: Callable[[str], str] | None = None  # rewrites the text of a value before it is read
    adds_up: bool = False  # a tuple that each flag and file adds to, where others replace the value
    reads_lists: bool = False  # a YAML list is read as its text: [1, 1, 0]
    required: bool = False  # must be given for a training job; the default in the dataclass is for tests
    derived: str = ""  # what plan.resolve puts in place of None
    needs: Need | None = None

    @property
    def limits(self) -> dict[str, float]:
        """The range: words of LIMITS -> bound."""
        bounds = zip(LIMITS, (self.at_least, self.above, self.at_most, self.below), strict=True)
        return {words: bound for words, bound in bounds if bound is not None}


def option(default: Any, help: str, unit: str = "", **declaration: Any) -> Any:
    """Return a dataclass field with a default and its `Option`."""
    return dataclasses.field(default=default, metadata={"option": Option(help, unit, **declaration)})


def count(default: int | None, help: str, unit: str = "", **declaration: Any) -> Any:
    """Return a dataclass field like `option` for a whole number of at least 1."""
    return option(default, help, unit, at_least=1, **declaration)


@dataclass(frozen=True)
class Kind:
    """The type of a field: a scalar or a tuple of scalars, with or without None."""

    scalar: type  # int, float, bool or str
    optional: bool
    many: bool
    length: int | None  # of the tuple, where it is fixed


@dataclass(frozen=True)
class ConfigField:
    """One field of one section."""

    section: str
    name: str
    kind: Kind
    default: Any
    option: Option

    @property
    def key(self) -> str:
        """'section.name', the field's name in errors, origins and saved configurations."""
        return f"{self.section}.{self.name}"

    @property
    def main_flag(self) -> str:
        """The flag that takes the field's value, or turns it on."""
        return self.option.flag or "--" + self.name.replace("_", "-")

    @property
    def flags(self) -> tuple[Flag, ...]:
        """All flags that set the field, the main one first, and for a boolean then the one that turns it off."""
        main = self.main_flag
        if self.kind.scalar is bool:
            given = self.option.off_flag or "--no-" + main[2:]
            off = given if isinstance(given, Flag) else Flag(given, False)
            first, others = Flag(main, True), (off, *self.option.more_flags)
        else:
            first, others = Flag(main), self.option.more_flags
        described = []
        for flag in others:
            text = f"same as {main} {flag.value}"
            if flag.value is TAKES_VALUE:
                text = f"same as {main}"
            elif flag.value is False:
                text = f"turns {main} off"
            described.append(dataclasses.replace(flag, help=flag.help or text))
        return first, *described


def kind_of(annotation: Any) -> Kind:
    """Return the Kind of an annotation such as `int`, `float | None`, `tuple[str, ...]` or `tuple[int, int] | None`."""
    members = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    base, *others = [member for member in members if member is not types.NoneType]
    items = typing.get_args(base) if typing.get_origin(base) is tuple else (base,)
    if others or items[0] not in EXPECTED:
        raise TypeError(f"a configuration field is an int, float, bool, str, a tuple of them, or None: {annotation}")
    length = len(items) if items[-1] is not Ellipsis and base is not items[0] else None
    return Kind(items[0], optional=len(members) > 1, many=base is not items[0], length=length)


def shown(field: ConfigField, value: Any) -> str:
    """Return the flag that sets a field to a value, for messages: '--save DIR', '--no-async-save'."""
    if field.kind.scalar is bool:
        return field.flags[0 if value else 1].name
    words = " ".join(map(str, value)) if isinstance(value, tuple) else value_text(value)
    return f"{field.main_flag} {words}"


def read_value(field: ConfigField, raw: str | Sequence[str], subject: str, *, literal: bool = False) -> Any:
    """Read the value of this field from a text or a list of texts. Raises ConfigError.

    subject: the name of the field in errors (`--lr`, `tiny.yaml line 3: optimizer.lr`).
    literal: the text was quoted or in a list, so that "none" is a string.
    """
    kind, option = field.kind, field.option
    if option.reads_lists and not isinstance(raw, str):
        raw = f"[{', '.join(raw)}]"
    words = [raw] if isinstance(raw, str) else list(raw)
    given = f"{subject} {shortened(' '.join(words))}"
    if not kind.many and not isinstance(raw, str):
        raise ConfigError(f"{given}: expected one value, {EXPECTED[kind.scalar]}, got {len(words)}")
    if option.read is not None and isinstance(raw, str):
        words = [option.read(raw)]
    if kind.many and isinstance(raw, str) and (kind.scalar is not str or option.choices):
        words = re.split(r"[\s,]+", raw.strip())  # other strings are paths, which can contain blanks
    is_literal = literal and words == ([raw] if isinstance(raw, str) else list(raw))  # not rewritten
    can_be_unset = kind.optional or (kind.many and NONE_WORDS[0] not in option.choices)
    if can_be_unset and not is_literal and len(words) == 1 and words[0].lower() in NONE_WORDS:
        return None if kind.optional else field.default
    if not kind.many:
        return read_scalar(kind.scalar, option, words[0], subject)
    if kind.length is not None and len(words) != kind.length:
        raise ConfigError(f"{given}: expected {kind.length} values, got {len(words)} ({option.help})")
    return tuple(read_scalar(kind.scalar, option, word, subject) for word in words)


def read_scalar(scalar: type, option: Option, raw: str, subject: str) -> Any:
    """Read one text as an int, float, bool or str within the option's choices and range.

    A number is decimal and finite; an int may be written as 1e6, 1000.0 or, as in Python, 1_000.
    """
    value: Any = None
    if scalar is str:
        value = raw
    elif scalar is bool:
        value = BOOL_WORDS.get(raw.lower())
    elif raw.isascii():
        try:
            number = int(raw) if re.fullmatch(r"[+-]?\d+(_\d+)*", raw) else float(raw)
            if math.isfinite(number) and (scalar is float or number == int(number)):
                value = scalar(number)
        except (ValueError, OverflowError):  # not a number, or an integer of more than 308 digits
            pass
    if value is None:
        expected = ", ".join(filter(None, (EXPECTED[scalar], expected_range(option))))
        raise ConfigError(f"{subject} {shortened(raw)}: expected {expected}")
    trouble = out_of_bounds(option, value)
    if not trouble and scalar is int and abs(value) > MOST_INT:
        trouble = "expected a number below 2^63"
    if trouble:
        raise ConfigError(f"{subject} {shortened(raw)}: {trouble}")
    return value


def shortened(text: str) -> str:
    """Return a text for a message: on one line, and of a long one only the start."""
    line = text if text.isprintable() else escaped_text(text)
    return line if len(line) <= MOST_SHOWN else f"{line[:MOST_SHOWN]}... ({len(line)} characters)"


def zero_is_none(text: str) -> str:
    """Rewrite 0 as none: in Megatron, an interval of 0 is off."""
    return NONE_WORDS[0] if number_in(text) == 0 else text


def number_in(word: str) -> float | None:
    """Return a word as a number, or None if it is not one."""
    try:
        return float(word)
    except ValueError:
        return None


def expected_range(option: Option) -> str:
    """Return the option's range in words, such as 'at least 1 and below 2', or nothing."""
    return " and ".join(f"{words} {bound:g}" for words, bound in option.limits.items())


def out_of_bounds(option: Option, value: Any) -> str:
    """Return the error in one value of the right type; empty if the value is valid."""
    if (option.choices or isinstance(option.choices, Registry)) and value not in option.choices:
        return unknown_name(value, option.choices)
    if value == "" and isinstance(value, str):
        return "the value is empty"  # such as an unset variable in a launch script
    if value == "--":
        return "the value is missing"
    if isinstance(value, str) and "\0" in value:
        return "the value contains a NUL character"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return ""
    is_good = all(LIMITS[words](value, bound) for words, bound in option.limits.items())
    return "" if is_good else f"expected a value {expected_range(option)}"


def unknown_name(value: Any, choices: Collection[str]) -> str:
    """Return the error of a name that is not among some choices."""
    if not isinstance(choices, Registry):
        return f"choose {one_of(tuple(choices))}{nearest(str(value), choices)}"
    ways = [*choices, f"a {choices.kind} of an extension, loaded with --extension FILE.py"]
    return f"choose {one_of(ways)}{nearest(str(value), choices)}{EXTENSIONS.hint}"


def nearest(word: str, words: Iterable[str]) -> str:
    """Return '; did you mean x?' with the most similar of some words, or nothing if no word is similar."""
    meant = nearest_word(word, words)
    return f"; did you mean {meant}?" if meant else ""


def nearest_word(word: str, words: Iterable[str], cutoff: float = 0.6) -> str:
    """Return the most similar of some words, empty if no word is similar."""
    lower = {candidate.lower(): candidate for candidate in words}
    match = difflib.get_close_matches(word.lower()[:MOST_SHOWN], list(lower), n=1, cutoff=cutoff)
    return lower[match[0]] if match else ""


def value_text(value: Any) -> str:
    """Return a value as YAML on one line that any YAML reader reads back; a string is plain if it cannot be misread."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        mantissa, exponent_mark, exponent = repr(value).partition("e")
        # YAML 1.1 takes 1e-05 for a string
        return f"{mantissa}.0e{exponent}" if exponent_mark and "." not in mantissa else repr(value)
    if isinstance(value, tuple):
        return "[" + ", ".join(value_text(item) for item in value) + "]"
    text = str(value)
    is_plain = PLAIN_TEXT.fullmatch(text) and text.lower() not in RESERVED and not text.startswith("...")
    if is_plain or isinstance(value, int):
        return text
    return '"' + escaped_text(text) + '"'


def escaped_text(text: str) -> str:
    """Return a text as it is written inside YAML double quotes."""
    return "".join(escaped(character) for character in text)


def escaped(character: str) -> str:
    """Return one character as it is written inside YAML double quotes."""
    if character in '"\\':
        return "\\" + character
    code = ord(character)
    if 0x20 <= code < 0x7F:
        return character
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
