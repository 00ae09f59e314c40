"""The live objects of one rank, built from a RunPlan: `InferenceRuntime` holds stages with parameters and runs them
forwards; `TrainingRuntime` adds optimizer, CUDA graphs, offload and training engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch

from megapipe.assembly.compose import DrawSlice, communicators, compose_stage, parameter_dtype
from megapipe.assembly.microbatches import Keys, Microbatches
from megapipe.checkpoint.shard import TensorBox, tensor_box
from megapipe.comm.channels import Channels, MessageSpec
from megapipe.comm.collectives import gather_objects
from megapipe.comm.groups import ProcessGroups
from megapipe.comm.trace import Tracer
from megapipe.data.batch import Batch
from megapipe.data_parallel.buffers import StageBuffers
from megapipe.data_parallel.stores import Stores
from megapipe.errors import ScheduleError
from megapipe.gpu.kernels import choose_kernels, compiled, why_not_packed
from megapipe.gpu.streams import StageStreams, copies_for
from megapipe.model.context import SharedTables
from megapipe.model.microbatch import Microbatch, SlicedMicrobatches
from megapipe.model.stage import GPTStage
from megapipe.monitor.heartbeat import PATIENCE, Heartbeat
from megapipe.monitor.process import return_large_blocks
from megapipe.optimizer.optimizer import Optimizer
from megapipe.pipeline.deliveries import deliveries_for
from megapipe.pipeline.engine import Around, Before, Context, Engine, Handler, Step, StreamEngine
from megapipe.pipeline.graphs import CapturedStage, CudaRecorder, RankGraphs, StageGraphs
from megapipe.pipeline.offload import Offload
from megapipe.pipeline.parts import part_runners
from megapipe.pipeline.stage import LossFunction, Stage, StageRunner
from megapipe.plan.run_plan import RunPlan
from megapipe.schedule.action import BACKWARD_OPS, Action, Op
from megapipe.schedule.parts import Parts, exchange_digest
from megapipe.schedule.schedule import Schedule
from megapipe.schedule.stream import Stream
from megapipe.sharding.boxes import Box
from megapipe.sharding.sequence import SequencePart
from megapipe.topology import GROUP_NAMES

AnyEngine = TypeVar("AnyEngine", bound=Engine)


class InferenceRuntime:
    """Stages with parameters in flat buffers, channels, and engines that run them forwards, for generation too.

    draw_slice: initial values instead of those drawn from the seed. tracer: records actions; the groups carry their
    own. trains: with main gradients, queues for split backwards, and the weight versions that the schedule needs.
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
        self.plan, self.groups, self.device, self.tracer = plan, groups, device, tracer
        self.heartbeat = groups.world.heartbeat or Heartbeat(GROUP_NAMES)  # a placeholder without a watchdog
        self.coordinates = plan.topology.coordinates(groups.world.global_rank)
        self.parameter_dtype = parameter_dtype(plan.config.precision.dtype)
        # master weights and moments: at least fp32 where --use-precision-aware-optimizer does not narrow them
        self.main_dtype = torch.promote_types(self.parameter_dtype, torch.float32)
        self.kernels = choose_kernels(plan.config, plan.splits_backward)
        self.packs_documents = plan.shape.documents.borders and why_not_packed(plan.config, device) is None
        self.stages: dict[int, GPTStage] = {}
        self.runners: dict[int, StageRunner] = {}
        self.buffers: dict[int, StageBuffers] = {}
        # of every sequence, on this rank
        self.sequence_part = SequencePart(groups.cp.rank, groups.cp.size, plan.slices[0].ends)
        held, tables = plan.placement.stages_of(self.coordinates.pp_rank), SharedTables()
        for stage, own in zip(held, communicators(plan, groups, trains), strict=True):
            lender = self.buffers[0] if plan.borrows_embedding(stage) else None
            self.stages[stage], self.buffers[stage], self.runners[stage] = compose_stage(
                plan,
                groups,
                stage,
                own,
                self.kernels,
                device,
                tables,
                trains=trains,
                draw_slice=draw_slice,
                lender=lender,
            )
        parallel = plan.config.parallel
        self.stores = Stores(
            self.buffers,
            groups,
            plan.order_of_first_use(self.coordinates.pp_rank) if trains else None,
            overlap_gather=parallel.overlap_param_gather,
            overlap_reduce=parallel.overlap_grad_reduce,
            reduce_in_bf16=parallel.grad_reduce_in_bf16,
            tracer=tracer,
        )
        self.handlers: dict[Op, Handler] = {}  # of the engines of this rank
        if plan.sharding is not None:  # rows gather and reduce
            self.handlers = {
                Op.UNSHARD: lambda action: self.stores.unshard(action.stage),
                Op.RESHARD: lambda action: self.stores.reshard(action.stage),
            }
        self.channels = Channels.build(plan.placement, groups.pp, device, max_in_flight=plan.send_depth)
        self._forward_engines: dict[tuple[int, int], Engine] = {}

    @property
    def num_ahead(self) -> int:
        """Modules of multi-token prediction on this rank."""
        return sum(len(module.mtp.layers) for module in self.stages.values() if module.mtp is not None)

    def forward_engine(self, num_microbatches: int, num_slices: int = 1) -> Engine:
        """Return the engine of this rank's forward-only row."""
        key = num_microbatches, num_slices
        if key not in self._forward_engines:
            schedule = self.plan.forward_schedule(*key)
            self._forward_engines[key] = self._engine(Engine, schedule, self.around(schedule))
        return self._forward_engines[key]

    def _engine(
        self,
        kind: Callable[..., AnyEngine],
        schedule: Schedule | Stream,
        around: Sequence[Around],
        handlers: Mapping[Op, Handler] | None = None,
        runners: Mapping[int, Stage] | None = None,
        **more: Any,
    ) -> AnyEngine:
        """Return an engine of this rank's row. handlers, runners: instead of this rank's. more: its other arguments."""
        return kind(
            schedule,
            self.coordinates.pp_rank,
            self.runners if runners is None else runners,
            self.channels,
            self.handlers if handlers is None else handlers,
            around,
            self.tracer,
            self.groups.world.heartbeat,
            **more,
        )

    def around(self, schedule: Schedule, parts: Parts | None = None) -> list[Around]:
        """Return what surrounds the actions of this rank's row: with sharded gradients, memory for them and waits for
        weights. parts: of a schedule of parts.
        """
        if self.plan.sharding is None:
            return []
        row, stores = schedule.rows[self.coordinates.pp_rank], self.stores

        def needed(action: Action) -> Context | None:
            # both halves of a pair before their streams
            slot = row.index(action) + 1 if action.op is Op.OVERLAP else 0
            calls: list[Callable[[], None]] = []
            for each in reversed(row[slot : slot + 2] if slot else (action,)):
                stage = each.stage if parts is None else parts.sites[each.stage].stage
                if each.op in BACKWARD_OPS:
                    calls.append(partial(stores.accumulate, stage))
                if schedule.reads_weights(each):
                    calls.append(partial(stores.use, stage))
            return partial(Before, *calls) if calls else None

        return [Around(needed)]

    def step(self, microbatches: Sequence[Microbatch], loss: LossFunction, trains: bool) -> Step:
        """Return the engine's inputs for whole microbatches, which are cut into slices where the plan has them."""
        slices = self.plan.slices
        if len(slices) == 1:
            return Step(microbatches, self.message, loss)
        sliced = SlicedMicrobatches(microbatches, slices, trains)
        return Step(sliced, lambda boundary, number: self.message(boundary, slices[number].length), loss)

    def microbatches(self, count: int, read: Callable[[int], Batch], step: int | None) -> Microbatches:
        """Return this rank's microbatches of a step. read: microbatch number -> Batch. step: None without dropout."""
        topology, dp_rank = self.plan.topology, self.coordinates.dp_rank
        keys = None if step is None else Keys(self.plan.config.training.seed, step, dp_rank, topology.dp)
        return Microbatches(count, read, keys, self.device, self.sequence_part, self.packs_documents, self.num_ahead)

    def message(self, boundary: int, seq: int | None = None) -> tuple[MessageSpec, ...]:
        """Return what crosses a stage boundary: hidden states [s / cp, b, h]; [s / cp / tp, b, h] with sequence
        parallelism.

        seq: --seq-length if None, or the length of a slice.
        """
        config = self.plan.config
        length = (config.model.seq_length if seq is None else seq) // self.plan.topology.cp
        if config.parallel.sequence_parallel:
            length //= self.plan.topology.tp
        shape = length, config.training.micro_batch_size, config.model.hidden_size
        return (MessageSpec(shape, self.parameter_dtype),)

    def held_weights(self, key: str = "weights", only_frozen: bool = False) -> Iterator[tuple[bool, TensorBox]]:
        """Yield every piece of a parameter on this rank but vocabulary padding, as a box named `key`/parameter, and the
        states. only_frozen: of parameters those that are not trained.

        The flag is True if, of all ranks that hold the piece, this one writes it to a checkpoint.
        """
        for stage, stage_buffers in self.buffers.items():
            for buffer in stage_buffers.buffers:
                if only_frozen and buffer.layout.trainable:
                    continue
                is_copy, sharing = buffer.layout.kind == "tied" and stage != 0, buffer.sharing
                # of the ranks that keep the same weights: whole ones, or with level 3 a shard
                is_first = sharing.counts_shards and (sharing.level == 3 or sharing.shards.rank == 0)
                for bucket in buffer.layout.buckets:
                    start, held = buffer.held_parameters(bucket)
                    for position, piece in buffer.pieces(bucket, start, start + held.numel()):
                        box = tensor_box(key, piece, held[position - start :][: piece.box.num_elements])
                        if box is not None:
                            yield piece.owned and not is_copy and is_first, box

        yield from self.held_states(key)

    def held_states(self, key: str = "weights") -> Iterator[tuple[bool, TensorBox]]:
        """Yield the tensors of `trace.parameters.model_states` on this rank, as `held_weights` does parameters."""
        is_first = self.groups.replicas.rank == 0 and self.groups.tp.rank == 0
        for module in self.stages.values():
            for name, values in module.named_buffers():
                shape = tuple(values.shape)
                yield is_first, TensorBox(f"{key}/{name}", shape, Box((0,) * len(shape), shape), values)


