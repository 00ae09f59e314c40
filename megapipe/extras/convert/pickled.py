"""Pickled files of other programs, read without executing anything in them.

torch's weights-only reader calls only functions on its allow list. Unknown classes become inert placeholders, which
keep their arguments and do nothing; an argparse.Namespace is read as such. So no flag to read files unsafely is needed.

A folder of torch.distributed.checkpoint holds `*.distcp` files with tensors and values as torch.save wrote them, and a
pickled `.metadata`, of which only shapes, dtypes and places are used. It is read without torch's own library for it.
"""

from __future__ import annotations

import argparse
import collections
import io
import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megapipe.checkpoint.shard import slices_within
from megapipe.errors import CheckpointError
from megapipe.sharding.boxes import Box

METADATA = ".metadata"
HARMLESS: dict[tuple[str, str], Any] = {
    ("torch", "Size"): tuple,
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
    ("collections", "OrderedDict"): collections.OrderedDict,
}


class StandIn:
    """An inert replacement for an object of an unknown class. arguments: those of its constructor."""

    arguments: tuple[Any, ...] = ()

    def __new__(cls, *arguments: Any, **named: Any) -> StandIn:
        made = object.__new__(cls)
        made.arguments = arguments
        return made

    def __init__(self, *arguments: Any, **named: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state

    def __hash__(self) -> int:
        return id(self)


def load_pickled(path: Path) -> dict[Any, Any]:
    """Return the dictionary that torch.save wrote, with tensors mapped from disk. Raises CheckpointError."""
    try:
        content = _load(path, mmap=True)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file") from None
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{path} cannot be read: {_first_line(error)}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds {type(content).__name__}, not the dictionary of a checkpoint")
    return content


def _load(file: Any, mmap: bool = False) -> Any:
    """Return what torch.save wrote, with an inert placeholder for each object of an unknown class."""
    unknown = set(torch.serialization.get_unsafe_globals_in_checkpoint(file)) - {"argparse.Namespace"}
    if not mmap:
        file.seek(0)
    allowed: list[Any] = [(type(name.rpartition(".")[2], (StandIn,), {}), name) for name in sorted(unknown)]
    allowed.append(argparse.Namespace)
    with torch.serialization.safe_globals(allowed):
        return torch.load(file, map_location="cpu", mmap=mmap, weights_only=True)


def _first_line(error: Exception) -> str:
    """Return the message of an exception of torch without the advice that follows it."""
    cause = error.__context__ if isinstance(error, pickle.UnpicklingError) and error.__context__ else error
    return next(iter(str(cause).splitlines()), type(cause).__name__)


@dataclass(frozen=True)
class StoredValue:
    """A pickled tensor or other value in a file."""

    path: Path
    name: str
    start: int
    num_bytes: int

    def read(self, with_stand_ins: bool = False) -> Any:
        """Read tensors, numbers, strings and containers of them. Raises CheckpointError for all else.

        with_stand_ins: return an inert placeholder for each object of an unknown class.
        """
        try:
            with open(self.path, "rb") as file:
                file.seek(self.start)
                content = io.BytesIO(file.read(self.num_bytes))
                return _load(content) if with_stand_ins else torch.load(content, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
            raise CheckpointError(f"{self.path}: {self.name} cannot be read: {_first_line(error)}") from None


@dataclass(frozen=True)
class StoredTensor:
    """A global tensor of a folder of torch.distributed.checkpoint, stored as rectangles."""

    folder: Path
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: tuple[tuple[Box, StoredValue], ...]

    def read(self, wanted: Box | None = None) -> Tensor:
        """Read a rectangle, by default all. Raises CheckpointError if the stored boxes do not cover it exactly once."""
        wanted = Box((0,) * len(self.shape), self.shape) if wanted is None else wanted
        values = torch.empty(wanted.shape, dtype=self.dtype)
        copied = 0
        for box, stored in self.boxes:
            common = wanted.intersect(box)
            if common is None:
                continue
            part = stored.read()
            if not isinstance(part, Tensor) or part.numel() != box.num_elements:
                raise CheckpointError(f"{stored.path}: {self.name} does not hold {list(box.shape)} elements")
            values[slices_within(common, wanted)] = part.reshape(box.shape)[slices_within(common, box)]
            copied += common.num_elements
        if copied != wanted.num_elements:
            found = f"{copied} of the {wanted.num_elements} elements at {list(wanted.offset)}"
            raise CheckpointError(f"{self.folder}: {self.name} has {found}")
        return values


class _InertUnpickler(pickle.Unpickler):
    """Unpickler that finds a few harmless classes and torch dtypes, and an inert placeholder for every other name."""

    def find_class(self, module: str, name: str) -> Any:
        found = HARMLESS.get((module, name))
        if found is None and module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            found = getattr(torch, name)
        return type(name, (StandIn,), {}) if found is None else found


def read_folder(folder: Path) -> tuple[dict[str, StoredTensor], dict[str, StoredValue]]:
    """Return tensors and other values of a torch.distributed.checkpoint folder, unread. Raises CheckpointError."""
    path = folder / METADATA
    try:
        with open(path, "rb") as file:
            metadata = _InertUnpickler(file).load()
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file") from None
    except (OSError, EOFError, pickle.UnpicklingError, AttributeError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    try:
        entries, places = _fields(metadata)["state_dict_metadata"], _fields(metadata)["storage_data"]
        stored: dict[tuple[str, tuple[int, ...] | None], StoredValue] = {}
        for index, info in places.items():
            name, offset, place = _fields(index)["fqn"], _fields(index).get("offset"), _fields(info)
            value = StoredValue(folder / place["relative_path"], name, place["offset"], place["length"])
            stored[name, None if offset is None else tuple(offset)] = value
        tensors, others = {}, {}
        for name, entry in entries.items():
            if type(entry).__name__ == "TensorStorageMetadata":
                tensors[name] = _tensor(folder, name, _fields(entry), stored)
            else:  # bytes, whose metadata has no fields
                others[name] = stored[name, None]
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        reason = f"{type(error).__name__} {error}"
        raise CheckpointError(f"{path} is not the metadata of a distributed checkpoint: {reason}") from None
    return tensors, others


def _tensor(folder: Path, name: str, fields: Mapping[str, Any], stored: Mapping[Any, StoredValue]) -> StoredTensor:
    boxes = [Box(tuple(_fields(chunk)["offsets"]), tuple(_fields(chunk)["sizes"])) for chunk in fields["chunks"]]
    state = fields["properties"].state
    dtype = state[0] if isinstance(state, tuple) else state["dtype"]  # a tuple, in older versions a dict of fields
    if not isinstance(dtype, torch.dtype):
        raise TypeError("a tensor without a dtype")
    values = tuple((box, stored[name, box.offset]) for box in boxes)
    return StoredTensor(folder, name, tuple(fields["size"]), dtype, values)


def _fields(stand_in: Any) -> Mapping[str, Any]:
    """Return the fields of a pickled dataclass."""
    state = stand_in.state
    if isinstance(state, tuple):  # (__dict__, __slots__)
        state = (state[0] or {}) | (state[1] or {})
    if not isinstance(state, Mapping):
        raise TypeError(f"{type(stand_in).__name__} without fields")
    return state
