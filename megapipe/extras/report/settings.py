"""Settings that differ from their defaults, read from a configuration's YAML text and its comments."""

from __future__ import annotations

import re
from typing import NamedTuple

from megapipe.config.config import fields_by_key, value_of
from megapipe.config.fields import value_text
from megapipe.config.load import from_yaml
from megapipe.errors import ConfigError

_SECTION = re.compile(r"(\w+):\s*$")
_LINE = re.compile(r"  (\w+): .*?# (.*)$")


class Setting(NamedTuple):
    """A field whose value differs from the default."""

    section: str
    name: str
    flag: str
    value: str
    default: str
    origin: str  # 'flag --x', 'yaml FILE line N', or '' if unknown


def changed_settings(text: str) -> tuple[list[Setting], str]:
    """Return the fields that differ from their defaults, and the reason if the list is empty.

    text: YAML written by to_yaml of this version or an older one.
    """
    if not text:
        return [], "the run recorded no configuration"
    try:
        config = from_yaml(text)
    except ConfigError as error:
        return [], f"this version of megapipe cannot read the run's configuration: {error}"
    origins = _origins(text)
    found = []
    for key, field in fields_by_key().items():
        value = value_of(config, field)
        if value != field.default:
            default = (
                value_text(field.default) if field.default is not None or not field.option.required else "must be given"
            )
            found.append(
                Setting(field.section, field.name, field.main_flag, value_text(value), default, origins.get(key, ""))
            )
    return found, "" if found else "all settings have their default values"


def _origins(text: str) -> dict[str, str]:
    section, found = "", {}
    for line in text.splitlines():
        if match := _SECTION.match(line):
            section = match[1]
        elif match := _LINE.match(line):
            found[f"{section}.{match[1]}"] = match[2].split("; derived")[0]
    return found
