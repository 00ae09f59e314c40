"""Reading and writing configurations as YAML: in sections or flat, with Megatron's names spelled with - or _.

YAML is parsed only into nodes with line numbers for errors; each scalar is read by its field's type (see fields.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from megapipe.config.config import Config, all_fields, section_types, value_of
from megapipe.config.fields import nearest, value_text
from megapipe.config.options import ConfigField
from megapipe.config.problems import Problems
from megapipe.errors import ConfigError
from megapipe.input_files import MOST_BYTES, regular

MOST_CHARACTERS = 1 << 18  # of a file
DEEPEST = 100  # brackets within brackets
TAGS = {*yaml.SafeLoader.yaml_constructors, "tag:yaml.org,2002:merge", "tag:yaml.org,2002:value"}
BRACKET = re.compile(r"[\[\]{}]")
SUPPLIED = Path(__file__).resolve().parents[1] / "configs"  # that come with megapipe


@dataclass(frozen=True)
class Entry:
    """One `key: value` of a file."""

    section: str | None  # None: flat, at the top level
    key: str
    raw: str | tuple[str, ...] | None  # None: nothing follows the colon
    quoted: bool
    where: str  # "FILE line 3"


def read_file(path: str) -> str:
    """Read the text of a configuration file, or of a supplied one by its name: llama3_8b is configs/llama3_8b.yaml.

    A file of that name wins. Raises ConfigError if there is neither, or the file is not UTF-8.
    """
    supplied = {file.stem: file for file in SUPPLIED.glob("*.yaml")}
    try:
        file = supplied.get(path, Path(path)) if not Path(path).exists() else Path(path)
        return regular(file, MOST_BYTES).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"--config {path}: not a text file in UTF-8 (byte {error.start})") from None
    except OSError as error:
        is_name = isinstance(error, FileNotFoundError) and "/" not in path and "." not in path
        listed = "; megapipe configs lists the supplied ones"
        way = (nearest(path, list(supplied)) or listed) if is_name else ""
        raise ConfigError(f"--config {path}: cannot be read: {error.strerror}{way}") from None
    except ValueError:
        raise ConfigError("--config: the path contains a NUL character") from None


def read_object(path: Path, flag: str, expected: str) -> dict[Any, Any]:
    """Read a YAML file that holds an object. flag, expected: for errors. Raises ConfigError."""
    try:
        text = regular(path, MOST_BYTES).read_text(encoding="utf-8")
        found = yaml.safe_load(text) if nesting(text) <= DEEPEST else None
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        why = getattr(error, "strerror", None) or str(error).splitlines()[0]
        raise ConfigError(f"{flag} {path} cannot be read: {why}; expected {expected}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{flag} {path}: expected {expected}")
    return found


def read_entries(text: str, name: str, problems: Problems) -> list[Entry]:
    """Return all entries of a YAML text, in order. name: of the file, for errors. problems: receives them."""
    if len(text) > MOST_CHARACTERS:
        raise ConfigError(f"{name}: {len(text):,} characters; a configuration has at most {MOST_CHARACTERS:,}")
    if nesting(text) > DEEPEST:  # the parser takes a time that grows with its square
        raise ConfigError(f"{name}: not readable as YAML: brackets are nested too deeply, or not closed")
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except RecursionError:
        raise ConfigError(f"{name}: not readable as YAML: nested too deeply") from None
    except yaml.MarkedYAMLError as error:
        line = f" line {error.problem_mark.line + 1}" if error.problem_mark is not None else ""
        raise ConfigError(f"{name}{line}: not readable as YAML: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}: not readable as YAML: {' '.join(str(error).split())}") from None
    if root is None:
        return []
    sections = ", ".join(section_types())
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{name}: expected lines of `key: value`, in sections {sections} or without")
    entries: list[Entry] = []
    for key, value, where in pairs(root, name, problems):
        if isinstance(value, yaml.MappingNode):
            if key not in section_types():
                problems.add(f"{where}: unknown section {key}; sections are {sections}")
                continue
            for inner, node, place in pairs(value, name, problems):
                with problems.caught(f"{key}.{inner}"):
                    entries.append(read_entry(key, inner, node, place))
        elif key in section_types() and isinstance(value, yaml.ScalarNode) and value.value == "" and key != "optimizer":
            continue  # an empty section
        else:
            with problems.caught():
                entries.append(read_entry(None, key, value, where))
    return entries


def nesting(text: str) -> int:
    """Return the deepest nesting of brackets, those in comments and quotes included."""
    deepest = depth = 0
    for bracket in BRACKET.finditer(text):
        depth = depth + 1 if bracket[0] in "[{" else max(0, depth - 1)
        deepest = max(deepest, depth)
    return deepest


def pairs(mapping: yaml.MappingNode, name: str, problems: Problems) -> Iterator[tuple[str, yaml.Node, str]]:
    """Yield (key, value node, "FILE line N") of a mapping. problems: receives keys that occur twice."""
    seen: dict[str, int] = {}
    for key_node, value in mapping.value:
        line = key_node.start_mark.line + 1
        where = f"{name} line {line}"
        if not isinstance(key_node, yaml.ScalarNode):
            problems.add(f"{where}: a key must be a name")
            continue
        parts = (key_node, value, *(value.value if isinstance(value, yaml.SequenceNode) else ()))
        unknown = [node.tag for node in parts if node.tag not in TAGS]
        if unknown:
            problems.add(f"{where}: the tag {unknown[0]} is not supported; write the value itself")
            continue
        key = str(key_node.value).strip().replace("-", "_")
        if key in seen:
            problems.add(f"{where}: {key} was already given on line {seen[key]}")
            continue
        seen[key] = line
        yield key, value, where


def read_entry(section: str | None, key: str, node: yaml.Node, where: str) -> Entry:
    """Return the Entry of a scalar or of a list."""
    if isinstance(node, yaml.ScalarNode):
        quoted = node.style in ("'", '"', "|", ">")
        return Entry(section, key, str(node.value) if quoted or node.value else None, quoted, where)
    if isinstance(node, yaml.SequenceNode):
        items = [item_text(item, where.rpartition(" line ")[0]) for item in node.value]
        if None not in items:
            return Entry(section, key, tuple(item for item in items if item is not None), True, where)
    raise ConfigError(f"{where}: {key} holds a mapping or nested list; expected a value or a flat list")


def item_text(node: yaml.Node, name: str) -> str | None:
    """Return an item of a list as text, None if it has none: a scalar, or a mapping of scalars, which is a run of
    layers, 'count=N NAME=VALUE ...'; the count is 1 if it is not given.
    """
    if isinstance(node, yaml.ScalarNode):
        return str(node.value)
    twice = Problems()
    found = list(pairs(node, name, twice)) if isinstance(node, yaml.MappingNode) else []
    twice.raise_all()
    if not found or not all(isinstance(value, yaml.ScalarNode) for _, value, _ in found):
        return None
    settings = {key: "".join(value.value.split()) for key, value, _ in found}
    return " ".join(f"{name}={value}" for name, value in ({"count": "1"} | settings).items())


def to_yaml(config: Config, origins: Mapping[str, str] | None = None, resolved: Config | None = None) -> str:
    """Return the whole configuration as YAML in sections, from which it can be loaded again.

    origins: the origin of each value, written as a comment. resolved: adds derived values to the comments only: as a
    value, the --train-samples derived from --train-iters would give the length twice.
    """
    lines: list[str] = []
    for field in all_fields():
        if f"{field.section}:" not in lines:
            lines += ([""] if lines else []) + [f"{field.section}:"]
        line = f"  {field.name}: {value_text(written_value(config, field))}"
        value = value_of(config, field)
        remarks = [] if origins is None else [origins.get(field.key, "default").replace("\n", " ")]
        derived = value if resolved is None else written_value(resolved, field)
        if derived != value and field.kind.scalar is not bool:
            remarks.append(f"derived: {value_text(derived)}")
        elif origins is not None and value is None and field.option.derived:
            remarks.append(f"derived: {field.option.derived}")
        lines.append(f"{line:<56} # {'; '.join(remarks)}" if remarks else line)
    return "\n".join(lines) + "\n"


def written_value(config: Config, field: ConfigField) -> Any:
    """Return a field's value; None where a resolved configuration has 0 for a length that was not given."""
    value = value_of(config, field)
    return None if value == 0 and field.kind.optional and field.option.at_least == 1 else value
