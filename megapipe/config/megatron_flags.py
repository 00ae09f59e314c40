"""Every flag of Megatron-LM at megatron-core 0.19.2, each in one class; no flag of a launch script is ignored.

The names, with the number of their values and Megatron's defaults, are in megatron_flags.csv: those of the argument
parser of the megatron-core 0.19.2 wheel, and those that only other versions have, such as the development branch.
Classes and notes are ours.
megatron_differences.csv has the flags that deliberately have another default or meaning here.

supported         sets a field of ours (the note is the field)
already so here   accepted: megapipe always does what it asks for; the note says how
neutral           accepted: it changes no result here, only speed, logs or what is not used; the note says why
refused           an error with the note: what to do instead. Without the flag the result would be another one.
to drop           an error with the note: what is not there. Without the flag no result changes.

A flag of the last two classes is accepted if its value is Megatron's default.

removed_flags.csv has the flags that earlier versions of megapipe had, and '--flag value' for values that a flag no
longer takes, which are refused in the same way.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from megapipe.config.options import EXPECTED, number_in
from megapipe.errors import ConfigError
from megapipe.formatting import one_of, shortened
from megapipe.input_files import read_table

SUPPORTED = "supported"
ALREADY_SO = "already so here"
NEUTRAL = "neutral"
REFUSED = "refused"
TO_DROP = "to drop"
REMOVED = "removed"  # a flag of an earlier version of megapipe
CLASSES = (SUPPORTED, ALREADY_SO, NEUTRAL, REFUSED, TO_DROP)
WITHOUT = {REFUSED: "the result differs without it", TO_DROP: "drop it, no result changes"}  # such a flag
NOT_SUPPORTED = "is a flag of Megatron that megapipe does not support"
FOLDER = Path(__file__).parent  # of the tables
NUMBERS = {"int": int, "float": float}  # instead of values, in the column accepts


@dataclass(frozen=True)
class MegatronFlag:
    """One row of the table."""

    name: str  # --with-dashes
    values: str  # "": none follows; "1": one; "+": one or more
    default: str  # Megatron's, as text; "" if none
    kind: str  # one of CLASSES
    accepts: tuple[str, ...]  # already so here and neutral: the values, ("int",) or ("float",) for numbers; () any
    note: str

    def judge(self, given: Sequence[str]) -> str:
        """Return this flag and its values as text if they are accepted. Raises ConfigError if not."""
        shown = " ".join([self.name, *map(shortened, given)])
        if self.values == "" and given:
            raise ConfigError(f"{shown}: {self.name} takes no value")
        if self.values != "" and (not given or {"", "--"} & set(given)):
            raise ConfigError(f"{self.name} needs a value; {self.note}")
        if self.values == "1" and len(given) > 1:
            raise ConfigError(f"{shown}: expected one value, got {len(given)}")
        text = " ".join(given)
        number = number_in(text)
        is_same = text.lower() == self.default.lower() or (number is not None and number == number_in(self.default))
        is_refused = self.kind == REMOVED or self.kind in WITHOUT
        if (self.default and is_same) or (not is_refused and self._is_accepted(given)):
            return shown
        if self.kind == REMOVED:
            raise ConfigError(f"{shown} was removed from megapipe; {self.note}")
        if self.kind in WITHOUT:
            rule = f"{NOT_SUPPORTED}: {WITHOUT[self.kind]}"
            raise ConfigError(f"{shown} {rule}; {self.note}")
        if self.accepts[0] in NUMBERS:
            raise ConfigError(f"{shown}: expected {EXPECTED[NUMBERS[self.accepts[0]]]}")
        raise ConfigError(f"{shown}: megapipe accepts {one_of(self.accepts)}; {self.note}")

    def _is_accepted(self, given: Sequence[str]) -> bool:
        if not self.accepts or self.values == "":
            return True
        if self.accepts[0] in NUMBERS:
            numbers = [number_in(word) for word in given]
            return all(number is not None and math.isfinite(number) for number in numbers) and (
                self.accepts[0] == "float" or all(number == int(number) for number in numbers if number is not None)
            )
        return all(word in self.accepts for word in given)


@cache
def megatron_flags() -> dict[str, MegatronFlag]:
    """Return flag name, with dashes -> row of the table."""
    return {
        name: MegatronFlag(name, values, default, kind, tuple(accepts.split("|")) if accepts else (), note)
        for name, values, default, kind, accepts, note in read_table(FOLDER / "megatron_flags.csv")
    }


@cache
def removed_flags() -> dict[str, MegatronFlag]:
    """Return flag name, with dashes -> row of the flags that earlier versions had, for the values that they took; for a
    value that a flag no longer takes, '--flag value' -> row.
    """
    rows = read_table(FOLDER / "removed_flags.csv")
    return {name: MegatronFlag(name, values, "", REMOVED, (), note) for name, values, note in rows}


def row_of(name: str) -> MegatronFlag | None:
    """Return the row of a flag of Megatron, or of an earlier version; None if there is none."""
    return megatron_flags().get(name) or removed_flags().get(name)


def check_not_removed(name: str, value: str) -> None:
    """Raise ConfigError for a value of a flag that only earlier versions took."""
    if (row := removed_flags().get(f"{name} {value}")) is not None:
        raise ConfigError(f"{row.name} was removed from megapipe; {row.note}")


@dataclass(frozen=True)
class MegatronDifference:
    """A flag that deliberately has another default or meaning than in Megatron."""

    flag: str
    megatron: str
    here: str
    reason: str


DELIBERATE_DIFFERENCES = tuple(MegatronDifference(*row) for row in read_table(FOLDER / "megatron_differences.csv"))


def differences_line() -> str:
    """Return the deliberate differences in one line, for the start of a run."""
    flags = ", ".join(f"{difference.flag} {difference.here}" for difference in DELIBERATE_DIFFERENCES)
    return f"defaults that differ from Megatron's: {flags} (see docs/flags.md)"
