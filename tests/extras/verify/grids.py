"""Run the comparison on one rank, with or without a planted bug; slice weights from whole tensors."""

from __future__ import annotations

import sys
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from megapipe.assembly.compose import DrawSlice
from megapipe.comm.groups import build_process_groups
from megapipe.config.config import Config
from megapipe.extras.verify.compare import ParityStep
from megapipe.extras.verify.parity import verified_steps
from megapipe.extras.verify.report import found_text
from megapipe.extras.verify.shrink import shrink
from megapipe.plan.resolve import resolve
from megapipe.sharding.spec import ParamSpec
from tests.extras.verify.planted import Plant


def clear_caches() -> None:
    """Empty the caches of megapipe's functions, whose values a planted bug changes; a process runs several jobs."""
    for name, module in list(sys.modules.items()):
        if name.startswith("megapipe"):
            for value in vars(module).values():
                if hasattr(value, "cache_clear"):
                    value.cache_clear()


def compared(
    rank: int, world_size: int, config: Config, mode: str, plant: Plant | None = None
) -> tuple[list[ParityStep], str]:
    """Return all steps and the report of this rank."""
    with pytest.MonkeyPatch.context() as patch:
        if plant is not None:
            plant(patch, rank)
        clear_caches()
        small = shrink(resolve(config, world_size), mode, world_size)
        groups = build_process_groups(small.plan.topology, rank, "gloo", 60)
        steps = verified_steps(small, groups, torch.device("cpu"))
        return steps, found_text(small, steps)


def given_slices(weights: Mapping[str, Tensor]) -> DrawSlice:
    """Return a function that cuts one rank's slice from whole tensors by name. Missing vocabulary padding is zero."""

    def slice_of(spec: ParamSpec, tp_rank: int, tp: int) -> Tensor:
        whole = weights[spec.name]
        if whole.shape[0] < spec.shape[0]:
            whole = torch.cat([whole, whole.new_zeros(spec.shape[0] - whole.shape[0], *whole.shape[1:])])
        dim = spec.slicing.dim or 0
        return torch.cat([whole.narrow(dim, i.start, i.stop - i.start) for i in spec.intervals(tp_rank, tp)], dim)

    return slice_of
