"""Serialization of objects sent between ranks: JSON with tags for types that JSON lacks. Nothing is unpickled or run.

A class name is accepted only for a frozen dataclass, NamedTuple, enum or MegapipeError of a loaded megapipe module, and
constructors check their arguments: someone who can write to the network can at worst cause a wrong record or an error.
"""

from __future__ import annotations

import base64
import dataclasses
import enum
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megapipe.errors import CommunicationError, MegapipeError

PLAIN = (str, int, float, bool, type(None))
TAG = "~"  # the only key of any JSON object here; its value is [kind, ...]


def pack(value: Any) -> bytes:
    """Serialize None, numbers, strings, bytes, paths, lists, tuples, mappings, and the classes of megapipe named above.

    Raises TypeError, which names the type, for anything else.
    """
    return json.dumps(_encode(value), ensure_ascii=False, separators=(",", ":")).encode()


def unpack(data: bytes) -> Any:
    """Return a value equal to the one packed. Raises CommunicationError for bytes that `pack` does not produce."""
    try:
        return _decode(json.loads(data))
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError, MegapipeError) as error:
        raise CommunicationError(f"invalid message between ranks: {error}") from None


def _encode(value: Any) -> Any:
    kind = type(value)
    if kind in PLAIN:
        return value
    if kind is list:
        return [_encode(item) for item in value]
    name = (kind.__module__, kind.__qualname__)
    if isinstance(value, enum.Enum):
        return {TAG: ["enum", *name, value.name]}
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        return {TAG: ["named", *name, [_encode(item) for item in value]]}
    if dataclasses.is_dataclass(kind) and _may_travel(kind):
        fields = {field.name: _encode(getattr(value, field.name)) for field in dataclasses.fields(kind) if field.init}
        return {TAG: ["frozen", *name, fields]}
    if isinstance(value, MegapipeError):
        return {TAG: ["error", *name, str(value)]}
    for tag, (types, encode, _) in _BUILT_IN.items():
        if isinstance(value, types):
            return {TAG: [tag, encode(value)]}
    raise TypeError(
        f"cannot send {'.'.join(name)} between ranks: send numbers, strings or a frozen dataclass of megapipe"
    )


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    tag, *content = value[TAG]
    if tag in _BUILT_IN:
        return _BUILT_IN[tag][2](content[0])
    module, name, fields = content
    found = getattr(sys.modules.get(module), name, None)
    defined_as = (getattr(found, "__module__", None), getattr(found, "__qualname__", None))
    if not isinstance(found, type) or not _may_travel(found) or defined_as != (module, name):
        raise TypeError(f"{module}.{name} cannot be sent between ranks: it is not a data class of megapipe")
    return _MEGAPIPE[tag](found, fields)


def _may_travel(kind: type) -> bool:
    """Return True for classes of megapipe that only hold data."""
    is_frozen = dataclasses.is_dataclass(kind) and kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
    is_named_tuple = issubclass(kind, tuple) and hasattr(kind, "_fields")
    is_ours = kind.__module__.partition(".")[0] == "megapipe"
    return is_ours and (is_frozen or is_named_tuple or issubclass(kind, enum.Enum | MegapipeError))


# tag -> (types, to JSON, from JSON)
_BUILT_IN: dict[str, tuple[Any, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "tuple": (tuple, lambda v: [_encode(item) for item in v], lambda v: tuple(map(_decode, v))),
    "map": (
        Mapping,
        lambda v: [[_encode(key), _encode(item)] for key, item in v.items()],
        lambda v: {_decode(key): _decode(item) for key, item in v},
    ),
    "bytes": (bytes, lambda v: base64.b64encode(v).decode(), lambda v: base64.b64decode(v, validate=True)),
    "path": (Path, str, Path),
    "float": (float, float, float),  # numpy.float64 is a subclass of float
}
# tag -> (class, fields from JSON) to an object
_MEGAPIPE: dict[str, Callable[[Any, Any], Any]] = {
    "frozen": lambda kind, fields: kind(**{name: _decode(item) for name, item in fields.items()}),
    "named": lambda kind, fields: kind(*map(_decode, fields)),
    "enum": lambda kind, name: kind[name],
    "error": lambda kind, text: kind(text),
}
