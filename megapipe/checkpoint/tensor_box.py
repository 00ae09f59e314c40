"""`TensorBox`: a rectangle of a global tensor with the memory that holds it, to be saved or loaded into."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megapipe.sharding.boxes import Box, Piece


@dataclass(frozen=True)
class TensorBox:
    """A box and its values.

    name: `key/parameter`. shape: of the global tensor, without vocabulary padding. values: [box.num_elements],
    row-major and contiguous.
    """

    name: str
    shape: tuple[int, ...]
    box: Box
    values: Tensor

    def __post_init__(self) -> None:
        if self.values.numel() != self.box.num_elements or not self.values.is_contiguous():
            raise ValueError(
                f"{self.name}: {tuple(self.values.shape)} values with strides {self.values.stride()} for {self.box}"
            )

    @property
    def num_bytes(self) -> int:
        return self.values.numel() * self.values.dtype.itemsize


def unpadded_box(piece: Piece) -> Box | None:
    """Return a piece's box without vocabulary padding (its last rows), or None if nothing is left."""
    true_rows = piece.spec.true_rows
    if true_rows is None:
        return piece.box
    rows = min(max(true_rows - piece.box.offset[0], 0), piece.box.shape[0])
    return Box(piece.box.offset, (rows, *piece.box.shape[1:])) if rows else None


def tensor_box(key: str, piece: Piece, values: Tensor) -> TensorBox | None:
    """Return a piece of a parameter or of optimizer state without padding, or None if all of it is padding.

    values: [piece.box.num_elements], of which the result is a view.
    """
    box = unpadded_box(piece)
    if box is None:
        return None
    shape = piece.spec.shape
    if piece.spec.true_rows is not None:
        shape = (piece.spec.true_rows, *shape[1:])
    return TensorBox(f"{key}/{piece.spec.name}", shape, box, values.detach()[: box.num_elements])


def padding_of(piece: Piece, values: Tensor) -> Tensor:
    """Return a view of the part of a piece's values that is vocabulary padding, often empty."""
    box = unpadded_box(piece)
    return values.detach()[0 if box is None else box.num_elements :]


def byte_blocks(values: Tensor, block_bytes: int) -> Iterator[memoryview]:
    """Yield the bytes of a tensor in host memory, in blocks; tensors on the CPU are not copied."""
    flat = values.detach().reshape(-1).view(torch.uint8)
    if flat.device.type == "cpu":
        whole = flat.numpy().data
        for start in range(0, len(whole), block_bytes):
            yield whole[start : start + block_bytes]
    else:
        for block in flat.split(block_bytes):
            yield block.cpu().numpy().data


def slices_within(inner: Box, outer: Box) -> tuple[slice, ...]:
    """Return the index of a box in the values of the box that contains it."""
    return tuple(slice(o - t, o - t + n) for o, t, n in zip(inner.offset, outer.offset, inner.shape, strict=True))
