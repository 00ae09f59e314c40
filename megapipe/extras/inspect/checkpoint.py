"""The contents of a checkpoint: step, grid, position, files and tensors; its damage; its difference from another."""

from __future__ import annotations

import json
import math
import sys
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megapipe.checkpoint.folder import CheckpointFolder, find_checkpoint, open_folder
from megapipe.checkpoint.manifest import ITEM_BYTES, SavedTensor
from megapipe.errors import CheckpointError
from megapipe.sharding.boxes import Box

if TYPE_CHECKING:
    from torch import Tensor

    from megapipe.checkpoint.load import ShardReader

CHUNK_ELEMENTS = 1 << 21  # elements of a tensor that --diff reads at a time


def chosen(path: Path, step: int | None = None) -> CheckpointFolder:
    """Return the checkpoint of a step, by default the newest complete one, or the folder itself."""
    if step is None and (path / "manifest.json").exists():
        return open_folder(path)
    found = find_checkpoint(path, step)
    if found is None:
        raise CheckpointError(f"{path} holds no checkpoint")
    return found


def summary(folder: CheckpointFolder, with_tensors: bool) -> Iterator[str]:
    manifest = folder.manifest
    yield from folder.remarks
    size = f"{len(manifest.tensors)} tensors, {manifest.num_bytes:,} bytes"
    yield f"{folder.path}: step {manifest.step}, {size}, written by {manifest.world_size} ranks"
    for key, value in manifest.state.items():
        yield f"  {key}: {value}"
    for name, file in manifest.files.items():
        yield f"  {name}: {file.num_bytes:,} bytes"
    for name, tensor in manifest.tensors.items() if with_tensors else ():
        yield f"  {name}  {tensor.dtype} {list(tensor.shape)}  {bytes_of(tensor):,} bytes in {len(tensor.boxes)} boxes"


def bytes_of(tensor: SavedTensor) -> int:
    return math.prod(tensor.shape) * ITEM_BYTES[tensor.dtype]


def content(folder: CheckpointFolder, with_tensors: bool) -> dict[str, Any]:
    """Return the same for --json."""
    manifest = folder.manifest
    found: dict[str, Any] = {
        "path": str(folder.path),
        "remarks": list(folder.remarks),
        "step": manifest.step,
        "world_size": manifest.world_size,
        "bytes": manifest.num_bytes,
        "state": manifest.state,
        "files": {name: file.num_bytes for name, file in manifest.files.items()},
    }
    if with_tensors:
        found["tensors"] = {
            name: {
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "bytes": bytes_of(tensor),
                "boxes": len(tensor.boxes),
            }
            for name, tensor in manifest.tensors.items()
        }
    return found


def damage(folder: CheckpointFolder) -> Iterator[str]:
    """Compute all checksums again and yield a line for each damaged part of a file. Raises OSError."""
    manifest = folder.manifest
    header_bytes: dict[str, int] = {}  # of each safetensors file
    for name, tensor in manifest.tensors.items():
        for saved in tensor.boxes:
            path = folder.path / saved.file
            header_bytes[saved.file] = min(header_bytes.get(saved.file, saved.start), saved.start)
            size = saved.box.num_elements * ITEM_BYTES[tensor.dtype]
            with open(path, "rb") as file:
                file.seek(saved.start)
                for number, expected in enumerate(saved.crc32):
                    block = file.read(min(manifest.block_bytes, size - number * manifest.block_bytes))
                    if zlib.crc32(block) != expected:
                        start = saved.start + number * manifest.block_bytes
                        yield f"{path}: tensor {name} at {list(saved.box.offset)} is damaged from byte {start} on"
    for name, entry in manifest.files.items():
        with open(folder.path / name, "rb") as file:
            content = file.read(header_bytes.get(name, entry.num_bytes))
        if zlib.crc32(content) != entry.crc32:
            yield f"{folder.path / name}: {'the header' if name in header_bytes else 'the content'} is damaged"


@dataclass(frozen=True)
class TensorComparison:
    """A tensor in two checkpoints. Shape and dtype are None if it is missing; the numbers if the shapes differ.

    num_equal: elements with the same bits in the wider dtype. max_abs, max_rel: largest difference, absolute and
    relative to the larger magnitude; infinite if only one side is infinite, or one is NaN and the bits differ.
    """

    name: str
    shapes: tuple[tuple[int, ...] | None, tuple[int, ...] | None]
    dtypes: tuple[str | None, str | None]
    num_equal: int | None = None
    max_abs: float | None = None
    max_rel: float | None = None

    @property
    def num_elements(self) -> int:
        return math.prod(self.shapes[0] or self.shapes[1] or ())

    @property
    def is_equal(self) -> bool:
        """True if shape, dtype and bits are the same."""
        return self.dtypes[0] == self.dtypes[1] and self.num_equal == self.num_elements


def compare(first: CheckpointFolder, second: CheckpointFolder) -> Iterator[TensorComparison]:
    """Compare every tensor of either checkpoint, by name, whatever grids wrote them.

    Holds a few rows of one tensor at a time. Raises CheckpointError for damage, naming file and tensor.
    """
    from megapipe.checkpoint.load import ShardReader  # imports torch, which takes seconds

    with (
        ShardReader(first.path, first.manifest.block_bytes) as one,
        ShardReader(second.path, second.manifest.block_bytes) as other,
    ):
        for name in sorted(first.manifest.tensors.keys() | second.manifest.tensors.keys()):
            here, there = first.manifest.tensors.get(name), second.manifest.tensors.get(name)
            shapes = None if here is None else here.shape, None if there is None else there.shape
            dtypes = None if here is None else here.dtype, None if there is None else there.dtype
            if here is None or there is None or here.shape != there.shape:
                yield TensorComparison(name, shapes, dtypes)
            else:
                yield TensorComparison(name, shapes, dtypes, *compare_values(name, (one, here), (other, there)))


