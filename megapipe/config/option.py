"""What a configuration field says about itself: help, unit, choices, range and the flags that set it.

Every field of a section is declared with `option(...)`; flags, YAML reading, `--help`, `--print-config` and docs/flags.md are made from
these declarations and from nothing else.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


class TakesValue:
    """Marks a flag whose value stands after it on the command line."""

    def __repr__(self) -> str:
        return "TAKES_VALUE"


TAKES_VALUE = TakesValue()


@dataclass(frozen=True)
class Flag:
    """One spelling on the command line that sets a field.

    value: TAKES_VALUE, or the constant that the bare flag sets.
    also_sets: other fields of the same section that the flag sets to constants (`--rotary-seq-len-interpolation-factor 4`: linear scaling).
    only_from: if given, the constant is set only where the field would otherwise hold one of these values
        (`--no-bias-gelu-fusion` turns tanh GELU into erf GELU and leaves SwiGLU alone, as in Megatron).
    """

    name: str
    value: Any = TAKES_VALUE
    also_sets: tuple[tuple[str, Any], ...] = ()
    only_from: tuple[Any, ...] | None = None
    help: str = ""


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
    off_flag: str | None = None  # booleans: instead of --no-field-name
    more_flags: tuple[Flag, ...] = ()
    read: Callable[[str], str] | None = None  # rewrites the text of a value before it is read
    required: bool = False  # the dataclass default serves tests; a job has to say it
    derived: str = ""  # what planner.resolve puts in place of None


def option(default: Any, help: str, **declaration: Any) -> Any:
    """A dataclass field with a default and its `Option`."""
    return dataclasses.field(default=default, metadata={"option": Option(help=help, **declaration)})
