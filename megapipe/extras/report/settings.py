"""What a configuration sets, read from its YAML text with the comments that say where each value came from."""

from __future__ import annotations

import re
from typing import NamedTuple

from megapipe.config.fields import fields_by_key, value_of, value_text
from megapipe.config.load import from_yaml
from megapipe.errors import ConfigError

_SECTION = re.compile(r"(\w+):\s*$")
_LINE = re.compile(r"  (\w+): .*?# (.*)$")


class Setting(NamedTuple):
    """A field that is not at its default."""

    section: str
    name: str
    flag: str
    value: str
    default: str
    origin: str  # 'flag --x', 'yaml FILE line N', or '' where nothing says


def changed_settings(text: str) -> tuple[list[Setting], str]:
    """(the fields whose value differs from the default, why there are none). Reads what to_yaml wrote, in this or an older version."""
    if not text:
        return [], "the run recorded no configuration"
    try:
        config = from_yaml(text)
    except ConfigError as error:
        return [], f"its configuration cannot be read by this version: {error}"
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
    return found, "" if found else "everything is at its default"


def _origins(text: str) -> dict[str, str]:
    section, found = "", {}
    for line in text.splitlines():
        if match := _SECTION.match(line):
            section = match[1]
        elif match := _LINE.match(line):
            found[f"{section}.{match[1]}"] = match[2].split("; derived")[0]
    return found