def compare_values(
    name: str, first: tuple[ShardReader, SavedTensor], second: tuple[ShardReader, SavedTensor]
) -> tuple[int, float, float]:
    """Return the number of equal elements and the largest absolute and relative differences."""
    import torch

    from megapipe.checkpoint.shard import DTYPES

    num_equal, max_abs, max_rel = 0, 0.0, 0.0
    wide = torch.promote_types(DTYPES[first[1].dtype], DTYPES[second[1].dtype])
    shape = first[1].shape
    rows = max(1, CHUNK_ELEMENTS // max(1, math.prod(shape[1:])))
    for start in range(0, shape[0], rows):
        box = Box((start, *(0 for _ in shape[1:])), (min(rows, shape[0] - start), *shape[1:]))
        here, there = (read_box(name, reader, saved, box).to(wide) for reader, saved in (first, second))
        equal = (here.view(torch.uint8) == there.view(torch.uint8)).view(-1, wide.itemsize).all(dim=1)
        num_equal += int(equal.sum())
        if equal.all():
            continue
        a, b = here[~equal].double(), there[~equal].double()
        differences = (a - b).abs().nan_to_num(nan=math.inf, posinf=math.inf)
        shares = (differences / torch.maximum(a.abs(), b.abs())).nan_to_num(nan=math.inf, posinf=math.inf)
        shares[differences == 0] = 0.0  # 0.0 and -0.0
        max_abs, max_rel = max(max_abs, differences.max().item()), max(max_rel, shares.max().item())
    return num_equal, max_abs, max_rel


def read_box(name: str, reader: ShardReader, saved: SavedTensor, box: Box) -> Tensor:
    import torch

    from megapipe.checkpoint.load import ReadRequest
    from megapipe.checkpoint.shard import DTYPES, TensorBox

    target = TensorBox(name, saved.shape, box, torch.empty(box.num_elements, dtype=DTYPES[saved.dtype]))
    boxes = (other for other in saved.boxes if other.box.intersect(box))
    copied = sum(reader.copy_all(ReadRequest(name, saved.dtype, other, [target]) for other in boxes).values())
    if copied != box.num_elements:
        missing = box.num_elements - copied
        raise CheckpointError(f"{name}: {missing} elements from row {box.offset[0]} on are in no file")
    return target.values


def difference_line(found: TensorComparison) -> str:
    shapes, dtypes = [list(shape or ()) for shape in found.shapes], found.dtypes
    if None in found.shapes:
        side = 0 if found.shapes[1] is None else 1
        return f"  {found.name}: only in the {('first', 'second')[side]}, {dtypes[side]} {shapes[side]}"
    if shapes[0] != shapes[1]:
        return f"  {found.name}: shape {shapes[0]} in the first, {shapes[1]} in the second"
    dtype = "" if dtypes[0] == dtypes[1] else f"{dtypes[0]} in the first, {dtypes[1]} in the second; "
    if found.num_equal == found.num_elements:
        return f"  {found.name}: {dtype}all {found.num_elements:,} elements bit-equal"
    shown = f"{found.num_equal:,} of {found.num_elements:,} elements bit-equal, largest difference {found.max_abs:.3e}"
    return f"  {found.name}: {dtype}{shown}, relative {found.max_rel:.3e}"


def as_values(found: TensorComparison) -> dict[str, Any]:
    """Replace infinities, which JSON does not have, by strings."""
    values = asdict(found) | {"num_elements": found.num_elements}
    return {key: "infinite" if value == math.inf else value for key, value in values.items()}


def show_difference(first: CheckpointFolder, second: CheckpointFolder, with_equal: bool, as_json: bool) -> bool:
    """Print how two checkpoints differ, and return True if a tensor does."""
    num_equal, differing = 0, []
    pairs = {
        key: tuple(each.manifest.state.get(key) for each in (first, second))
        for key in {**first.manifest.state, **second.manifest.state}
    }
    states = {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}
    if not as_json:
        print(f"first   {first.path}\nsecond  {second.path}")
        for key, (here, there) in sorted(states.items()):
            print(f"  {key}: {here} in the first, {there} in the second")
    for found in compare(first, second):
        num_equal += found.is_equal
        if not found.is_equal:
            differing.append(found)
        if not as_json and (with_equal or not found.is_equal):
            print(difference_line(found), flush=True)
    if as_json:
        content = {"first": str(first.path), "second": str(second.path), "state": states, "num_equal": num_equal}
        print(json.dumps(content | {"different": [as_values(found) for found in differing]}))
    else:
        print(f"{num_equal} tensors bitwise equal, {len(differing)} not")
    return bool(differing)


def show(folder: CheckpointFolder, with_tensors: bool, verify: bool, as_json: bool) -> bool:
    """Print what the checkpoint holds, and return True if it is damaged."""
    found = list(damage(folder)) if verify else []
    if as_json:
        print(json.dumps(content(folder, with_tensors) | ({"damage": found} if verify else {})))
        return bool(found)
    print("\n".join(summary(folder, with_tensors)))
    for line in found:
        print(line, file=sys.stderr)
    if verify:
        print("damaged" if found else "all checksums hold")
    return bool(found)
