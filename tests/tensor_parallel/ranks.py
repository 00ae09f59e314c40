"""Shared by the tests of this package: the tp group of a rank, its slice of a tensor, a record of operations."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megapipe.comm.groups import Group


def tp_group(rank: int, world_size: int) -> Group:
    """All ranks of the job as one tp group, over the world's own handle: making groups takes longer than most tests."""
    return Group("tp", tuple(range(world_size)), rank, dist.group.WORLD, None, 30.0)


def part(tensor: Tensor, dim: int, group: Group) -> Tensor:
    """This rank's equal slice of a dim, as a new tensor."""
    return tensor.detach().chunk(group.size, dim)[group.rank].clone()


def close(actual: Tensor | None, expected: Tensor) -> None:
    assert actual is not None
    assert actual.dtype == torch.float64
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-13)


class Storages(TorchDispatchMode):
    """Records the largest storage, in elements, that any operation returned, and the names of operations in order."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        self.known: set[int] = set()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.names.append(func.__name__)
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in self.known:
                self.largest = max(self.largest, tensor.untyped_storage().nbytes() // tensor.element_size())
        return result
