"""The declaration of a configuration field: help, unit, choices, range, flags, and the option that it needs.

Every field of a section is declared with `option(...)`; flags, YAML reading, `--help`, `--print-config`, docs/flags.md
and the checks of single values are derived from these declarations.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


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
