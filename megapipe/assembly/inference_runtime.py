"""`InferenceRuntime`: the stages of one rank with their parameters, and what runs them forwards. `TrainingRuntime` adds what training needs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from megapipe.assembly.precision import main_dtype, parameter_dtype
from megapipe.comm.channels import Channels, MessageSpec
from megapipe.comm.groups import Group, ProcessGroups, second_communicator
from megapipe.comm.trace import Tracer
from megapipe.data_parallel.buffers import StageBuffers
from megapipe.gpu.kernels import choose_kernels
from megapipe.gpu.libraries import Apex
from megapipe.layers.shape import comm_chunks
from megapipe.model.init import draw
from megapipe.model.stage import GPTStage
from megapipe.pipeline.engine import Engine
from megapipe.pipeline.stage import StageRunner
from megapipe.plan.run_plan import RunPlan
from megapipe.sharding.audit import audit_buffers
from megapipe.sharding.spec import ParamSpec
from megapipe.tensor_parallel.gradient_slot import GradientSlot
from megapipe.tensor_parallel.weight_gradient import WeightQueue

DrawSlice = Callable[[ParamSpec, int, int], Tensor]  # (spec, tp_rank, tp) -> this rank's slice of the initial values


class InferenceRuntime:
    """Stages with their parameters in flat buffers, their channels, and engines that run them forwards: for generation and evaluation.

    groups: this rank's process groups. draw_slice: initial values instead of those drawn from the seed. tracer: records actions; the
    groups carry their own. trains: with main gradients, queues for split backwards, and the versions of the weights the schedule needs.
    """

    def __init__(
        self,
        plan: RunPlan,
        groups: ProcessGroups,
        device: torch.device,
        draw_slice: DrawSlice | None = None,
        tracer: Tracer | None = None,
        *,
        trains: bool = False,
    ) -> None:
        self.plan = plan
        self.groups = groups
        self.device = device
        self.tracer = tracer
        self.coordinates = plan.topology.coordinates(groups.world.global_rank)
        self.parameter_dtype = parameter_dtype(plan.config.precision.dtype)
        self.main_dtype = main_dtype(plan.config.precision.dtype)
        self.kernels = choose_kernels(plan.config, plan.splits_backward)
        outer = self.kernels.optimizer.add_outer if isinstance(self.kernels.optimizer, Apex) else None
        self._slot_factory = partial(GradientSlot, kernel=outer)
        self.stages: dict[int, GPTStage] = {}
        self.runners: dict[int, StageRunner] = {}
        self.buffers: dict[int, StageBuffers] = {}
        held = plan.placement.stages_of(self.coordinates.pp_rank)
        for stage, tp in zip(held, self._tensor_parallel_groups(len(held), trains), strict=True):
            self._add_stage(stage, tp, draw_slice or self._draw, trains)
        self.channels = Channels.build(plan.placement, groups.pp, device, max_in_flight=plan.send_depth)
        self._forward_engines: dict[int, Engine] = {}

    @property
    def is_last_stage(self) -> bool:
        """This rank computes losses."""
        return self.plan.placement.num_stages - 1 in self.stages

    @property
    def reports_loss(self) -> bool:
        """Of all ranks that compute a microbatch's loss, this one is counted."""
        return self.is_last_stage and self.coordinates.tp_rank == 0

    def forward_engine(self, num_microbatches: int) -> Engine:
        """The engine of this rank's forward-only row."""
        if num_microbatches not in self._forward_engines:
            schedule = self.plan.forward_schedule(num_microbatches)
            pp_rank, heartbeat = self.coordinates.pp_rank, self.groups.world.heartbeat
            engine = Engine(schedule, pp_rank, self.runners, self.channels, tracer=self.tracer, heartbeat=heartbeat)
            self._forward_engines[num_microbatches] = engine
        return self._forward_engines[num_microbatches]

    def message(self, boundary: int, seq: int | None = None) -> tuple[MessageSpec, ...]:
        """What crosses a stage boundary: hidden states [s, b, h], [s / tp, b, h] under sequence parallelism. seq: --seq-length if None."""
        model, tp = self.plan.config.model, self.plan.topology.tp
        seq = model.seq_length if seq is None else seq
        length = seq // tp if self.plan.config.parallel.sequence_parallel else seq
        return (
            MessageSpec((length, self.plan.config.training.micro_batch_size, model.hidden_size), self.parameter_dtype),
        )

    def finish_parameters(self) -> None:
        """Return when all parameters are up to date: they always are where nobody updates them."""

    def _tensor_parallel_groups(self, num_stages: int, trains: bool) -> list[Group]:
        """For each stage on this rank. The two stages of an overlapped pair, which compute at one time, have communicators of their own."""
        tp = self.groups.tp
        if trains and num_stages == 2 and tp.size > 1 and self.plan.overlaps_stages:
            return [tp, second_communicator(tp)]
        return [tp] * num_stages

    def _add_stage(self, stage: int, tp_group: Group, draw_slice: DrawSlice, trains: bool) -> None:
        plan, tp_rank, tp = self.plan, self.coordinates.tp_rank, self.plan.topology.tp
        layouts = plan.buffers(stage, tp_rank)
        audit_buffers(plan.stage_specs[stage], layouts, tp_rank, tp)
        queue = WeightQueue() if trains else None
        module = GPTStage(
            plan.config.model,
            plan.partition.stages[stage],
            tp_group,
            sequence_parallel=plan.config.parallel.sequence_parallel,
            recompute=plan.config.recompute,
            loss=plan.config.training,
            weight_queue=queue,
            kernels=self.kernels,
            chunks=comm_chunks(plan.config.parallel),
        )
        num_versions = plan.num_weight_versions(self.coordinates.pp_rank) if trains else 1
        buffers = StageBuffers(
            layouts, self.device, self.parameter_dtype, self.main_dtype if trains else None, num_versions
        )
        lender = self.buffers[0] if plan.borrows_embedding(stage) else None
        buffers.materialize(
            module, lambda spec: draw_slice(spec, tp_rank, tp), self._slot_factory if trains else None, lender
        )
        self.stages[stage], self.buffers[stage], self.runners[stage] = (
            module,
            buffers,
            StageRunner(module, queue, module.begin_row),
        )

    def _draw(self, spec: ParamSpec, tp_rank: int, tp: int) -> Tensor:
        return draw(spec, tp_rank, tp, self.plan.config.training.seed, self.main_dtype)
