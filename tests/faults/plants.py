"""Faults inside a training rank, injected on request: a NaN, an unreadable data set, a flipped bit, slowness."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megapipe.checkpoint.folder import find_checkpoint
from megapipe.data.dataset import SyntheticDataset
from megapipe.data_parallel.copies import raw_bytes
from megapipe.model.block import Block
from megapipe.train.step import TrainStep

ORDER = "order"


def order(folder: Path, kind: str, rank: int) -> None:
    """Request that the armed rank injects a fault when its next step begins."""
    temporary = folder / f"{ORDER}.part"
    temporary.write_text(f"{kind} {rank}")
    os.replace(temporary, folder / ORDER)


def arm(rank: int, folder: Path, pause_seconds: float = 0.0) -> None:
    """Make this rank carry out the requests in `folder`. pause_seconds: added to every step."""
    launch, path = TrainStep.run, folder / ORDER

    def launched(self: TrainStep, *arguments: Any, **named: Any) -> bool:
        time.sleep(pause_seconds)
        try:
            kind, victim = path.read_text().split()
        except FileNotFoundError:
            return launch(self, *arguments, **named)
        if int(victim) == rank:
            path.unlink()
            PLANTS[kind](self)
        return launch(self, *arguments, **named)

    TrainStep.run = launched  # type: ignore[method-assign]


def nan_in_one_microbatch(step: TrainStep) -> None:
    """Make one output of one layer NaN."""
    forward = Block.forward

    def broken(self: Block, *arguments: Any) -> torch.Tensor:
        Block.forward = forward  # type: ignore[method-assign]
        return forward(self, *arguments) * torch.nan

    Block.forward = broken  # type: ignore[method-assign]


def unreadable_data(step: TrainStep) -> None:
    """Make reading the data set fail as on a broken disk."""

    def unreadable(self: SyntheticDataset, index: int) -> Any:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    SyntheticDataset.__getitem__ = unreadable  # type: ignore[method-assign]


def flipped_bit(step: TrainStep) -> None:
    """Flip one bit of one weight; the value stays finite."""
    runtime = step.runtime
    runtime.stores.finish_weights()
    buffers = next(iter(runtime.buffers.values()))
    values = buffers.parameter(next(name for name in buffers.names if "mlp" in name)).reshape(-1)
    raw_bytes(values)[values.numel() // 2 * values.element_size() + 2] ^= 1


def damage_newest(save: Path) -> None:
    """Flip one bit of one tensor in the newest checkpoint."""
    newest = find_checkpoint(save)
    assert newest is not None
    saved = next(iter(newest.manifest.tensors.values())).boxes[0]
    with (newest.path / saved.file).open("r+b") as file:
        file.seek(saved.start + 5)
        byte = file.read(1)
        file.seek(saved.start + 5)
        file.write(bytes([byte[0] ^ 16]))


PLANTS: dict[str, Callable[[TrainStep], None]] = {
    "nan": nan_in_one_microbatch,
    "loader": unreadable_data,
    "flip": flipped_bit,
}
