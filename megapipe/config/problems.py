"""`Problems`: collects the errors of a command line and its files, so that all are reported at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from megapipe.errors import ConfigError

Section = TypeVar("Section")


class UnreadError(Exception):
    """A rule asked for a field whose value could not be read; the rule has no answer."""


@dataclasses.dataclass
class Problems:
    """Messages, a line each, and the fields ('section.name') whose values could not be read."""

    messages: list[str] = dataclasses.field(default_factory=list)
    unread: set[str] = dataclasses.field(default_factory=set)

    def add(self, *messages: str) -> None:
        """Add messages, each once."""
        self.messages += [message for message in dict.fromkeys(messages) if message not in self.messages]

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
