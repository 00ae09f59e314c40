"""A folder of torch.distributed.checkpoint, written by torch itself from one process, one tensor in memory at a time.

torch writes it, because its `.metadata` is a pickle of torch's own classes, whose modules and fields change between versions.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException, FileSystemWriter, save
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta


@runtime_checkable
class Unread(Protocol):
    """A tensor that `detach` reads: as a leaf of a state dict it is in memory only while it is written. Tensors are such, too."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def detach(self) -> Tensor: ...


class _LazyPlanner(DefaultSavePlanner):
    """torch's planner, which is shown tensors without memory and reads each when its turn comes.

    torch's writer keeps every tensor of a file until the file is done, so that each is emptied when the next one is asked for.
    """

    _written: Tensor | None = None

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        self._unread = {name: leaf for name, leaf in self.state_dict.items() if isinstance(leaf, Unread)}
        shown = {name: torch.empty(leaf.shape, dtype=leaf.dtype, device="meta") for name, leaf in self._unread.items()}
        self.state_dict = {**self.state_dict, **shown}

    def lookup_object(self, index: MetadataIndex) -> Any:
        unread = self._unread.get(index.fqn)
        if unread is None:
            return super().lookup_object(index)
        if self._written is not None:
            self._written.untyped_storage().resize_(0)
        self._written = unread.detach().clone(
            memory_format=torch.contiguous_format
        )  # a copy, for others may hold what was read
        return self._written


def save_state_dict(state: Mapping[str, Any], folder: Path) -> None:
    """Write a nested state dict into a folder. Leaves are `Unread` or values that can be pickled; a leaf's key is its path joined by '.'.

    Without a process group. Raises OSError, or what reading a tensor raised.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # said even where it was asked for
            writer = FileSystemWriter(folder, per_thread_copy_ahead=0)  # one after the other, with a GPU, too
            save(dict(state), storage_writer=writer, planner=_LazyPlanner(), no_dist=True)
    except CheckpointException as error:  # no Exception: it would pass by every handler
        raise next(iter(error.failures.values()))[0] from None
