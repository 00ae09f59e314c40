"""`Manifest`: the tensors and files of a checkpoint, stored as JSON with a checksum. Imports no torch."""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from megapipe.checkpoint.disk import read_regular, reason
from megapipe.dtypes import TENSOR_DTYPES
from megapipe.errors import CheckpointError, NewerVersionError
from megapipe.sharding.boxes import Box

FORMAT = "megapipe checkpoint"
VERSION = 1
MANIFEST_NAME = "manifest.json"
ITEM_BYTES = {dtype.safetensors_name: dtype.num_bytes for dtype in TENSOR_DTYPES.values()}


@dataclass(frozen=True)
class SavedBox:
    """A rectangle of a tensor, stored row-major in `file` from byte `start` on."""

    file: str
    box: Box
    start: int
    crc32: tuple[int, ...]  # of each block of Manifest.block_bytes bytes; the last block may be shorter


@dataclass(frozen=True)
class SavedTensor:
    """A global tensor whose boxes cover each element once. dtype: a key of ITEM_BYTES."""

    dtype: str
    shape: tuple[int, ...]
    boxes: tuple[SavedBox, ...]

    def to_json(self) -> dict[str, Any]:
        boxes = [
            {"file": b.file, "offset": b.box.offset, "shape": b.box.shape, "start": b.start, "crc32": b.crc32}
            for b in self.boxes
        ]
        return {"dtype": self.dtype, "shape": self.shape, "boxes": boxes}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> SavedTensor:
        """Raises KeyError, TypeError or ValueError where the content is not of the right kinds."""
        boxes = (
            SavedBox(
                box["file"],
                Box(_counts(box["offset"]), _counts(box["shape"], 1)),
                _count(box["start"]),
                _counts(box["crc32"]),
            )
            for box in content["boxes"]
        )
        if not all(isinstance(word, str) for word in (content["dtype"], *(box["file"] for box in content["boxes"]))):
            raise TypeError("a dtype or file is no text")
        return cls(content["dtype"], _counts(content["shape"], 1), tuple(boxes))


@dataclass(frozen=True)
class SavedFile:
    """A listed file. crc32: of the header of a safetensors file, of the whole content of any other file."""

    num_bytes: int
    crc32: int


