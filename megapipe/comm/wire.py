"""What objects look like on the way between ranks: JSON that names what is no JSON. Nothing is unpickled, nothing that arrives is run.

A received name makes an object only if it is, in a module of megapipe that is loaded here, a frozen dataclass, a NamedTuple, an enum or a
MegapipeError; constructors check what they are given. So who can write to the network can at worst make a wrong record or an error.
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
TAG = "~"  # the only key of a JSON object; its value is [kind, ...]


def pack(value: Any) -> bytes:
    """Of None, numbers, texts, bytes, paths, lists, tuples, mappings, and megapipe's frozen dataclasses, NamedTuples, enums and errors.

    Raises TypeError, naming the type, for anything else.
    """
    return json.dumps(_packed(value), ensure_ascii=False, separators=(",", ":")).encode()


def unpack(data: bytes) -> Any:
    """The equal of what was packed. Raises CommunicationError for bytes that are not of `pack`."""
    try:
        return _unpacked(json.loads(data))
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError, MegapipeError) as error:
        raise CommunicationError(f"a message between ranks holds what no rank sends: {error}") from None


def _packed(value: Any) -> Any:
    kind = type(value)
    if kind in PLAIN:
        return value
    if kind is list:
        return [_packed(item) for item in value]
    if isinstance(value, enum.Enum):
        return _tagged("enum", kind.__module__, kind.__qualname__, value.name)
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        return _tagged("named", kind.__module__, kind.__qualname__, [_packed(item) for item in value])
    if dataclasses.is_dataclass(kind) and _is_ours(kind):
        fields = {field.name: _packed(getattr(value, field.name)) for field in dataclasses.fields(kind) if field.init}
        return _tagged("frozen", kind.__module__, kind.__qualname__, fields)
    if isinstance(value, MegapipeError):
        return _tagged("error", kind.__module__, kind.__qualname__, str(value))
    for name, (types, packed, _) in _BUILT_IN.items():
        if isinstance(value, types):
            return _tagged(name, packed(value))
    raise TypeError(
        f"a {kind.__module__}.{kind.__qualname__} does not travel between ranks: send numbers, texts or a frozen dataclass"
    )


def _unpacked(value: Any) -> Any:
    if isinstance(value, list):
        return [_unpacked(item) for item in value]
    if not isinstance(value, dict):
        return value
    kind, *content = value[TAG]
    if kind in _BUILT_IN:
        return _BUILT_IN[kind][2](content[0])
    module, name, held = content
    return _MADE[kind](_known(module, name), held)


def _tagged(*content: Any) -> dict[str, Any]:
    return {TAG: list(content)}


def _known(module: str, name: str) -> Any:
    """The class of this name. Raises TypeError for one that may not arrive."""
    found = getattr(sys.modules.get(module), name, None)
    if not isinstance(found, type) or not _is_ours(found) or (found.__module__, found.__qualname__) != (module, name):
        raise TypeError(f"{module}.{name}, which may not be sent")
    return found


def _is_ours(kind: type) -> bool:
    """Holds data alone, and stands in megapipe."""
    is_frozen = dataclasses.is_dataclass(kind) and kind.__dataclass_params__.frozen  # type: ignore[attr-defined]
    is_named = issubclass(kind, tuple) and hasattr(kind, "_fields")
    is_ours = kind.__module__.partition(".")[0] == "megapipe"
    return is_ours and (is_frozen or is_named or issubclass(kind, enum.Enum | MegapipeError))


# name -> (types, to JSON, from JSON)
_BUILT_IN: dict[str, tuple[Any, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "tuple": (tuple, lambda v: [_packed(item) for item in v], lambda v: tuple(map(_unpacked, v))),
    "map": (
        Mapping,
        lambda v: [[_packed(key), _packed(item)] for key, item in v.items()],
        lambda v: {_unpacked(key): _unpacked(item) for key, item in v},
    ),
    "bytes": (bytes, lambda v: base64.b64encode(v).decode(), lambda v: base64.b64decode(v, validate=True)),
    "path": (Path, str, Path),
    "float": (float, float, float),  # numpy's float64 is one, too
}
_MADE: dict[str, Callable[[Any, Any], Any]] = {
    "frozen": lambda kind, held: kind(**{name: _unpacked(item) for name, item in held.items()}),
    "named": lambda kind, held: kind(*map(_unpacked, held)),
    "enum": lambda kind, held: kind[held],
    "error": lambda kind, held: kind(held),
}
