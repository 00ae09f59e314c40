"""`TrainingRuntime`: the live objects of one rank that trains, put together from a RunPlan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch

from megapipe.assembly.graphs import build_graphs, captured_stages
from megapipe.assembly.inference_runtime import DrawSlice, InferenceRuntime
from megapipe.assembly.offload import build_offload, row_offload
from megapipe.assembly.updates import RowUpdates
from megapipe.comm.groups import ProcessGroups
from megapipe.comm.trace import Tracer
from megapipe.data_parallel.gather import ParameterGather
from megapipe.data_parallel.reducer import GradientReducer
from megapipe.gpu.streams import StageStreams
from megapipe.optimizer.optimizer import Optimizer
from megapipe.pipeline.engine import Engine
from megapipe.pipeline.graphs import Recorder
from megapipe.pipeline.stage import Stage
from megapipe.plan.run_plan import RunPlan
from megapipe.schedule.action import Op


class TrainingRuntime(InferenceRuntime):
    """Stages with their parameters in flat buffers, and what reduces, updates, gathers and runs them.

    groups, draw_slice, tracer: as in InferenceRuntime. marks: as in Engine. recorder: of the graphs of --cuda-graph-impl local.
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
        parts = {stage: (module, self.buffers[stage], self.runners[stage]) for stage, module in self.stages.items()}
        self.graphs = build_graphs(
            plan, self.coordinates.pp_rank, device, parts, self.gather, recorder, groups.world.heartbeat
        )
        self.marks = marks
        self.offload = build_offload(plan, self.stages, device)
        self._engines: dict[int, Engine] = {}

    def finish_parameters(self) -> None:
        """Return when all parameters are up to date."""
        self.gather.finish()

    def engine(self, num_microbatches: int) -> Engine:
        """The engine of this rank's row for a step of this many microbatches."""
        if num_microbatches not in self._engines:
            schedule, pp_rank = self.plan.schedule(num_microbatches), self.coordinates.pp_rank
            streams = self._stage_streams if Op.OVERLAP in schedule.ops else None
            offload = None if self.offload is None else row_offload(self.plan, self.offload, num_microbatches, pp_rank)
            head_start = self.plan.head_start(num_microbatches)[pp_rank]
            stages: Mapping[int, Stage] = self.runners
            if self.graphs is not None:
                stages = captured_stages(self.graphs, self.plan, pp_rank, num_microbatches)
            self._engines[num_microbatches] = Engine(
                schedule,
                pp_rank,
                stages,
                self.channels,
                self.reducer.reduce,
                self.tracer,
                streams,
                self.updates,
                head_start,
                self.groups.world.heartbeat,
                self.marks,
                offload,
            )
        return self._engines[num_microbatches]
