"""What moves a rank's activations to the host and back, put together from its plan."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megapipe.gpu.copies import copies_for
from megapipe.model.stage import GPTStage
from megapipe.pipeline.offload import Offload, RowOffload, StageOffload
from megapipe.plan.offload import row_moves, stage_groups
from megapipe.plan.run_plan import RunPlan


def build_offload(plan: RunPlan, stages: Mapping[int, GPTStage], device: torch.device) -> Offload | None:
    """Lets these stages run their layers through it; None where nothing is offloaded."""
    if not plan.config.offload.cpu_offloading_num_layers:
        return None
    offload = Offload(copies_for(device), plan.config.offload.min_offloaded_tensor_size)
    for stage, module in stages.items():
        module.group_runner = StageOffload(offload, stage)
    return offload


def row_offload(plan: RunPlan, offload: Offload, num_microbatches: int, pp_rank: int) -> RowOffload:
    """For the engine of one number of microbatches."""
    groups = {stage: stage_groups(plan, stage) for stage in plan.placement.stages_of(pp_rank)}
    return RowOffload.of(
        offload, row_moves(plan, num_microbatches, pp_rank), plan.schedule(num_microbatches).rows[pp_rank], groups
    )
