"""Configuration fields: how one is declared, the type of its values, and its values as text.

Every field of a section is declared with `option(...)`; flags, YAML reading, `--help`, `--print-config`, docs/flags.md
and the checks of single values are derived from these declarations.

A text is read by the type of its field, never by what it looks like, so that YAML's own guesses about types play no
part: `1e-3` is a number for a number and a string for a string, `on` is a boolean only for a boolean, `12:30:45` is
never 45045.
"""

from __future__ import annotations

import dataclasses
import math
import re
import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megapipe.errors import ConfigError
from megapipe.formatting import one_of

NONE_WORDS = ("none", "null", "~")
TRUE_WORDS = ("true", "yes", "on")
FALSE_WORDS = ("false", "no", "off")
EXPECTED = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
PLAIN_TEXT = re.compile(r"[A-Za-z_./][A-Za-z0-9_./-]*")


class TakesValue:
    """Type of the marker TAKES_VALUE: the flag's value follows it on the command line."""

    def __repr__(self) -> str:
        return "TAKES_VALUE"


TAKES_VALUE = TakesValue()


@dataclass(frozen=True)
class Flag:
    """One spelling on the command line that sets a field.

    value: TAKES_VALUE, or the constant that the bare flag sets.
    also_sets: other fields of the same section that the flag sets to constants
        (`--rotary-seq-len-interpolation-factor 4` also selects linear scaling).
    only_from: if given, the constant is set only where the field would otherwise hold one of these values
        (`--no-bias-gelu-fusion` turns tanh GELU into erf GELU and leaves SwiGLU alone, as in Megatron).
    """

    name: str
    value: Any = TAKES_VALUE
    also_sets: tuple[tuple[str, Any], ...] = ()
    only_from: tuple[Any, ...] | None = None
    help: str = ""


@dataclass(frozen=True)
class Need:
    """Another option without which a field has no effect; setting the field without it is an error.

    key: 'section.name' of the other field. flag: how to give it, for the message. values: the values that will do;
    empty: any but None, False and 0.
    """

    key: str
    flag: str
    values: tuple[str, ...] = ()

    def is_met_by(self, value: Any) -> bool:
        return value in self.values if self.values else bool(value)


@dataclass(frozen=True)
class Option:
    """The declaration of one field. Ranges hold for numbers and for each member of a tuple of numbers."""

    help: str
    unit: str = ""
    choices: tuple[str, ...] = ()
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    flag: str | None = None  # instead of --field-name
    off_flag: str | None = None  # for booleans: instead of --no-field-name
    more_flags: tuple[Flag, ...] = ()
    read: Callable[[str], str] | None = None  # rewrites the text of a value before it is read
    required: bool = False  # must be given for a training job; the default in the dataclass is for tests
    derived: str = ""  # what plan.resolve puts in place of None
    needs: Need | None = None


def option(default: Any, help: str, **declaration: Any) -> Any:
    """Return a dataclass field with a default and its `Option`."""
    return dataclasses.field(default=default, metadata={"option": Option(help=help, **declaration)})


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
        """All flags that set the field, the main one first."""
        if self.kind.scalar is bool:
            off = self.option.off_flag or "--no-" + self.main_flag[2:]
            own: tuple[Flag, ...] = (Flag(self.main_flag, value=True), Flag(off, value=False))
        else:
            own = (Flag(self.main_flag, value=TAKES_VALUE),)
        return own + self.option.more_flags


def kind_of(annotation: Any) -> Kind:
    """Return the Kind of an annotation such as `int`, `float | None`, `tuple[str, ...]` or `tuple[int, int] | None`."""
    optional = False
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        members = [member for member in typing.get_args(annotation) if member is not type(None)]
        if len(members) != 1:
            raise TypeError(f"a configuration field has one type, or None: {annotation}")
        optional, annotation = True, members[0]
    if typing.get_origin(annotation) is tuple:
        members = list(typing.get_args(annotation))
        length = None if members[-1] is Ellipsis else len(members)
        return Kind(scalar=members[0], optional=optional, many=True, length=length)
    if annotation not in (int, float, bool, str):
        raise TypeError(f"a configuration field is an int, float, bool, str, a tuple of them, or None: {annotation}")
    return Kind(scalar=annotation, optional=optional, many=False, length=None)


def shown(field: ConfigField, value: Any) -> str:
    """Return the flag that sets a field to a value, for messages: '--save DIR', '--no-async-save'."""
    if field.kind.scalar is bool:
        return field.flags[0 if value else 1].name
    words = " ".join(map(str, value)) if isinstance(value, tuple) else value_text(value)
    return f"{field.main_flag} {words}"


