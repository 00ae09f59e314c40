"""`Problems`: collects the errors of a command line and its files, so that all are reported at once; and what messages
propose: values that would work, the names of conflicting flags.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from megapipe.errors import ConfigError
from megapipe.formatting import one_of

Section = TypeVar("Section")
MOST_MESSAGES = 50
MOST_DIVISOR = 10**6  # up to which divisors are searched


class UnreadError(Exception):
    """A rule asked for a field whose value could not be read; the rule has no answer."""


@dataclasses.dataclass
class Problems:
    """Messages, a line each, and the fields ('section.name') whose values could not be read.

    hides_fields: a file or a flag could not be read that may give any field, so that none is known to be missing.
    """

    messages: list[str] = dataclasses.field(default_factory=list)
    unread: set[str] = dataclasses.field(default_factory=set)
    hides_fields: bool = False

    def add(self, *messages: str) -> None:
        """Add messages, each once. Raises ConfigError if there are more than MOST_MESSAGES, which bounds the time."""
        self.messages += [message for message in dict.fromkeys(messages) if message not in self.messages]
        if len(self.messages) > MOST_MESSAGES:
            raise ConfigError(
                "\n".join([*self.messages[:MOST_MESSAGES], f"and more than {MOST_MESSAGES} errors in all"])
            )

    @contextmanager
    def caught(self, *keys: str) -> Iterator[None]:
        """Add the message of a ConfigError raised inside. keys: the fields that it leaves unread."""
        try:
            yield
        except ConfigError as error:
            self.add(*str(error).splitlines())
            self.unread.update(keys)

    def raise_all(self) -> None:
        """Raise one ConfigError with all messages; return if there are no messages."""
        if self.messages:
            raise ConfigError("\n".join(self.messages))


def hiding(section: Section, names: Collection[str]) -> Section:
    """Return a copy of a section in which reading one of these fields raises UnreadError."""

    def read(self: Any, name: str) -> Any:
        if name in names:
            raise UnreadError(name)
        return object.__getattribute__(self, name)

    if not names:
        return section
    kind = type(type(section).__name__, (type(section),), {"__getattribute__": read})
    copy: Section = object.__new__(kind)
    vars(copy).update(vars(section))
    return copy


def divisors(*numbers: int) -> list[int]:
    """Return the common divisors, ascending; of numbers above MOST_DIVISOR squared not all of them."""
    common = math.gcd(*numbers)
    small = [d for d in range(1, min(math.isqrt(common), MOST_DIVISOR) + 1) if common % d == 0]
    return sorted({*small, *(common // d for d in small)})


def use_divisors(*numbers: int, wanted: int) -> str:
    """Return 'use 1, 2, 4, 8 or 16': the common divisors, at most six, nearest to the wanted value."""
    return "use " + one_of(nearest_values(divisors(*numbers), wanted))


def use_multiples(unit: int, wanted: int) -> str:
    """Return 'use 16 or 24': the multiples on both sides of the wanted value."""
    below, above = wanted // unit * unit, -(-wanted // unit) * unit
    return "use " + one_of(sorted({value for value in (below, above) if value > 0}))


def nearest_values(values: list[int], wanted: int) -> list[int]:
    """Return the values nearest to a wanted one, at most six, ascending."""
    return sorted(sorted(values, key=lambda value: abs(value - wanted))[:6])


def chosen(*flags: tuple[str, bool]) -> list[str]:
    """Return the names of the flags whose condition holds."""
    return [name for name, is_given in flags if is_given]
