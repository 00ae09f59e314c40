"""Two checkpoints compared tensor by tensor, whatever grids wrote them; a few rows of one tensor are in memory at a
time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megapipe.checkpoint.folder import CheckpointFolder
from megapipe.checkpoint.manifest import SavedTensor
from megapipe.checkpoint.shard import DTYPES, ReadRequest, ShardReader
from megapipe.checkpoint.tensor_box import TensorBox
from megapipe.errors import CheckpointError
from megapipe.sharding.boxes import Box

CHUNK_ELEMENTS = 1 << 21


@dataclass(frozen=True)
class TensorComparison:
    """One name in both checkpoints, or in one: the other's shape and dtype are None. The numbers are None where
    shapes differ.

    num_equal: elements with the same bits, after widening to the wider dtype. max_abs, max_rel: largest difference,
    and largest difference as a share of the larger magnitude; infinite where only one side is, or either is NaN with
    other bits.
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
        """Same shape, dtype and bits."""
        return self.dtypes[0] == self.dtypes[1] and self.num_equal == self.num_elements


def compare(first: CheckpointFolder, second: CheckpointFolder) -> Iterator[TensorComparison]:
    """Every tensor of either checkpoint, by name. Raises CheckpointError for damage, naming file and tensor."""
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
                yield TensorComparison(name, shapes, dtypes, *_compare_values(name, (one, here), (other, there)))


def _compare_values(
    name: str, first: tuple[ShardReader, SavedTensor], second: tuple[ShardReader, SavedTensor]
) -> tuple[int, float, float]:
    num_equal, max_abs, max_rel = 0, 0.0, 0.0
    wide = torch.promote_types(DTYPES[first[1].dtype], DTYPES[second[1].dtype])
    for box in _chunks(first[1].shape):
        here, there = (_read(name, reader, saved, box).to(wide) for reader, saved in (first, second))
        equal = (_bits(here) == _bits(there)).view(-1, wide.itemsize).all(dim=1)
        num_equal += int(equal.sum())
        if equal.all():
            continue
        a, b = here[~equal].double(), there[~equal].double()
        differences = (a - b).abs().nan_to_num(nan=math.inf, posinf=math.inf)
        shares = (differences / torch.maximum(a.abs(), b.abs())).nan_to_num(nan=math.inf, posinf=math.inf)
        shares[differences == 0] = 0.0  # zeros of two signs
        max_abs, max_rel = max(max_abs, differences.max().item()), max(max_rel, shares.max().item())
    return num_equal, max_abs, max_rel


def _chunks(shape: tuple[int, ...]) -> Iterator[Box]:
    columns = math.prod(shape[1:])
    rows = max(1, CHUNK_ELEMENTS // max(1, columns))
    for start in range(0, shape[0], rows):
        yield Box((start, *(0 for _ in shape[1:])), (min(rows, shape[0] - start), *shape[1:]))


def _read(name: str, reader: ShardReader, saved: SavedTensor, box: Box) -> Tensor:
    target = TensorBox(name, saved.shape, box, torch.empty(box.num_elements, dtype=DTYPES[saved.dtype]))
    boxes = (other for other in saved.boxes if other.box.intersect(box))
    copied = sum(reader.copy_all(ReadRequest(name, saved.dtype, other, [target]) for other in boxes).values())
    if copied != box.num_elements:
        raise CheckpointError(
            f"{name}: {box.num_elements - copied} elements from row {box.offset[0]} on are in no file"
        )
    return target.values


def _bits(values: Tensor) -> Tensor:
    return values.view(torch.uint8)
