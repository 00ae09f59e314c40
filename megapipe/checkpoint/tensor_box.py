"""`TensorBox`: a rectangle of a global tensor and the memory that holds it, to be saved or to be loaded into."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megapipe.sharding.boxes import Box, Piece


@dataclass(frozen=True)
class TensorBox:
    """name: `key/parameter`. shape: of the global tensor, without vocabulary padding. values: [box.num_elements], row-major, contiguous."""

    name: str
    shape: tuple[int, ...]
    box: Box
    values: Tensor

    def __post_init__(self) -> None:
        if self.values.numel() != self.box.num_elements or not self.values.is_contiguous():
            raise ValueError(
                f"{self.name}: {tuple(self.values.shape)} values with strides {self.values.stride()} for {self.box}"
            )


def true_box(piece: Piece) -> Box | None:
    """The box of a piece without the vocabulary's padding rows, which are its last; None if nothing is left."""
    true_rows = piece.spec.true_rows
    if true_rows is None:
        return piece.box
    rows = min(max(true_rows - piece.box.offset[0], 0), piece.box.shape[0])
    return Box(piece.box.offset, (rows, *piece.box.shape[1:])) if rows else None


def true_shape(piece: Piece) -> tuple[int, ...]:
    """The global tensor's shape without the vocabulary's padding."""
    shape = piece.spec.shape
    return shape if piece.spec.true_rows is None else (piece.spec.true_rows, *shape[1:])


def tensor_box(key: str, piece: Piece, values: Tensor) -> TensorBox | None:
    """A piece of a parameter's or optimizer's tensor without padding. values: [piece.box.num_elements], a view. None: all padding."""
    box = true_box(piece)
    if box is None:
        return None
    return TensorBox(f"{key}/{piece.spec.name}", true_shape(piece), box, values.detach()[: box.num_elements])


def padding_of(piece: Piece, values: Tensor) -> Tensor:
    """The part of a piece's values that is vocabulary padding, a view, often empty."""
    box = true_box(piece)
    return values.detach()[0 if box is None else box.num_elements :]


def as_bytes(values: Tensor, block_bytes: int) -> Iterator[memoryview]:
    """The elements' bytes in memory of the CPU, in blocks, the last one shorter; without a copy where they are there."""
    flat = values.detach().reshape(-1).view(torch.uint8)
    if flat.device.type == "cpu":
        whole = flat.numpy().data
        for start in range(0, len(whole), block_bytes):
            yield whole[start : start + block_bytes]
    else:
        for block in flat.split(block_bytes):
            yield block.cpu().numpy().data
