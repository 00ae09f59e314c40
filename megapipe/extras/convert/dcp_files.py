"""Writing a folder of torch.distributed.checkpoint from one process, with one tensor in memory at a time.

torch writes it, because its `.metadata` is a pickle of torch's own classes, whose modules and fields change between
versions.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException, FileSystemWriter, save
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType

from megapipe.extras.convert.snapshot import LazyTensor


@dataclass(frozen=True)
class LazyStack:
    """Tensors of one shape and dtype, written as the rows of a tensor [number, *shape], each of them by itself."""

    rows: Sequence[LazyTensor]

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.rows), *self.rows[0].shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.rows[0].dtype


class _LazyPlanner(DefaultSavePlanner):
    """torch's planner, shown tensors on the meta device, which reads each one when it is written.

    Frees it when the next is requested, as torch's writer keeps the tensors of a file until the file is complete.
    """

    _written: Tensor | None = None

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        self._lazy = {name: leaf for name, leaf in self.state_dict.items() if isinstance(leaf, LazyTensor | LazyStack)}
        shown = {name: torch.empty(leaf.shape, dtype=leaf.dtype, device="meta") for name, leaf in self._lazy.items()}
        self.state_dict = {**self.state_dict, **shown}

    def create_local_plan(self) -> SavePlan:
        """Plan one item for each row of a stack."""
        plan, items = super().create_local_plan(), list[WriteItem]()
        for item in plan.items:
            if item.tensor_data is None or not isinstance(self._lazy.get(item.index.fqn), LazyStack):
                items.append(item)
                continue
            number, *shape = item.tensor_data.size
            for row in range(number):
                chunk = ChunkStorageMetadata(torch.Size([row, *(0 for _ in shape)]), torch.Size([1, *shape]))
                data = dataclasses.replace(item.tensor_data, chunk=chunk)
                index = MetadataIndex(item.index.fqn, chunk.offsets)
                items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        self.plan = dataclasses.replace(plan, items=items)
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Any:
        lazy = self._lazy.get(index.fqn)
        if lazy is None:
            return super().lookup_object(index)
        if is_row := isinstance(lazy, LazyStack):
            assert index.offset is not None  # an item of `create_local_plan`
            lazy = lazy.rows[index.offset[0]]
        if self._written is not None:
            self._written.untyped_storage().resize_(0)
        # a copy, since others may hold the tensor that was read and its memory is freed above
        self._written = lazy.detach().clone(memory_format=torch.contiguous_format)
        return self._written[None] if is_row else self._written


def save_state_dict(state: Mapping[str, Any], folder: Path) -> None:
    """Write LazyTensors, LazyStacks and picklable values by name, without a process group.

    Raises OSError, or the error of reading a tensor.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as intended here
            writer = FileSystemWriter(folder, per_thread_copy_ahead=0)  # one tensor at a time, also with a GPU
            planner = _LazyPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
            save(dict(state), storage_writer=writer, planner=planner, no_dist=True)
    except CheckpointException as error:  # a BaseException, which most handlers would not catch
        raise next(iter(error.failures.values()))[0] from None
