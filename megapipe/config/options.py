"""Configuration fields: how one is declared, and the type of its values.

Flags, YAML reading, `--help`, `--print-config`, docs/flags.md and the checks of single values are derived from the
declarations.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import re
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megapipe.errors import ConfigError

TAKES_VALUE: Any = object()  # as the value of a Flag: the value follows it on the command line
NONE_WORDS = ("none", "null", "~")
SUFFIXES = {"": 1.0, "K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
EXPECTED = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
LIMITS = {"at least": operator.ge, "above": operator.gt, "at most": operator.le, "below": operator.lt}


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


def zero_is_none(text: str) -> str:
    """Rewrite 0 as none: in Megatron, an interval of 0 is off."""
    return NONE_WORDS[0] if number_in(text) == 0 else text


def number_in(word: str) -> float | None:
    """Return a word as a number, or None if it is not one."""
    try:
        return float(word)
    except ValueError:
        return None


def read_numbers(flag: str, words: Sequence[str], defaults: Mapping[str, float], owner: str) -> dict[str, float]:
    """Return the options of an extension: its defaults, and in their place the numbers of words NAME=NUMBER.

    owner: the flag that chose the extension, for messages. Raises ConfigError.
    """
    found = dict(defaults)
    for word in words:
        name, _, text = word.partition("=")
        value = number_in(text)
        if name not in found:
            if not found:
                raise ConfigError(f"{flag} {word}: {owner} has no options; leave it out")
            raise ConfigError(f"{flag} {word}: no option of {owner}; its options are {', '.join(found)}")
        if value is None or not math.isfinite(value):
            raise ConfigError(f"{flag} {word}: expected {name}=NUMBER")
        found[name] = value
    return found


def number_with_suffix(text: str) -> float | None:
    """Return a number such as 15.6T, 300B or 1.5e13, or None if the text is not one."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?(?:e\+?\d+)?)([KMBT]?)", text, re.IGNORECASE | re.ASCII)
    return None if found is None else float(found[1]) * SUFFIXES[found[2].upper()]
