"""Faults of a training rank: a NaN, an unreadable data set, a flipped bit, slowness; and a damaged checkpoint."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import Any

import torch

from megapipe.checkpoint.folder import find_checkpoint
from megapipe.data.dataset import SyntheticDataset
from megapipe.data_parallel.copies import raw_bytes
from megapipe.model.block import Block
from megapipe.train.step import TrainStep


def pause(seconds: float) -> None:
    """Make each step of this rank take so much longer."""
    run = TrainStep.run

    def paused(self: TrainStep, *arguments: Any, **named: Any) -> Any:
        time.sleep(seconds)
        return run(self, *arguments, **named)

    TrainStep.run = paused  # type: ignore[method-assign]


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
