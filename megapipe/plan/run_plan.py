"""`RunPlan`: what will happen, for every rank, before anything has been started."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from megapipe.config.resolved import ResolvedConfig
from megapipe.layers.model import ModelSpec, model_spec, stage_parameters
from megapipe.layers.shape import RankShape
from megapipe.plan.batch import BatchSchedule
from megapipe.plan.costs import stage_costs
from megapipe.plan.layer_costs import LayerCosts, flop_costs
from megapipe.plan.measured_layers import measured_costs
from megapipe.plan.shelf import Shelf
from megapipe.schedule.action import Op
from megapipe.schedule.families import SCHEDULES, build_forward_only, build_lowered
from megapipe.schedule.generate.shape import AutoGoal
from megapipe.schedule.head_start import give_head_start
from megapipe.schedule.lifetimes import Slots, assign_slots, num_slots
from megapipe.schedule.partition import Partition
from megapipe.schedule.placement import Placement
from megapipe.schedule.schedule import Schedule
from megapipe.schedule.simulate import Costs, unhindered_send_depth
from megapipe.schedule.validate import validate
from megapipe.schedule.weight_versions import WeightVersions, weight_versions
from megapipe.sharding.buffers import BufferKind, BufferLayout, layout_buffers
from megapipe.sharding.spec import ParamSpec
from megapipe.topology import Topology


@dataclass(frozen=True)
class RunPlan:
    """A resolved configuration on a grid of ranks. Made by `planner.resolve.resolve`; nothing in it needs torch.

    config: no derived field is None any more. specs: all parameters of the model. partition: layers of each stage. schedule_name: the
    pipeline schedule that 'auto' came to. shelf: what it shares with other plans of a search.
    """

    config: ResolvedConfig
    topology: Topology
    placement: Placement
    partition: Partition
    specs: tuple[ParamSpec, ...]
    batch: BatchSchedule
    schedule_name: str
    shelf: Shelf = field(default_factory=Shelf, compare=False, repr=False)

    @cached_property
    def model(self) -> ModelSpec:
        """The parts of the model."""
        return model_spec(self.config.model, self.config.precision)

    @cached_property
    def shape(self) -> RankShape:
        """One microbatch of the run on any of its ranks."""
        config, tp = self.config, self.topology.tp
        return RankShape.of(config, tp, config.parallel.sequence_parallel, config.training.micro_batch_size)

    @property
    def num_chunks(self) -> int:
        """Stages on each pipeline rank; with two directions those of one."""
        return self.placement.num_stages // self.placement.num_ranks

    @cached_property
    def stage_specs(self) -> tuple[tuple[ParamSpec, ...], ...]:
        """The parameters that each stage holds, in model order. A tied embedding is the first stage's where the head lies on its rank."""
        return self._of_parameters.once("stage specs", self._make_stage_specs)

    def _make_stage_specs(self) -> tuple[tuple[ParamSpec, ...], ...]:
        return tuple(
            stage_parameters(
                self.specs,
                range(s.first_layer, s.last_layer_exclusive),
                s.has_embedding,
                s.has_head,
                self.tied_across_ranks,
            )
            for s in self.partition.stages
        )

    @cached_property
    def _of_parameters(self) -> Shelf:
        """What depends on the parameters of stages and how they lie, found by all that decides these."""
        sliced, bucket = self.config.parallel.sequence_parallel, self.config.parallel.ddp_bucket_size
        key = (
            self.config.model,
            self.topology.tp,
            sliced,
            self.partition,
            self.num_optimizer_shards,
            bucket,
            self.tied_kind,
        )
        return self.shelf.once(("parameters", *key), Shelf)

    @cached_property
    def stage_costs(self) -> Costs:
        """Seconds of every op of every stage: measured ones with --pipeline-layer-times, else relative ones from FLOPs."""
        return stage_costs(self.layer_costs, self.partition, self.config.parallel.pipeline_rank_speeds or ())

    @cached_property
    def layer_costs(self) -> LayerCosts:
        """What the parts of the model cost on a rank of speed 1."""
        file = self.config.parallel.pipeline_layer_times
        return self.flop_costs if file is None else measured_costs(Path(file), self.config)

    @property
    def flop_costs(self) -> LayerCosts:
        """The same, from FLOPs."""
        return flop_costs(self.model, self.config.model.seq_length, self.config.recompute)

    @property
    def rank_speeds(self) -> tuple[float, ...]:
        """How fast each pp_rank computes; 1: as the costs say."""
        return self.config.parallel.pipeline_rank_speeds or (1.0,) * self.topology.pp

    def schedule(self, num_microbatches: int) -> Schedule:
        """The lowered training schedule of a step with this many microbatches; made once for each number."""
        return self._made(num_microbatches, training=True)[0]

    def head_start(self, num_microbatches: int) -> tuple[int, ...]:
        """Of each row of `schedule`: the first actions that need no verdict on the step before; none without
        --optimizer-post-validation."""
        return self._made(num_microbatches, training=True)[1]

    def forward_schedule(self, num_microbatches: int) -> Schedule:
        """The lowered forward-only schedule of an evaluation batch."""
        return self._made(num_microbatches, training=False)[0]

    @property
    def is_synchronous(self) -> bool:
        """False for schedules that update weights while microbatches are under way: they train something else than one process would."""
        return SCHEDULES[self.schedule_name].is_synchronous

    @property
    def overlaps_stages(self) -> bool:
        """Rows hold pairs: a forward of one stage beside a backward of the other (DualPipe)."""
        return any(Op.OVERLAP in self.schedule(count).ops for count in self._microbatch_counts)

    @property
    def splits_backward(self) -> bool:
        """The training schedule has I and W instead of B, at least in part."""
        return any(Op.W in self.schedule(count).ops for count in self._microbatch_counts)

    def weight_versions(self, num_microbatches: int, pp_rank: int) -> WeightVersions:
        """Of an asynchronous schedule: which version of the weights each microbatch uses on this rank."""
        rule = SCHEDULES[self.schedule_name].versions
        assert rule is not None, f"{self.schedule_name} has one version of the weights"
        group = (
            self.config.parallel.microbatch_group_size_per_virtual_pipeline_stage or 1
        )  # none: every microbatch by itself
        return weight_versions(self.schedule(num_microbatches), pp_rank, rule, group)

    def num_weight_versions(self, pp_rank: int) -> int:
        """Versions of its weights that a rank holds at once, for every number of microbatches of the run."""
        if self.is_synchronous:
            return 1
        return max(self.weight_versions(count, pp_rank).num_buffers for count in self._microbatch_counts)

    def slots(self, num_microbatches: int, pp_rank: int) -> Slots:
        """Which of its stage's slots each (stage, microbatch) of this rank has: buffers of its own from F to B or W (CUDA graphs)."""
        return assign_slots(self.schedule(num_microbatches).rows[pp_rank])

    def num_slots(self, pp_rank: int) -> dict[int, int]:
        """The slots of each stage of the rank, for every number of microbatches of the run."""
        of_counts = [num_slots(self.slots(count, pp_rank)) for count in self._microbatch_counts]
        return {stage: max(counts[stage] for counts in of_counts) for stage in self.placement.stages_of(pp_rank)}

    @cached_property
    def send_depth(self) -> int:
        """Sends that a channel may have under way: for no number of microbatches of the run does one wait for room, with one to spare."""
        return 1 + max(self._send_depth(m, training) for m in self._microbatch_counts for training in (True, False))

    def _send_depth(self, num_microbatches: int, training: bool) -> int:
        key = "send depth", *self._schedule_key(num_microbatches, training)
        return self.shelf.once(key, lambda: unhindered_send_depth(self._made(num_microbatches, training)[0]))

    @property
    def _microbatch_counts(self) -> set[int]:
        """Of all steps of the run, on one dp rank."""
        return {size // self.batch.samples_per_microbatch for size in self.batch.sizes}

    def crosses_nodes(self, axis: str) -> bool:
        """Some group of this axis has members on several nodes; asked of the topology once."""
        return self.shelf.once(("crosses nodes", self.topology, axis), lambda: self.topology.crosses_nodes(axis))

    @property
    def num_optimizer_shards(self) -> int:
        """Ranks that share the optimizer state of a parameter: its holders with the distributed optimizer, else 1."""
        return self.topology.num_replicas if self.config.parallel.use_distributed_optimizer else 1

    @property
    def tied_across_ranks(self) -> bool:
        """The word embedding is also the output layer, and the two lie on different ranks."""
        return self.tied_kind == "tied"

    @property
    def tied_kind(self) -> BufferKind:
        """How the tied embedding lies: 'plain' within one stage (or untied), 'shared' by two stages of a rank, 'tied' between two ranks.

        On a V the first stage and the last are on one rank, with two directions on each of the two ranks that hold them.
        """
        last = self.placement.num_stages - 1
        if self.config.model.untie_embeddings_and_output_weights or last == 0:
            return "plain"
        return "shared" if last in self.placement.stages_of(self.placement.rank_of_stage[0]) else "tied"

    def borrows_embedding(self, stage: int) -> bool:
        """The stage has the head and computes it with the first stage's embedding, which is on the same rank."""
        return self.tied_kind == "shared" and self.partition.stages[stage].has_head

    def order_of_first_use(self, pp_rank: int) -> tuple[int, ...]:
        """The stages of pp_rank, in the order in which a full step first runs them."""
        row = self.schedule(self.batch.full // self.batch.samples_per_microbatch).rows[pp_rank]
        run = dict.fromkeys(stage for stage, op, _ in row if op is Op.F)
        return (*run, *(stage for stage in self.placement.stages_of(pp_rank) if stage not in run))

    def buffers(self, stage: int, tp_rank: int) -> tuple[BufferLayout, ...]:
        """The flat buffers of a stage on this tp_rank."""
        bucket_size = self.config.parallel.ddp_bucket_size
        assert bucket_size is not None
        specs, t, shards = self.stage_specs[stage], self.topology, self.num_optimizer_shards
        return self._of_parameters.once(
            (stage, tp_rank), lambda: layout_buffers(specs, tp_rank, t.tp, shards, bucket_size, self.tied_kind)
        )

    def _made(self, num_microbatches: int, training: bool) -> tuple[Schedule, tuple[int, ...]]:
        """A lowered schedule, and how far each of its rows may run ahead of the verdict on the step before."""
        make = self._make_training if training else self._make_forward_only
        return self.shelf.once(self._schedule_key(num_microbatches, training), lambda: make(num_microbatches))

    def _schedule_key(self, num_microbatches: int, training: bool) -> tuple[Hashable, ...]:
        """All that a schedule depends on."""
        parallel, limit = self.config.parallel, self.config.parallel.pipeline_memory_limit
        group, ahead = (
            parallel.microbatch_group_size_per_virtual_pipeline_stage,
            self.config.optimizer.optimizer_post_validation,
        )
        costs = None if limit is None else (self.layer_costs, self.rank_speeds, self.partition, limit)
        return self.schedule_name, self.placement, num_microbatches, training, group, self._receive_depth, ahead, costs

    @property
    def _receive_depth(self) -> int:
        parallel = self.config.parallel
        return parallel.pipeline_receive_depth if parallel.overlap_p2p_comm else 1

    def _make_training(self, num_microbatches: int) -> tuple[Schedule, tuple[int, ...]]:
        parallel = self.config.parallel
        group, limit = parallel.microbatch_group_size_per_virtual_pipeline_stage, parallel.pipeline_memory_limit
        has_barrier = not self.config.optimizer.optimizer_post_validation  # else a step ends with a norm over all ranks
        goal = None if limit is None else AutoGoal(self.stage_costs, limit, has_barrier=has_barrier)
        pp, chunks = self.topology.pp, self.num_chunks
        schedule = build_lowered(self.schedule_name, pp, chunks, num_microbatches, group, self._receive_depth, goal)
        if has_barrier:
            return schedule, (0,) * pp
        started = give_head_start(schedule)
        validate(started.schedule)
        return started.schedule, started.lengths

    def _make_forward_only(self, num_microbatches: int) -> tuple[Schedule, tuple[int, ...]]:
        return build_forward_only(self.placement, num_microbatches, self._receive_depth), (0,) * self.topology.pp
