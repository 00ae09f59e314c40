"""`Machines`: the live objects of one rank, put together from a RunPlan."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from megapipe.build.precision import main_dtype, parameter_dtype
from megapipe.build.updates import RowUpdates
from megapipe.comm.channels import Channels, MessageSpec
from megapipe.comm.groups import ProcessGroups
from megapipe.comm.trace import Tracer
from megapipe.data_parallel.buffers import StageBuffers
from megapipe.data_parallel.gather import ParameterGather
from megapipe.data_parallel.reducer import GradientReducer
from megapipe.model.init import draw
from megapipe.model.stage import GPTStage
from megapipe.optimizer.optimizer import Optimizer
from megapipe.pipeline.engine import Engine
from megapipe.pipeline.stage import StageRunner
from megapipe.pipeline.streams import StageStreams
from megapipe.planner.run_plan import RunPlan
from megapipe.schedule.action import Op
from megapipe.sharding.audit import audit_buffers
from megapipe.sharding.spec import ParamSpec
from megapipe.tensor_parallel.gradient_slot import GradientSlot
from megapipe.tensor_parallel.weight_queue import WeightQueue

DrawSlice = Callable[[ParamSpec, int, int], Tensor]  # (spec, tp_rank, tp) -> this rank's slice of the initial values


class Machines:
    """Stages with their parameters in flat buffers, and what reduces, updates, gathers and runs them.

    groups: this rank's process groups. draw_slice: initial values instead of those drawn from the seed. tracer: records actions; the
    groups carry their own.
    """

    def __init__(
        self,
        plan: RunPlan,
        groups: ProcessGroups,
        device: torch.device,
        draw_slice: DrawSlice | None = None,
        tracer: Tracer | None = None,
    ) -> None:
        self.plan = plan
        self.groups = groups
        self.device = device
        self.tracer = tracer
        self.coordinates = plan.topology.coordinates(groups.world.global_rank)
        self.parameter_dtype = parameter_dtype(plan.config.precision.dtype)
        self.main_dtype = main_dtype(plan.config.precision.dtype)
        self.stages: dict[int, GPTStage] = {}
        self.runners: dict[int, StageRunner] = {}
        self.buffers: dict[int, StageBuffers] = {}
        for stage in plan.placement.stages_of(self.coordinates.pp_rank):
            self._add_stage(stage, draw_slice or self._draw)
        parallel = plan.config.parallel
        self.reducer = GradientReducer(
            self.buffers, groups, overlap=parallel.overlap_grad_reduce, reduce_in_bf16=parallel.grad_reduce_in_bf16
        )
        order = plan.order_of_first_use(self.coordinates.pp_rank)
        self.gather = ParameterGather(self.buffers, order, groups.replicas, overlap=parallel.overlap_param_gather, tracer=tracer)
        for stage, module in self.stages.items():
            self.gather.wait_inside(stage, module, module.parts())
        self.optimizer = Optimizer(self.buffers, groups, plan.config.optimizer, plan.config.precision, self.gather)
        self.channels = Channels.build(plan.placement, groups.pp, device, max_in_flight=max(2, plan.send_depth))
        self._stage_streams = StageStreams(self.stages, device) if device.type == "cuda" else None
        self.updates: RowUpdates | None = None  # of asynchronous schedules
        if not plan.is_synchronous:
            (own,) = self.buffers.values()
            self.updates = RowUpdates(own, self.reducer, self.optimizer, groups.dp_cp.size)
        self._engines: dict[tuple[int, bool], Engine] = {}

    @property
    def is_last_stage(self) -> bool:
        """This rank computes losses."""
        return self.plan.placement.num_stages - 1 in self.stages

    @property
    def reports_loss(self) -> bool:
        """Of all ranks that compute a microbatch's loss, this one is counted."""
        return self.is_last_stage and self.coordinates.tp_rank == 0

    def finish_parameters(self) -> None:
        """Return when all parameters are up to date."""
        self.gather.finish()

    def engine(self, num_microbatches: int, training: bool = True) -> Engine:
        """The engine of this rank's row for a step, or a forward-only batch, of this many microbatches."""
        key = num_microbatches, training
        if key not in self._engines:
            schedule = self.plan.schedule(num_microbatches) if training else self.plan.forward_schedule(num_microbatches)
            reduce, weights = (self.reducer.reduce, self.updates) if training else (None, None)
            streams = self._stage_streams if Op.OVERLAP in schedule.ops else None
            pp_rank = self.coordinates.pp_rank
            head_start = self.plan.head_start(num_microbatches)[pp_rank] if training else 0
            self._engines[key] = Engine(schedule, pp_rank, self.runners, self.channels, reduce, self.tracer, streams, weights, head_start)
        return self._engines[key]

    def message(self, boundary: int) -> tuple[MessageSpec, ...]:
        """What crosses a stage boundary: hidden states [s, b, h], [s / tp, b, h] under sequence parallelism."""
        model, tp = self.plan.config.model, self.plan.topology.tp
        seq = model.seq_length // tp if self.plan.config.parallel.sequence_parallel else model.seq_length
        return (MessageSpec((seq, self.plan.config.training.micro_batch_size, model.hidden_size), self.parameter_dtype),)

    def _add_stage(self, stage: int, draw_slice: DrawSlice) -> None:
        config, tp_rank, tp = self.plan.config, self.coordinates.tp_rank, self.plan.topology.tp
        layouts = self.plan.buffers(stage, tp_rank)
        audit_buffers(self.plan.stage_specs[stage], layouts, tp_rank, tp)
        queue = WeightQueue()
        module = GPTStage(
            config.model,
            self.plan.partition.stages[stage],
            self.groups.tp,
            sequence_parallel=config.parallel.sequence_parallel,
            recompute=config.recompute,
            loss=config.training,
            weight_queue=queue,
        )
        num_versions = self.plan.num_weight_versions(self.coordinates.pp_rank)
        buffers = StageBuffers(layouts, self.device, self.parameter_dtype, self.main_dtype, num_versions)
        lender = self.buffers[0] if self.plan.borrows_embedding(stage) else None
        buffers.materialize(module, lambda spec: draw_slice(spec, tp_rank, tp), GradientSlot, lender)
        self.stages[stage], self.buffers[stage], self.runners[stage] = module, buffers, StageRunner(module, queue)

    def _draw(self, spec: ParamSpec, tp_rank: int, tp: int) -> Tensor:
        return draw(spec, tp_rank, tp, self.plan.config.training.seed, self.main_dtype)