class Updates(NamedTuple):
    """The hooks by which weights are updated while a row runs (`train.stream`)."""

    around: Callable[[Action], Context | None]  # a computation: installs its version of the weights
    handlers: Mapping[Op, Handler]


class TrainingRuntime(InferenceRuntime):
    """An InferenceRuntime with optimizer and training engines.

    marks: context managers opened around every action under its text form, for profilers. recorder: records the graphs
    of --cuda-graph-impl local (CUDA graphs if None).
    """

    def __init__(
        self,
        plan: RunPlan,
        groups: ProcessGroups,
        device: torch.device,
        draw_slice: DrawSlice | None = None,
        tracer: Tracer | None = None,
        marks: Callable[[str], AbstractContextManager[Any]] | None = None,
        recorder: CudaRecorder | None = None,
    ) -> None:
        if plan.sharding is not None and device.type == "cpu":  # what sharded buffers free is to leave the process
            return_large_blocks()
        super().__init__(plan, groups, device, draw_slice, tracer, trains=True)
        for stage, module in self.stages.items():
            self.stores.wait_inside(stage, module, module.parts())
        self.optimizer = Optimizer(
            self.stores,
            groups,
            plan.config.optimizer,
            plan.config.precision,
            self.kernels.optimizer,
            compiled if self.kernels.compiles_update else None,
        )
        for module in self.stages.values():
            for router in module.routers().values():
                router.loss_scale = lambda: self.optimizer.loss_scale
        self._stage_streams = StageStreams(self.stages, device) if device.type == "cuda" else None
        self.handlers[Op.REDUCE_GRAD] = self._reduce
        self.handlers[Op.RECOMPUTE] = self._recompute
        self.graphs = None if plan.config.gpu.cuda_graph_impl == "none" else self._build_graphs(recorder)
        self.marks = marks
        self.offload: Offload | None = None  # moves activations to the host and back
        if plan.offloaded:
            self.offload = Offload(copies_for(device), plan.config.offload.min_offloaded_tensor_size)
            self.handlers |= {Op.OFFLOAD: self.offload.release, Op.RELOAD: self.offload.load}
            for stage in plan.offloaded & self.stages.keys():
                self.stages[stage].group_runner = self.offload.run
                self.runners[stage].releases_inputs = True
        self._engines: dict[int, Engine] = {}

    def engine(self, num_microbatches: int) -> Engine:
        """Return the engine of this rank's row for a step of this many microbatches."""
        if num_microbatches not in self._engines:
            make = self.stage_engine if self.plan.parts is None else partial(self._part_engine, self.plan.parts)
            self._engines[num_microbatches] = make(num_microbatches)
        return self._engines[num_microbatches]

    def stage_engine(self, num_microbatches: int) -> Engine:
        """Return a new engine of this rank's row, which runs its stages as a whole."""
        plan, pp_rank = self.plan, self.coordinates.pp_rank
        schedule = plan.schedule(num_microbatches)
        runners: Mapping[int, Stage] = self.runners
        if self.graphs is not None:
            slots = plan.slots(num_microbatches, pp_rank)
            runners = {
                stage: CapturedStage(captured, {m: slot for (number, m), slot in slots.items() if number == stage})
                for stage, captured in self.graphs.stages.items()
            }
        streams = self._stage_streams if Op.OVERLAP in schedule.ops else None
        around, handlers = self._marked(schedule.text), dict(self.handlers)
        if streams is not None:
            around.append(Around.computing(lambda action: streams.computing(action.stage)))
            handlers[Op.OVERLAP] = lambda action: streams.begin_pair()
        if self.offload is not None:
            around.append(self.offload.around(schedule.rows[pp_rank]))
        around += self.around(schedule)
        return self._engine(Engine, schedule, around, handlers, runners, streams=streams)

    def stream_engine(self, num_microbatches: int, updates: Updates) -> StreamEngine:
        """Return a new engine of this rank's row of an asynchronous schedule, for steps of this many microbatches."""
        stream = self.plan.stream(num_microbatches)
        around = [*self._marked(stream.alone.text), Around(updates.around)]
        return self._engine(StreamEngine, stream, around, updates.handlers)

    def _part_engine(self, parts: Parts, num_microbatches: int) -> Engine:
        """Build the engine of this rank's row of parts. A collective over ep, which compares the rows."""
        pp_rank, schedule = self.coordinates.pp_rank, self.plan.part_schedule(num_microbatches)
        ep = self.groups.ep
        digests = gather_objects(exchange_digest(schedule.rows[pp_rank], parts), ep)
        if len(set(digests)) > 1:
            ranks = ", ".join(f"{rank}: {found}" for rank, found in zip(ep.ranks, digests, strict=True))
            raise ScheduleError(
                f"the ranks of an expert-parallel group would issue different all-to-alls (rank: digest {ranks}); "
                "start all ranks with the same version and the same flags"
            )
        runners: dict[int, Stage] = {}
        for stage, module in self.stages.items():
            runners |= part_runners(parts, stage, module, self.runners[stage], Op.RESHARD in schedule.ops)
        around = [*self._marked(parts.text), *self.around(schedule, parts)]
        deliveries = deliveries_for(self.device, self.groups.world.heartbeat)
        return self._engine(Engine, schedule, around, runners=runners, parts=parts, deliveries=deliveries)

    def _marked(self, text: Callable[[Action], str]) -> list[Around]:
        """Return the marks of a profiler around every action, named by its text."""
        marks = self.marks
        return [] if marks is None else [Around(lambda action: partial(marks, text(action)))]

    def _recompute(self, action: Action) -> None:
        assert action.microbatch is not None
        self.runners[action.stage].recompute(action.microbatch)

    def _reduce(self, action: Action) -> None:
        """Reduce the gradients of a stage, of which more follow in the step if the action has a microbatch."""
        if action.microbatch is None:
            self.stores.reduce(action.stage)
        else:
            self.stores.reduce_part(action.stage)

    def _build_graphs(self, recorder: CudaRecorder | None) -> RankGraphs:
        return RankGraphs(
            {stage: self._stage_graphs(stage) for stage in self.stages},
            self.plan.num_slots(self.coordinates.pp_rank),
            self.plan.placement.num_stages - 1,
            self.plan.config.gpu.cuda_graph_warmup_steps,
            self.device,
            recorder or CudaRecorder(),
            settle=self.stores.finish_weights,
            # a dropout key differs for each microbatch and is no tensor: graphs are recorded without one
            example=partial(replace, dropout_key=None),
            during=partial(self.heartbeat.phase, "recording graphs", PATIENCE),
        )

    def _stage_graphs(self, stage: int) -> StageGraphs:
        module, buffers = self.stages[stage], self.buffers[stage]

        def prepare() -> None:
            self.stores.wait(stage)
            if self.plan.borrows_embedding(stage):
                self.stores.wait(0)
            module.cast_weights()

        return StageGraphs(
            stage,
            self.runners[stage],
            lambda: [*module.parameters(), *(buffer.gradients for buffer in buffers.trained)],
            prepare,
            self.plan.splits_backward,
        )
