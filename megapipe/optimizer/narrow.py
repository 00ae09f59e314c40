"""Optimizer state narrower than fp32 (--use-precision-aware-optimizer): how it is stored, read and written.

- bf16: rounded to nearest.
- fp16 and fp8 (e4m3): rounded to nearest after division by a scale, one for each state of each parameter of the whole
  model: the power of two that brings the largest element into [2^14, 2^15) or [2^7, 2^8). Transformer Engine
  has a scale for each rank's part instead, so that results depend on the grid.
- remainder, of a master weight: the low 16 bits of an fp32 number, as a signed number. The parameter is its high 16
  bits, plus 1 if the remainder is negative: fp32 rounded to bf16, halves away from zero.

Reading gives fp32. An update of a chunk of elements reads, computes in fp32, and writes back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from megapipe.comm.collectives import all_reduce
from megapipe.comm.groups import Group
from megapipe.dtypes import DTYPES
from megapipe.sharding.state_dtypes import REMAINDER

# dtype -> (bits of the significand, exponent of the power of two that bounds scaled elements)
SCALED = {"fp16": (11, 15), "fp8": (4, 8)}
LEAST_EXPONENT = -100  # of a scale, so that its inverse is finite


class Scales:
    """The scales of some states for the parameters of a rank's stages.

    dtypes: of the states, by name. parameters: (stage, name), the same on all ranks of `groups`, which together hold
    each parameter. current: [states, parameters], on `device`.
    """

    def __init__(
        self,
        dtypes: dict[str, str],
        parameters: Sequence[tuple[int, str]],
        groups: Sequence[Group],
        device: torch.device,
    ) -> None:
        self.rows = {state: row for row, state in enumerate(dtypes)}
        self.columns = {parameter: column for column, parameter in enumerate(parameters)}
        self._groups = groups
        self.current = torch.ones(len(dtypes), len(parameters), device=device)
        limits = [SCALED[dtype] for dtype in dtypes.values()]
        self._resolution = torch.tensor([[2.0**bits] for bits, _ in limits], device=device)
        self._exponent = torch.tensor([[limit] for _, limit in limits], dtype=torch.int32, device=device)

    def agree(self, largest: Tensor, device: torch.device) -> Tensor:
        """Return the scales for new elements; called by all ranks of the groups.

        largest: [states, parameters], the largest magnitude among this rank's elements; where it is 0 on all ranks,
        the scale stays as it is. device: on which the groups communicate.
        """
        found = largest.to(device)
        for group in self._groups:
            all_reduce(found, group, "max")
        found = found.to(self.current.device)
        # rounded as the elements will be: the scale of what was stored is then the scale it was stored with
        fraction, exponent = torch.frexp(found.nan_to_num())
        exponent = exponent + ((fraction * self._resolution).round() == self._resolution) - self._exponent
        scales = torch.ldexp(torch.ones_like(found), exponent.clamp(min=LEAST_EXPONENT))
        return torch.where(found > 0, scales, self.current)


class NarrowState:
    """One state of a shard: zeros, or master weights that equal their parameters where remainders are stored.

    stored: [n], of stored_dtype(dtype). parameter: bf16 [n], the other half of remainders.
    """

    def __init__(self, dtype: str, stored: Tensor, parameter: Tensor) -> None:
        self.dtype, self.stored, self._parameter = dtype, stored, parameter

    def read(self, start: int, stop: int, scale: Tensor | None = None) -> Tensor:
        """Return elements [start, stop) in fp32, in separate memory."""
        stored = self.stored[start:stop]
        if self.dtype == REMAINDER:
            high = self._parameter[start:stop].view(torch.int16).to(torch.int32)
            return high.bitwise_left_shift_(16).add_(stored).view(torch.float32)
        values = stored.to(torch.float32)
        return values if scale is None else values.mul_(scale)

    def write(self, start: int, values: Tensor, scale: Tensor | None = None) -> None:
        """Store fp32 values from `start` on, and overwrite them. A NaN becomes the usual one."""
        stop = start + values.numel()
        if self.dtype == REMAINDER:
            values.masked_fill_(values.isnan(), math.nan)  # another one could be rounded to a number
            bits = values.view(torch.int32)
            self.stored[start:stop].copy_(bits)
            bits.add_(1 << 15).bitwise_right_shift_(16)
            self._parameter[start:stop].view(torch.int16).copy_(bits)
        else:
            self.stored[start:stop].copy_(values if scale is None else values.div_(scale))


def stored_dtype(name: str) -> torch.dtype:
    """Return the dtype of the tensor in which a narrow state of this name is stored."""
    found: torch.dtype = torch.int16 if name == REMAINDER else getattr(torch, DTYPES[name].torch_name)
    return found
