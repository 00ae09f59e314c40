"""Norms of gradients over the model, by which they are clipped, and the loss scale of fp16.

In a norm or count over the model every element counts once. Each rank sums the elements that it counts
(`Shard.exact_ranges`): those of its shards, or of the first replica if the optimizer is not sharded. The sums are then
added over all ranks, in one message with other numbers of the step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from megapipe.comm.collectives import all_reduce
from megapipe.comm.groups import Group
from megapipe.config.model import PrecisionConfig
from megapipe.gpu.streams import HostCopy
from megapipe.sharding.state_dtypes import NORM_CHUNK

# fp32 sums of more elements than this drift: 40 million squares in one accumulator have an error of 2e-3
SUM_BLOCK = 4096
CLIP_EPSILON = 1e-6  # added to a norm that gradients are divided by


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


def sums_over_world(
    values: Sequence[Tensor], world: Group, beside: Tensor | None = None, side: torch.cuda.Stream | None = None
) -> HostCopy:
    """Start to sum fp64 scalars over the world in one message.

    beside: [n] fp64, further numbers, which follow them. side: a CUDA stream that waits for the message in place of the
    current one.
    """
    summed = torch.stack(list(values))
    summed = summed if beside is None else torch.cat([summed, beside])
    if side is None:
        return HostCopy(summed, all_reduce(summed, world, async_op=True))
    side.wait_stream(torch.cuda.current_stream(summed.device))
    summed.record_stream(side)
    with torch.cuda.stream(side):
        return HostCopy(summed, all_reduce(summed, world, async_op=True))


def clip_coefficient(norm: float, max_norm: float) -> float:
    """Return the factor that scales gradients of this norm to at most max_norm; max_norm 0 means no clipping."""
    if max_norm <= 0 or not math.isfinite(norm):
        return 1.0
    return min(1.0, max_norm / (norm + CLIP_EPSILON))


class LossScaler:
    """The constant or dynamic loss scale of fp16: the backward starts from loss x scale, so that small gradients do not
    vanish (Micikevicius et al. 2018, arXiv:1710.03740).

    window: None keeps the scale constant. Otherwise `hysteresis` overflows since the scale last grew halve it, and so
    does every further one, never below `minimum`; `window` steps in a row without overflow double it.
    """

    def __init__(self, initial: float, *, window: int | None = None, hysteresis: int = 1, minimum: float = 1.0) -> None:
        self.scale = initial
        self._window = window
        self._hysteresis = hysteresis
        self._minimum = minimum
        self._good_steps = 0
        self._overflows_left = hysteresis

    @classmethod
    def of(cls, precision: PrecisionConfig) -> LossScaler:
        """Return a scaler of 1 unless the dtype is fp16; for fp16, --loss-scale if set, else a dynamic scale."""
        if precision.dtype != "fp16":
            return cls(1.0)
        if precision.loss_scale is not None:
            return cls(precision.loss_scale)
        window, hysteresis, minimum = precision.loss_scale_window, precision.hysteresis, precision.min_loss_scale
        return cls(precision.initial_loss_scale, window=window, hysteresis=hysteresis, minimum=minimum)

    @property
    def is_dynamic(self) -> bool:
        """True if the scale adapts: overflows are then part of finding it; with a constant scale they are an error."""
        return self._window is not None

    def update(self, overflow: bool) -> None:
        """Add one step. overflow: a gradient on some rank was infinite or NaN, so that the step was skipped."""
        if not self.is_dynamic:
            return
        if overflow:
            self._good_steps = 0
            self._overflows_left -= 1
            if self._overflows_left <= 0:
                self.scale = max(self.scale / 2, self._minimum)
            return
        self._good_steps += 1
        if self._good_steps == self._window:
            self._good_steps = 0
            self._overflows_left = self._hysteresis
            self.scale *= 2

    def state(self) -> dict[str, float | int]:
        """Return plain values for a checkpoint."""
        return {"scale": self.scale, "good_steps": self._good_steps, "overflows_left": self._overflows_left}

    def load_state(self, state: dict[str, float | int]) -> None:
        """Restore the state of a checkpoint; a constant scale keeps the value of the configuration."""
        if self.is_dynamic:
            self.scale = float(state["scale"])
            self._good_steps = int(state["good_steps"])
            self._overflows_left = int(state["overflows_left"])
