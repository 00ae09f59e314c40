"""`Manifest`: what a checkpoint holds and where, as dataclasses and as JSON under a checksum of its own. Imports no torch."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megapipe.dtypes import TENSOR_DTYPES
from megapipe.errors import CheckpointError
from megapipe.sharding.boxes import Box

FORMAT = "megapipe checkpoint"
VERSION = 1
MANIFEST_NAME = "manifest.json"
ITEM_BYTES = {dtype.safetensors_name: dtype.num_bytes for dtype in TENSOR_DTYPES.values()}


@dataclass(frozen=True)
class SavedBox:
    """One rectangle of a tensor: its elements lie row-major in `file` from byte `start` on.

    crc32: of each block of Manifest.block_bytes of these bytes, the last one shorter.
    """

    file: str
    box: Box
    start: int
    crc32: tuple[int, ...]


@dataclass(frozen=True)
class SavedTensor:
    """A global tensor `key/parameter`; its boxes cover each element once. dtype: a key of ITEM_BYTES."""

    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[SavedBox, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class SavedFile:
    """A file beside the manifest. crc32: of a safetensors file's header (its tensors have their own), of all of any other file."""

    num_bytes: int
    crc32: int


@dataclass(frozen=True)
class Manifest:
    """state: what the run saved besides tensors, plain JSON values. files, tensors: by name. world_size: ranks that wrote it."""

    step: int
    world_size: int
    block_bytes: int
    state: dict[str, Any]
    files: Mapping[str, SavedFile]
    tensors: Mapping[str, SavedTensor]

    @property
    def num_bytes(self) -> int:
        """Bytes of all files but the manifest itself."""
        return sum(file.num_bytes for file in self.files.values())

    def holds(self, key: str) -> bool:
        """True if tensors of this key ('master', 'exp_avg', ...) are there."""
        return any(name.startswith(f"{key}/") for name in self.tensors)

    def to_json(self) -> str:
        content = {
            "step": self.step,
            "world_size": self.world_size,
            "block_bytes": self.block_bytes,
            "state": self.state,
            "files": {name: {"bytes": file.num_bytes, "crc32": file.crc32} for name, file in self.files.items()},
            "tensors": {name: _tensor_json(tensor) for name, tensor in self.tensors.items()},
        }
        text = _canonical(content)
        return f'{{"format": "{FORMAT}", "version": {VERSION}, "crc32": {zlib.crc32(text.encode())},\n"content": {text}}}\n'

    @classmethod
    def from_json(cls, text: str, where: str) -> Manifest:
        """Raises CheckpointError, naming `where`, for what is no manifest, of another version, or damaged."""
        try:
            whole = json.loads(text)
            if whole["format"] != FORMAT:
                raise CheckpointError(f"{where} is not the manifest of a megapipe checkpoint")
            if whole["version"] != VERSION:
                raise CheckpointError(
                    f"{where} has format version {whole['version']}; this megapipe reads version {VERSION}"
                )
            content = whole["content"]
            found = zlib.crc32(_canonical(content).encode())
            if found != whole["crc32"]:
                raise CheckpointError(
                    f"{where} is damaged: its checksum is {found:08x}, it was written with {whole['crc32']:08x}"
                )
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{where} is damaged: {type(error).__name__}: {error}") from None
        return cls(
            content["step"],
            content["world_size"],
            content["block_bytes"],
            content["state"],
            {name: SavedFile(file["bytes"], file["crc32"]) for name, file in content["files"].items()},
            {name: _tensor_of(tensor) for name, tensor in content["tensors"].items()},
        )


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint folder. Raises CheckpointError if it is missing, unreadable or damaged."""
    path = folder / MANIFEST_NAME
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise CheckpointError(f"{folder} is no complete checkpoint: it has no {MANIFEST_NAME}") from None
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from None
    return Manifest.from_json(text, str(path))


def _canonical(content: Any) -> str:
    """One text for one content, so that a checksum survives parsing."""
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=True)


def _tensor_json(tensor: SavedTensor) -> dict[str, Any]:
    boxes = [
        {
            "file": saved.file,
            "offset": list(saved.box.offset),
            "shape": list(saved.box.shape),
            "start": saved.start,
            "crc32": list(saved.crc32),
        }
        for saved in tensor.boxes
    ]
    return {"dtype": tensor.dtype, "shape": list(tensor.shape), "boxes": boxes}


def _tensor_of(content: dict[str, Any]) -> SavedTensor:
    boxes = (
        SavedBox(
            saved["file"], Box(tuple(saved["offset"]), tuple(saved["shape"])), saved["start"], tuple(saved["crc32"])
        )
        for saved in content["boxes"]
    )
    return SavedTensor(content["dtype"], tuple(content["shape"]), tuple(boxes))
