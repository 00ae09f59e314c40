"""Global norms and counts over the model, in which every element counts once.

Each rank sums the elements that it counts (`Shard.exact_ranges`): those of its shards, or of the first replica if the
optimizer is not sharded. The sums are then added over all ranks, in one message with other numbers of the step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from megapipe.comm.collectives import all_reduce
from megapipe.comm.groups import Group
from megapipe.sharding.state_dtypes import NORM_CHUNK

# fp32 sums of more elements than this drift: 40 million squares in one accumulator have an error of 2e-3
SUM_BLOCK = 4096


def sum_of_squares(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return the sum of squares of flat tensors as an fp64 scalar.

    Blocks are summed in the tensors' own dtype (at least fp32), the blocks' sums in fp64.
    """
    total = torch.zeros((), dtype=torch.float64, device=device)
    # narrow tensors in chunks, since they are widened
    parts = (part for t in tensors for part in (t.split(NORM_CHUNK) if t.dtype.itemsize < 4 else (t,)))
    for tensor in parts:
        tensor = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
        whole = tensor.numel() // SUM_BLOCK * SUM_BLOCK
        if whole:
            total += torch.linalg.vector_norm(tensor[:whole].view(-1, SUM_BLOCK), dim=1).double().square_().sum()
        if whole < tensor.numel():
            total += torch.linalg.vector_norm(tensor[whole:]).double().square_()
    return total


def count_zeros(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return the number of elements that are exactly zero, as an fp64 scalar (exact up to 2^53)."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for tensor in tensors:
        total += tensor.numel() - torch.count_nonzero(tensor)
    return total


class ModelSum:
    """Scalars summed over the world, in one message that may still be in flight."""

    def __init__(self, values: Sequence[Tensor], world: Group, beside: Tensor | None = None) -> None:
        """beside: [n] fp64, further numbers to sum, which follow the values."""
        summed = torch.stack(list(values))
        self._summed = summed if beside is None else torch.cat([summed, beside])
        self._work = all_reduce(self._summed, world, async_op=True)

    def tensor(self) -> Tensor:
        """Return the sums, fp64, after which the current stream is ordered (on a CPU: once they are complete)."""
        self._work.wait()
        return self._summed

    def wait(self) -> list[float]:
        """Return the sums once they are complete."""
        return [float(value) for value in self.tensor().tolist()]


def clip_coefficient(norm: float, max_norm: float) -> float:
    """Return the factor that scales gradients of this norm to at most max_norm; max_norm 0 means no clipping."""
    if max_norm <= 0 or not math.isfinite(norm):
        return 1.0
    return min(1.0, max_norm / (norm + 1e-6))