@dataclass(frozen=True)
class Manifest:
    """The content of one checkpoint."""

    step: int
    world_size: int  # ranks that wrote it
    block_bytes: int
    state: dict[str, Any]  # run state other than tensors, plain JSON values
    files: Mapping[str, SavedFile]
    tensors: Mapping[str, SavedTensor]  # by `key/parameter`

    @property
    def num_bytes(self) -> int:
        """Size of all files except the manifest itself."""
        return sum(file.num_bytes for file in self.files.values())

    def holds(self, key: str) -> bool:
        """Return True if there are tensors of this key ('master', 'exp_avg', ...)."""
        return any(name.startswith(f"{key}/") for name in self.tensors)

    def to_json(self) -> str:
        content = {
            "step": self.step,
            "world_size": self.world_size,
            "block_bytes": self.block_bytes,
            "state": self.state,
            "files": {name: {"bytes": file.num_bytes, "crc32": file.crc32} for name, file in self.files.items()},
            "tensors": {name: tensor.to_json() for name, tensor in self.tensors.items()},
        }
        text = _canonical(content)
        crc32 = zlib.crc32(text.encode())
        return f'{{"format": "{FORMAT}", "version": {VERSION}, "crc32": {crc32},\n"content": {text}}}\n'

    @classmethod
    def from_json(cls, text: str, where: str) -> Manifest:
        """Parse a manifest. Raises CheckpointError naming `where` for another format or version, or damage."""
        try:
            whole = json.loads(text)
            if whole["format"] != FORMAT:
                raise CheckpointError(f"{where} is not the manifest of a megapipe checkpoint")
            version = _count(whole["version"])
            if version != VERSION:
                kind = NewerVersionError if version > VERSION else CheckpointError
                raise kind(f"{where} has format version {version}; this megapipe reads version {VERSION}")
            content = whole["content"]
            found = zlib.crc32(_canonical(content).encode())
            if found != whole["crc32"]:
                raise CheckpointError(f"{where} is damaged: its checksum is {found:08x}, expected {whole['crc32']:08x}")
            files = {
                name: SavedFile(_count(file["bytes"]), _count(file["crc32"])) for name, file in content["files"].items()
            }
            tensors = {name: SavedTensor.from_json(tensor) for name, tensor in content["tensors"].items()}
            counts = (_count(content["step"]), _count(content["world_size"], 1), _count(content["block_bytes"], 1))
            if not isinstance(content["state"], dict):
                raise TypeError("its state is no object")
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{where} is damaged: {type(error).__name__}: {error}") from None
        manifest = cls(*counts, content["state"], files, tensors)
        try:
            manifest.check()
        except CheckpointError as error:
            raise CheckpointError(f"{where} is damaged: {error}") from None
        return manifest

    def check(self) -> None:
        """Raise CheckpointError unless files are inside the folder and hold every element of each tensor once."""
        for name in self.files:
            if not is_inside(name):
                raise CheckpointError(f"it lists the file {name!r}, which is not inside the folder")
        for name, tensor in self.tensors.items():
            item = ITEM_BYTES.get(tensor.dtype)
            if item is None or len(tensor.shape) not in (1, 2):
                raise CheckpointError(f"{name} has dtype {tensor.dtype!r} and {len(tensor.shape)} dimensions")
            for saved in tensor.boxes:
                if {len(saved.box.offset), len(saved.box.shape)} != {len(tensor.shape)}:
                    raise CheckpointError(f"{name}: a box has other dimensions than shape {list(tensor.shape)}")
                num_bytes, file = saved.box.num_elements * item, self.files.get(saved.file)
                if file is None or saved.start + num_bytes > file.num_bytes:
                    raise CheckpointError(
                        f"{name}: {num_bytes} bytes from byte {saved.start} on are not in {saved.file!r}"
                    )
                if len(saved.crc32) != -(-num_bytes // self.block_bytes):
                    raise CheckpointError(f"{name}: {len(saved.crc32)} checksums for {num_bytes} bytes")
            check_covered(name, tensor.shape, [saved.box for saved in tensor.boxes])


def is_inside(name: str) -> bool:
    """Return True if a file name in a manifest or an index names a file inside its folder."""
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts and "\0" not in name


def _count(value: Any, at_least: int = 0) -> int:
    if type(value) is not int or not at_least <= value < 1 << 63:
        raise ValueError(f"{value!r:.40} is not a whole number of at least {at_least}")
    return value


def _counts(values: Any, at_least: int = 0) -> tuple[int, ...]:
    if not isinstance(values, list):
        raise TypeError(f"{values!r:.40} is not a list")
    return tuple(_count(value, at_least) for value in values)


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a checkpoint folder. Raises CheckpointError if it is missing, unreadable or damaged."""
    path = folder / MANIFEST_NAME
    try:
        text = read_regular(path).decode()
    except FileNotFoundError:
        raise CheckpointError(f"{folder} is not a complete checkpoint: it has no {MANIFEST_NAME}") from None
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {reason(error)}") from None
    return Manifest.from_json(text, str(path))


def _canonical(content: Any) -> str:
    """Serialize in one fixed way, so that parsing and serializing again gives the same checksum."""
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=True)


def check_covered(name: str, shape: tuple[int, ...], boxes: Sequence[Box]) -> None:
    """Raise CheckpointError unless the boxes cover each element of the tensor exactly once.

    Sweeps along dim 0: each box is compared only with the boxes that reach its first row.
    """

    def text(box: Box) -> str:
        return f"the box at {list(box.offset)} of shape {list(box.shape)}"

    whole = Box((0,) * len(shape), shape)
    still_open: list[Box] = []
    for box in sorted(boxes, key=lambda box: box.offset):
        if box.intersect(whole) != box:
            raise CheckpointError(f"{name}: {text(box)} is not within shape {list(shape)}")
        still_open = [other for other in still_open if other.offset[0] + other.shape[0] > box.offset[0]]
        for other in still_open:
            if other.intersect(box) is not None:
                raise CheckpointError(f"{name}: {text(other)} and {text(box)} overlap: two ranks own the same elements")
        still_open.append(box)
    covered, size = sum(box.num_elements for box in boxes), math.prod(shape)
    if covered != size:
        raise CheckpointError(f"{name}: only {covered} of its {size} elements are owned by some rank")
