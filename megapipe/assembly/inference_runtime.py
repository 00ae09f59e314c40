"""`InferenceRuntime`: the stages of one rank with their parameters, and the engines that run them forwards.
`TrainingRuntime` adds what training needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from megapipe.checkpoint.folder import CheckpointFolder
from megapipe.checkpoint.load import load_tensors
from megapipe.checkpoint.tensor_box import TensorBox, tensor_box
from megapipe.comm.channels import Channels, MessageSpec
from megapipe.comm.groups import Group, ProcessGroups, second_communicator
from megapipe.comm.trace import Tracer
from megapipe.data_parallel.buffers import StageBuffers
from megapipe.dtypes import DTYPES
from megapipe.gpu.kernels import choose_kernels
from megapipe.gpu.libraries import Apex
from megapipe.layers.shape import comm_chunks
from megapipe.model.init import draw
from megapipe.model.stage import GPTStage
from megapipe.monitor.heartbeat import Heartbeat
from megapipe.pipeline.engine import Engine
from megapipe.pipeline.stage import StageRunner
from megapipe.plan.run_plan import RunPlan
from megapipe.sharding.audit import audit_buffers
from megapipe.sharding.boxes import pieces
from megapipe.sharding.spec import ParamSpec
from megapipe.tensor_parallel.gradient_slot import GradientSlot
from megapipe.tensor_parallel.weight_gradient import WeightQueue
from megapipe.topology import GROUP_NAMES

DrawSlice = Callable[[ParamSpec, int, int], Tensor]  # (spec, tp_rank, tp) -> this rank's slice of the initial values


def parameter_dtype(name: str) -> torch.dtype:
    """Return the dtype of weights, activations and pipeline messages for a name in the configuration."""
    found: torch.dtype = getattr(torch, DTYPES[name].torch_name)
    return found


class InferenceRuntime:
    """Stages with their parameters in flat buffers, their channels, and engines that run them forwards: for generation
    and evaluation.

    groups: this rank's process groups. draw_slice: initial values instead of those drawn from the seed. tracer: records
    actions; the groups carry their own. trains: with main gradients, queues for split backwards, and the weight
    versions that the schedule needs.
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
        self.heartbeat = groups.world.heartbeat or Heartbeat(GROUP_NAMES)  # a placeholder without a watchdog
        self.coordinates = plan.topology.coordinates(groups.world.global_rank)
        self.parameter_dtype = parameter_dtype(plan.config.precision.dtype)
        # main gradients, master weights and moments: at least fp32
        self.main_dtype = torch.promote_types(self.parameter_dtype, torch.float32)
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
        """True if this rank computes losses."""
        return self.plan.placement.num_stages - 1 in self.stages

    @property
    def reports_loss(self) -> bool:
        """True on the one rank, of all that compute a microbatch's loss, whose report is counted."""
        return self.is_last_stage and self.coordinates.tp_rank == 0

    def forward_engine(self, num_microbatches: int) -> Engine:
        """Return the engine of this rank's forward-only row."""
        if num_microbatches not in self._forward_engines:
            schedule = self.plan.forward_schedule(num_microbatches)
            pp_rank, heartbeat = self.coordinates.pp_rank, self.groups.world.heartbeat
            engine = Engine(schedule, pp_rank, self.runners, self.channels, tracer=self.tracer, heartbeat=heartbeat)
            self._forward_engines[num_microbatches] = engine
        return self._forward_engines[num_microbatches]

    def message(self, boundary: int, seq: int | None = None) -> tuple[MessageSpec, ...]:
        """Return what crosses a stage boundary: hidden states [s, b, h], or [s / tp, b, h] with sequence parallelism.

        seq: --seq-length if None.
        """
        model, tp = self.plan.config.model, self.plan.topology.tp
        seq = model.seq_length if seq is None else seq
        length = seq // tp if self.plan.config.parallel.sequence_parallel else seq
        return (
            MessageSpec((length, self.plan.config.training.micro_batch_size, model.hidden_size), self.parameter_dtype),
        )

    def finish_parameters(self) -> None:
        """Return when all parameters are up to date: at once, as inference does not update them."""

    def held_weights(self, key: str = "weights") -> Iterator[tuple[bool, TensorBox]]:
        """Yield every piece of a parameter on this rank but vocabulary padding, as a box named `key`/parameter.

        The flag is True if, of all ranks that hold the piece, this one writes it to a checkpoint.
        """
        for stage, stage_buffers in self.buffers.items():
            for buffer in stage_buffers.buffers:
                is_copy = buffer.layout.kind == "tied" and stage != 0
                for slot in buffer.layout.slots:
                    for piece in pieces(slot.spec, self.groups.tp.rank, self.groups.tp.size):
                        values = buffer.parameters[slot.start + piece.start : slot.start + piece.stop]
                        box = tensor_box(key, piece, values)
                        if box is not None:
                            yield piece.owned and not is_copy and self.groups.replicas.rank == 0, box

    def load_weights(self, folder: CheckpointFolder) -> int:
        """Fill the parameters from a checkpoint of any grid; called by all ranks. Returns the bytes filled on this
        rank.

        Takes the master weights where the checkpoint holds them, rounded to the parameters' dtype as the optimizer
        rounds them. Vocabulary padding becomes zero. Raises CheckpointError on all ranks.
        """
        key = "master" if folder.manifest.holds("master") else "weights"
        for stage_buffers in self.buffers.values():
            for buffer in stage_buffers.buffers:
                buffer.parameters.zero_()
        return load_tensors(folder, (box for _, box in self.held_weights(key)), self.groups.world, may_round=True)

    def _tensor_parallel_groups(self, num_stages: int, trains: bool) -> list[Group]:
        """Return the tp group of each stage on this rank.

        The two stages of an overlapped pair compute at the same time, so each has its own communicators.
        """
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
        self.stages[stage] = module
        self.buffers[stage] = buffers
        self.runners[stage] = StageRunner(module, queue, module.begin_row)

    def _draw(self, spec: ParamSpec, tp_rank: int, tp: int) -> Tensor:
        return draw(spec, tp_rank, tp, self.plan.config.training.seed, self.main_dtype)
