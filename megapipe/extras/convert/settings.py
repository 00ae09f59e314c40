"""Tables of configuration keys: one part says how keys of another format's configuration and fields of our model section mean the same.

A part reads its keys into our fields and writes our fields as its keys. Writing takes a whole model and may lose what it has no key for:
whoever writes reads again and compares (`families.Family.write`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from megapipe.config.model import ModelConfig
from megapipe.errors import ConfigError

Settings = Mapping[str, Any]  # of config.json, or of Megatron's args


class Part(Protocol):
    """keys: theirs, that this part understands."""

    @property
    def keys(self) -> tuple[str, ...]: ...

    def read(self, theirs: Settings) -> dict[str, Any]:
        """Our fields. Raises ConfigError naming the key that cannot be expressed."""
        ...

    def write(self, model: ModelConfig) -> dict[str, Any]:
        """Their keys."""
        ...


class Required:
    """In place of a default: the key has to be there."""


REQUIRED = Required()


@dataclass(frozen=True)
class Key:
    """One key of theirs is one field of ours.

    default: what they take where the key is missing or null; a function of the whole configuration if it depends on other keys.
    words: their value -> ours, where the two differ; only these values can be expressed. derived: our value where the field is None.
    null_for: the value that they write as null.
    """

    theirs: str
    ours: str
    default: Any = REQUIRED
    words: Mapping[Any, Any] = field(default_factory=dict)
    derived: Callable[[ModelConfig], Any] | None = None
    null_for: Callable[[ModelConfig], Any] | None = None

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.theirs,)

    def read(self, theirs: Settings) -> dict[str, Any]:
        value = theirs.get(self.theirs)
        if value is None:
            if self.default is REQUIRED:
                raise ConfigError(f"the key {self.theirs} is missing")
            value = self.default(theirs) if callable(self.default) else self.default
        if self.words:
            if value not in self.words:
                known = ", ".join(str(word) for word in self.words)
                raise ConfigError(f"{self.theirs} {value!r} cannot be expressed; it can be {known}")
            value = self.words[value]
        return {self.ours: value}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        value = getattr(model, self.ours)
        if value is None and self.derived is not None:
            value = self.derived(model)
        if self.null_for is not None and value == self.null_for(model):
            return {self.theirs: None}
        if self.words:  # a value they have no word for is found when what was written is read again
            value = next((theirs for theirs, ours in self.words.items() if ours == value), next(iter(self.words)))
        return {self.theirs: value}


@dataclass(frozen=True)
class Fixed:
    """A key that must have one value, which is also what they take where it is missing. why: what another value would mean."""

    theirs: str
    value: Any
    why: str

    @property
    def keys(self) -> tuple[str, ...]:
        return (self.theirs,)

    def read(self, theirs: Settings) -> dict[str, Any]:
        value = theirs.get(self.theirs, self.value)
        if value != self.value and value is not None:
            raise ConfigError(f"{self.theirs} {value!r} cannot be expressed: {self.why}")
        return {}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        return {self.theirs: self.value}


@dataclass(frozen=True)
class Together:
    """Several boolean keys that must agree and are one field of ours."""

    keys: tuple[str, ...]
    ours: str
    why: str

    def read(self, theirs: Settings) -> dict[str, Any]:
        values = [bool(theirs.get(key, False)) for key in self.keys]
        if len(set(values)) > 1:
            text = ", ".join(f"{key} {value}" for key, value in zip(self.keys, values, strict=True))
            raise ConfigError(f"{text} cannot be expressed: {self.why}")
        return {self.ours: values[0]}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        return {key: getattr(model, self.ours) for key in self.keys}


@dataclass(frozen=True)
class Alike:
    """Several keys that must have one value, which is one field of ours."""

    keys: tuple[str, ...]
    ours: str
    default: Any

    def read(self, theirs: Settings) -> dict[str, Any]:
        values = {key: theirs.get(key, self.default) for key in self.keys}
        if len(set(values.values())) > 1:
            raise ConfigError(f"{values} cannot be expressed: here they are one setting, {self.ours}")
        return {self.ours: values[self.keys[0]]}

    def write(self, model: ModelConfig) -> dict[str, Any]:
        return {key: getattr(model, self.ours) for key in self.keys}


@dataclass(frozen=True)
class Always:
    """Fields of ours that this architecture always has so, without a key of its own."""

    fields: Mapping[str, Any]
    keys: tuple[str, ...] = ()

    def read(self, theirs: Settings) -> dict[str, Any]:
        return dict(self.fields)

    def write(self, model: ModelConfig) -> dict[str, Any]:
        return {}
