"""A folder of torch.distributed.checkpoint (`.metadata` and `*.distcp` files), read without its library and without running its pickle.

`.metadata` is pickled: only shapes, dtypes and places are taken from it, all else becomes inert stand-ins. Tensors and values lie in the
files as torch.save wrote them, and are read with weights_only.
"""

from __future__ import annotations

import collections
import io
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megapipe.errors import CheckpointError
from megapipe.extras.convert.pickled import StandIn, first_line
from megapipe.sharding.boxes import Box

METADATA = ".metadata"
HARMLESS: dict[tuple[str, str], Any] = {
    ("torch", "Size"): tuple,
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
    ("collections", "OrderedDict"): collections.OrderedDict,
}


@dataclass(frozen=True)
class StoredBox:
    """One rectangle of a tensor and where its bytes lie."""

    box: Box
    file: str
    start: int
    num_bytes: int


@dataclass(frozen=True)
class StoredTensor:
    """A global tensor of the folder."""

    folder: Path
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: tuple[StoredBox, ...]

    def read(self, wanted: Box) -> Tensor:
        """A rectangle of it. Raises CheckpointError if the stored boxes do not cover it exactly or cannot be read."""
        values = torch.empty(wanted.shape, dtype=self.dtype)
        copied = 0
        for stored in self.boxes:
            common = wanted.intersect(stored.box)
            if common is not None:
                values[_inside(common, wanted)] = self._load(stored)[_inside(common, stored.box)]
                copied += common.num_elements
        if copied != wanted.num_elements:
            raise CheckpointError(
                f"{self.folder}: {self.name} has {copied} of the {wanted.num_elements} elements at {list(wanted.offset)}"
            )
        return values

    def _load(self, stored: StoredBox) -> Tensor:
        path = self.folder / stored.file
        content = _load(path, self.name, stored.start, stored.num_bytes)
        if not isinstance(content, Tensor) or content.numel() != stored.box.num_elements:
            raise CheckpointError(f"{path}: {self.name} holds something else than {list(stored.box.shape)} elements")
        return content.reshape(stored.box.shape)


@dataclass(frozen=True)
class StoredValue:
    """What is no tensor: pickled bytes."""

    path: Path
    name: str
    start: int
    num_bytes: int

    def read(self) -> Any:
        """Numbers, strings, and lists, tuples and dictionaries of them. Raises CheckpointError for all else, of which nothing is run."""
        return _load(self.path, self.name, self.start, self.num_bytes)


def read_folder(folder: Path) -> tuple[dict[str, StoredTensor], dict[str, StoredValue]]:
    """(tensors, what is no tensor) by name. Raises CheckpointError."""
    metadata = _unpickle(folder / METADATA)
    try:
        entries, places = _state(metadata)["state_dict_metadata"], _state(metadata)["storage_data"]
        stored = {_place_key(index): _state(info) for index, info in places.items()}
        tensors, others = {}, {}
        for name, entry in entries.items():
            if type(entry).__name__ == "TensorStorageMetadata":
                tensors[name] = _tensor(folder, name, _state(entry), stored)
            else:  # bytes, whose metadata has no fields
                place = stored[name, None]
                others[name] = StoredValue(folder / place["relative_path"], name, place["offset"], place["length"])
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise CheckpointError(
            f"{folder / METADATA} is not the metadata of a distributed checkpoint: {type(error).__name__} {error}"
        ) from None
    return tensors, others


def _load(path: Path, name: str, start: int, num_bytes: int) -> Any:
    try:
        with open(path, "rb") as file:
            file.seek(start)
            return torch.load(io.BytesIO(file.read(num_bytes)), map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{path}: {name} cannot be read: {first_line(error)}") from None


def _tensor(
    folder: Path, name: str, fields: Mapping[str, Any], stored: Mapping[Any, Mapping[str, Any]]
) -> StoredTensor:
    boxes = []
    for chunk in fields["chunks"]:
        box = Box(tuple(_state(chunk)["offsets"]), tuple(_state(chunk)["sizes"]))
        place = stored[name, box.offset]
        boxes.append(StoredBox(box, place["relative_path"], place["offset"], place["length"]))
    return StoredTensor(folder, name, tuple(fields["size"]), _dtype(fields["properties"]), tuple(boxes))


def _dtype(properties: Any) -> torch.dtype:
    """TensorProperties pickles as a tuple whose first member is the dtype; older ones as their fields."""
    state = properties.state
    found = state[0] if isinstance(state, tuple) else state["dtype"]
    if not isinstance(found, torch.dtype):
        raise TypeError("a tensor without a dtype")
    return found


def _place_key(index: Any) -> tuple[str, Any]:
    fields = _state(index)
    offset = fields.get("offset")
    return fields["fqn"], None if offset is None else tuple(offset)


def _state(standin: Any) -> Mapping[str, Any]:
    """The fields of a dataclass that was pickled."""
    state = standin.state
    if isinstance(state, tuple):  # (__dict__, __slots__)
        state = (state[0] or {}) | (state[1] or {})
    if not isinstance(state, Mapping):
        raise TypeError(f"{type(standin).__name__} without fields")
    return state


class _Inert(pickle.Unpickler):
    """Finds a few harmless classes and dtypes; in place of everything else stands a class that does nothing."""

    def find_class(self, module: str, name: str) -> Any:
        found = HARMLESS.get((module, name))
        if found is None and module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            found = getattr(torch, name)
        return type(name, (StandIn,), {}) if found is None else found


def _unpickle(path: Path) -> Any:
    try:
        with open(path, "rb") as file:
            return _Inert(file).load()
    except FileNotFoundError:
        raise CheckpointError(f"{path}: there is no such file") from None
    except (OSError, EOFError, pickle.UnpicklingError, AttributeError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None


def _inside(common: Box, outer: Box) -> tuple[slice, ...]:
    return tuple(slice(c - o, c - o + n) for c, o, n in zip(common.offset, outer.offset, common.shape, strict=True))
