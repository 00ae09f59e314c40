"""`TrainingRuntime`: the live objects of one rank that trains, built from a RunPlan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from megapipe.assembly.inference_runtime import DrawSlice, InferenceRuntime
from megapipe.assembly.row_updates import RowUpdates
from megapipe.comm.groups import ProcessGroups
from megapipe.comm.trace import Tracer
from megapipe.data_parallel.gather import ParameterGather
from megapipe.data_parallel.reducer import GradientReducer
from megapipe.gpu.copies import copies_for
from megapipe.gpu.streams import StageStreams
from megapipe.monitor.heartbeat import PATIENCE
from megapipe.optimizer.optimizer import Optimizer
from megapipe.pipeline.engine import Engine
from megapipe.pipeline.graphs import CapturedStage, CudaRecorder, RankGraphs, Recorder, StageGraphs
from megapipe.pipeline.offload import Offload, RowOffload, StageOffload
from megapipe.pipeline.stage import Stage
from megapipe.plan.offload import row_moves, stage_groups
from megapipe.plan.run_plan import RunPlan
from megapipe.schedule.action import Op


class TrainingRuntime(InferenceRuntime):
    """Stages with their parameters in flat buffers; reducer, all-gather, optimizer and engines.

    groups, draw_slice, tracer: as in InferenceRuntime. marks: as in Engine. recorder: records the graphs of
    --cuda-graph-impl local (CUDA graphs if None).
    """

    def __init__(
        self,
        plan: RunPlan,
        groups: ProcessGroups,
        device: torch.device,
        draw_slice: DrawSlice | None = None,
        tracer: Tracer | None = None,
        marks: Callable[[str], AbstractContextManager[Any]] | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        super().__init__(plan, groups, device, draw_slice, tracer, trains=True)
        parallel = plan.config.parallel
        self.reducer = GradientReducer(
            self.buffers, groups, overlap=parallel.overlap_grad_reduce, reduce_in_bf16=parallel.grad_reduce_in_bf16
        )
        order = plan.order_of_first_use(self.coordinates.pp_rank)
        self.gather = ParameterGather(
            self.buffers, order, groups.replicas, overlap=parallel.overlap_param_gather, tracer=tracer
        )
        for stage, module in self.stages.items():
            self.gather.wait_inside(stage, module, module.parts())
        self.optimizer = Optimizer(
            self.buffers, groups, plan.config.optimizer, plan.config.precision, self.gather, self.kernels.optimizer
        )
        self._stage_streams = StageStreams(self.stages, device) if device.type == "cuda" else None
        self.updates: RowUpdates | None = None  # of asynchronous schedules
        if not plan.is_synchronous:
            (own,) = self.buffers.values()
            self.updates = RowUpdates(own, self.reducer, self.optimizer, groups.dp_cp.size)
        self.graphs = None if plan.config.gpu.cuda_graph_impl == "none" else self._build_graphs(recorder)
        self.marks = marks
        self.offload = self._build_offload() if plan.config.offload.cpu_offloading_num_layers else None
        self._engines: dict[int, Engine] = {}

    def finish_parameters(self) -> None:
        """Return when all parameters are up to date."""
        self.gather.finish()

    def engine(self, num_microbatches: int) -> Engine:
        """Return the engine of this rank's row for a step of this many microbatches."""
        if num_microbatches not in self._engines:
            schedule, pp_rank = self.plan.schedule(num_microbatches), self.coordinates.pp_rank
            self._engines[num_microbatches] = Engine(
                schedule,
                pp_rank,
                self.runners if self.graphs is None else self._captured_stages(self.graphs, num_microbatches),
                self.channels,
                self.reducer.reduce,
                self.tracer,
                self._stage_streams if Op.OVERLAP in schedule.ops else None,
                self.updates,
                self.plan.head_start(num_microbatches)[pp_rank],
                self.groups.world.heartbeat,
                self.marks,
                None if self.offload is None else self._row_offload(self.offload, num_microbatches),
            )
        return self._engines[num_microbatches]

    def _build_graphs(self, recorder: Recorder | None) -> RankGraphs:
        return RankGraphs(
            {stage: self._stage_graphs(stage) for stage in self.stages},
            self.plan.num_slots(self.coordinates.pp_rank),
            self.plan.placement.num_stages - 1,
            self.plan.config.gpu.cuda_graph_warmup_steps,
            self.device,
            recorder or CudaRecorder(),
            settle=self.gather.finish,
            # a dropout key differs for each microbatch and is no tensor: graphs are recorded without one
            example=partial(replace, dropout_key=None),
            during=partial(self.heartbeat.phase, "recording graphs", PATIENCE),
        )

    def _stage_graphs(self, stage: int) -> StageGraphs:
        module, buffers = self.stages[stage], self.buffers[stage]

        def prepare() -> None:
            self.gather.wait(stage)
            if self.plan.borrows_embedding(stage):
                self.gather.wait(0)
            module.cast_weights()

        def fixed_tensors() -> list[torch.Tensor]:
            return [*module.parameters(), *(buffer.gradients for buffer in buffers.buffers)]

        return StageGraphs(stage, self.runners[stage], fixed_tensors, prepare, self.plan.splits_backward)

    def _captured_stages(self, graphs: RankGraphs, num_microbatches: int) -> Mapping[int, Stage]:
        slots = self.plan.slots(num_microbatches, self.coordinates.pp_rank)
        return {
            stage: CapturedStage(captured, {m: slot for (number, m), slot in slots.items() if number == stage})
            for stage, captured in graphs.stages.items()
        }

    def _build_offload(self) -> Offload:
        """Return what moves activations to the host and back, and let the stages run their layers through it."""
        offload = Offload(copies_for(self.device), self.plan.config.offload.min_offloaded_tensor_size)
        for stage, module in self.stages.items():
            module.group_runner = StageOffload(offload, stage)
        return offload

    def _row_offload(self, offload: Offload, num_microbatches: int) -> RowOffload:
        plan, pp_rank = self.plan, self.coordinates.pp_rank
        groups = {stage: stage_groups(plan, stage) for stage in plan.placement.stages_of(pp_rank)}
        row = plan.schedule(num_microbatches).rows[pp_rank]
        return RowOffload.of(offload, row_moves(plan, num_microbatches, pp_rank), row, groups)
