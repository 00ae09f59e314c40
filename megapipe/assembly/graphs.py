"""CUDA graphs of a rank's stages, put together from its plan (--cuda-graph-impl local)."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import torch

from megapipe.data_parallel.buffers import StageBuffers
from megapipe.data_parallel.gather import ParameterGather
from megapipe.model.microbatch import Microbatch
from megapipe.model.stage import GPTStage
from megapipe.monitor.heartbeat import PATIENCE, Heartbeat
from megapipe.pipeline.graphs import CapturedStage, CudaRecorder, RankGraphs, Recorder, StageGraphs
from megapipe.pipeline.stage import StageRunner
from megapipe.plan.run_plan import RunPlan


def build_graphs(
    plan: RunPlan,
    pp_rank: int,
    device: torch.device,
    stages: Mapping[int, tuple[GPTStage, StageBuffers, StageRunner]],
    gather: ParameterGather,
    recorder: Recorder | None = None,
    heartbeat: Heartbeat | None = None,
) -> RankGraphs | None:
    """None where nothing is recorded. recorder: of CUDA graphs if None."""
    gpu = plan.config.gpu
    if gpu.cuda_graph_impl == "none":
        return None
    return RankGraphs(
        {stage: _stage_graphs(plan, stage, *parts, gather) for stage, parts in stages.items()},
        plan.num_slots(pp_rank),
        plan.placement.num_stages - 1,
        gpu.cuda_graph_warmup_steps,
        device,
        recorder or CudaRecorder(),
        settle=gather.finish,
        example=_without_key,
        during=nullcontext if heartbeat is None else partial(heartbeat.phase, "recording graphs", PATIENCE),
    )


def captured_stages(graphs: RankGraphs, plan: RunPlan, pp_rank: int, num_microbatches: int) -> dict[int, CapturedStage]:
    """For the engine of one number of microbatches."""
    slots = plan.slots(num_microbatches, pp_rank)
    return {
        stage: CapturedStage(
            of_stage, {microbatch: slot for (number, microbatch), slot in slots.items() if number == stage}
        )
        for stage, of_stage in graphs.stages.items()
    }


def _stage_graphs(
    plan: RunPlan, stage: int, module: GPTStage, buffers: StageBuffers, runner: StageRunner, gather: ParameterGather
) -> StageGraphs:
    def ready() -> None:
        gather.wait(stage)
        if plan.borrows_embedding(stage):
            gather.wait(0)
        module.cast_weights()

    def fixed() -> list[torch.Tensor]:
        return [*module.parameters(), *(buffer.gradients for buffer in buffers.buffers)]

    return StageGraphs(stage, runner, fixed, ready, plan.splits_backward)


def _without_key(microbatch: Microbatch) -> Microbatch:
    """A dropout key is another for each microbatch, and no tensor."""
    return replace(microbatch, dropout_key=None)
