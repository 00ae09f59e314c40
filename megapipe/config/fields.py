"""Every configuration field with its section, type and declaration: what flags, YAML, help, documents and tests are made from."""

from __future__ import annotations

import dataclasses
import types
import typing
from dataclasses import dataclass
from functools import cache
from typing import Any

from megapipe.config.config import Config
from megapipe.config.option import TAKES_VALUE, Flag, Option


@dataclass(frozen=True)
class Kind:
    """The type of a field: a scalar, or a tuple of them, perhaps None."""

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
        """'section.name': how errors, origins and saved configurations call the field."""
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
    """The Kind of a type annotation such as `int`, `float | None`, `tuple[str, ...]` or `tuple[int, int, int] | None`."""
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


@cache
def section_types() -> dict[str, type]:
    """Section name -> dataclass, in the order of `Config`."""
    return dict(typing.get_type_hints(Config))


@cache
def all_fields() -> tuple[ConfigField, ...]:
    """Every field of every section, in the order of declaration."""
    found = []
    for section, section_type in section_types().items():
        annotations = typing.get_type_hints(section_type)
        for field in dataclasses.fields(section_type):
            found.append(
                ConfigField(
                    section, field.name, kind_of(annotations[field.name]), field.default, field.metadata["option"]
                )
            )
    return tuple(found)


@cache
def fields_by_key() -> dict[str, ConfigField]:
    """'section.name' -> field."""
    return {field.key: field for field in all_fields()}


def value_of(config: Config, field: ConfigField) -> Any:
    """The field's value in a configuration."""
    return getattr(getattr(config, field.section), field.name)


def make_config(values: dict[str, Any]) -> Config:
    """The configuration with these values by 'section.name', and defaults elsewhere."""
    sections: dict[str, dict[str, Any]] = {name: {} for name in section_types()}
    for key, value in values.items():
        section, name = key.split(".")
        sections[section][name] = value
    return Config(**{name: section_types()[name](**values) for name, values in sections.items()})