def read_value(field: ConfigField, raw: str | Sequence[str], subject: str, *, literal: bool = False) -> Any:
    """Read the value of this field from a text or a list of texts.

    subject: the name of the field in errors (`--lr`, `tiny.yaml line 3: optimizer.lr`).
    literal: the text was quoted, so that "none" is a string.
    Raises ConfigError with subject, text and what was expected.
    """
    kind, option = field.kind, field.option
    if isinstance(raw, str):
        if kind.optional and not literal and raw.lower() in NONE_WORDS:
            return None
        if not kind.many:
            return read_scalar(kind.scalar, option, raw, subject)
        # a path can contain blanks, a number cannot
        items: Sequence[str] = [raw] if kind.scalar is str and not option.choices else re.split(r"[\s,]+", raw.strip())
    else:
        items = raw
    if not kind.many:
        raise ConfigError(f"{subject} {' '.join(items)}: expected one value, {describe(field)}, got {len(items)}")
    if kind.optional and len(items) == 1 and not literal and items[0].lower() in NONE_WORDS:
        return None
    if kind.length is not None and len(items) != kind.length:
        raise ConfigError(
            f"{subject} {' '.join(items)}: expected {kind.length} values, got {len(items)} ({option.help})"
        )
    return tuple(read_scalar(kind.scalar, option, item, subject) for item in items)


def read_scalar(scalar: type, option: Option, raw: str, subject: str) -> Any:
    """Read one text as an int, float, bool or str within the option's choices and range."""
    text = option.read(raw) if option.read is not None else raw
    value: Any
    if scalar is str:
        value = text
    elif scalar is bool:
        value = True if text.lower() in TRUE_WORDS else False if text.lower() in FALSE_WORDS else None
    else:
        value = read_number(scalar, text)
    if value is None:
        raise ConfigError(
            f"{subject} {raw}: expected {', '.join(filter(None, (EXPECTED[scalar], expected_range(option))))}"
        )
    trouble = out_of_bounds(option, value)
    if trouble:
        raise ConfigError(f"{subject} {raw}: {trouble}")
    return value


def read_number(scalar: type, text: str) -> int | float | None:
    """Read a finite decimal number; return None if the text is not one. An int may be written as 1e6 or 1000.0."""
    try:
        number = int(text) if re.fullmatch(r"[+-]?\d+", text) else float(text)
    except ValueError:
        return None
    if "_" in text or not math.isfinite(number):
        return None
    if scalar is float:
        return float(number)
    return int(number) if number == int(number) else None


def expected_range(option: Option) -> str:
    """Return the option's range in words, such as 'at least 1 and below 2', or nothing."""
    limits = (
        ("at least", option.at_least),
        ("above", option.above),
        ("at most", option.at_most),
        ("below", option.below),
    )
    return " and ".join(f"{word} {limit:g}" for word, limit in limits if limit is not None)


def out_of_bounds(option: Option, value: Any) -> str:
    """Return the error in one value of the right type; empty if the value is valid."""
    if option.choices and value not in option.choices:
        return f"choose {one_of(option.choices)}{nearest(str(value), option.choices)}"
    if value == "" and isinstance(value, str):
        return "the value is empty"  # such as an unset variable in a launch script
    if isinstance(value, bool) or not isinstance(value, int | float):
        return ""
    good = (
        (option.at_least is None or value >= option.at_least)
        and (option.above is None or value > option.above)
        and (option.at_most is None or value <= option.at_most)
        and (option.below is None or value < option.below)
    )
    return "" if good else f"expected a value {expected_range(option)}"


def nearest(word: str, words: Sequence[str]) -> str:
    """Return '; did you mean x?' with the most similar of some words, or nothing if no word is similar."""
    import difflib  # only needed for an error

    lower = {candidate.lower(): candidate for candidate in words}
    match = difflib.get_close_matches(word.lower(), list(lower), n=1, cutoff=0.6)
    return f"; did you mean {lower[match[0]]}?" if match else ""


def describe(field: ConfigField) -> str:
    """Return the type of a field in words."""
    words = EXPECTED[field.kind.scalar]
    if field.kind.many:
        words = f"a list, each {words}" if field.kind.length is None else f"{field.kind.length} values, each {words}"
    return words


def value_text(value: Any) -> str:
    """Return a value as YAML on one line, which `read_value` and any other YAML reader read back."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        text = repr(value)
        mantissa, exponent_mark, exponent = text.partition("e")
        # YAML 1.1 takes 1e-05 for a string
        return f"{mantissa}.0e{exponent}" if exponent_mark and "." not in mantissa else text
    if isinstance(value, int):
        return str(value)
    if isinstance(value, tuple):
        return "[" + ", ".join(value_text(item) for item in value) + "]"
    return plain_or_quoted(str(value))


def plain_or_quoted(text: str) -> str:
    """Return a string as a YAML scalar: plain where it cannot be misread, else in double quotes with escapes."""
    reserved = (*NONE_WORDS, *TRUE_WORDS, *FALSE_WORDS, "y", "n", ".", "..", ".nan", ".inf")
    if PLAIN_TEXT.fullmatch(text) and text.lower() not in reserved and not text.startswith("..."):
        return text
    return '"' + "".join(escaped(character) for character in text) + '"'


def escaped(character: str) -> str:
    """Return one character as it is written inside YAML double quotes."""
    if character in '"\\':
        return "\\" + character
    code = ord(character)
    if 0x20 <= code < 0x7F:
        return character
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
