"""`RunPlan`: the grid, stages, parameters, buffers and schedules of every rank, before anything is started."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from megapipe.config.config import ResolvedConfig, ResolvedModelConfig
from megapipe.config.parallel import SHARDED_GRADS, SHARDED_PARAMS, RecomputeConfig
from megapipe.config.rules.context import slice_unit
from megapipe.config.training import OPTIMIZERS
from megapipe.layers.model import LayerSpec, ModelSpec, model_spec, rank_shape, stage_parameters
from megapipe.layers.table import RankShape
from megapipe.plan.activations import group_sizes, layers_of, reads_weights_in_w
from megapipe.plan.batch import BatchSchedule
from megapipe.plan.expert_load import BALANCED, ExpertLoad, with_load
from megapipe.plan.layer_costs import LayerCosts, flop_costs, measured_costs, sequence_slices, slice_shares, stage_costs
from megapipe.plan.recompute_choice import layer_recompute
from megapipe.registry import BUILT_IN
from megapipe.schedule.action import Op
from megapipe.schedule.costs import AutoGoal, Costs
from megapipe.schedule.families import SCHEDULES, ScheduleFamily, build_forward_only, build_schedule, build_stream
from megapipe.schedule.lifetimes import Slots, assign_slots, num_slots
from megapipe.schedule.lower import lower
from megapipe.schedule.offload import offload
from megapipe.schedule.partition import Partition, from_counts
from megapipe.schedule.parts import Parts, expand, pair_up, parts_of, prove
from megapipe.schedule.placement import Placement, v_shape
from megapipe.schedule.recompute import replay_ahead
from megapipe.schedule.schedule import Schedule
from megapipe.schedule.sharding import (
    ShardingPolicy,
    carry,
    divided,
    joined_units,
    shard,
    split_placement,
    split_stages,
)
from megapipe.schedule.simulate import unhindered_send_depth
from megapipe.schedule.stream import Stream, WeightVersions, weight_versions
from megapipe.schedule.validate import validate
from megapipe.sharding.buffers import BufferKind, BufferLayout, layout_buffers
from megapipe.sharding.sequence import SequenceSlice
from megapipe.sharding.spec import ParamSpec
from megapipe.sharding.state_dtypes import StateDtypes, state_dtypes
from megapipe.topology import Topology
from megapipe.trace.parameters import model_parameters

SCHEDULES_CACHED = 512  # a search has some hundreds of plans, which share most of their schedules


@dataclass(frozen=True, eq=False)
class LoweredSchedule:
    """The schedule of one number of microbatches."""

    schedule: Schedule
    num_units: tuple[int, ...] = ()  # as in `RunPlan`

    @cached_property
    def send_depth(self) -> int:
        """The fewest in-flight sends of a channel with which no send blocks."""
        return unhindered_send_depth(self.schedule, self.num_units)


def decisive_counts(
    family: ScheduleFamily, pp: int, group_size: int | None, counts: Iterable[int], num_slices: int = 1
) -> dict[int, int]:
    """Return numbers of microbatches -> the most of `counts` whose step is like theirs in memory and in-flight sends.

    No step of `counts` exceeds them all, so that a plan needs no schedule of other sizes of a ramp. More microbatches
    never need less, with three exceptions: where microbatches run in groups, this holds only for whole groups more; a
    step that does not fill a V may need more than a longer one; and zb-auto searches for each number. From some number
    on, `period` more microbatches only repeat the middle of every row: the smallest such number stands for the others.
    Of microbatches with slices, fewer fill the groups and the V. Nothing of this is known of an extension's family.
    """
    numbers = sorted(counts)
    if SCHEDULES.origin(family.name) != BUILT_IN:
        return dict(zip(numbers, numbers, strict=True))
    full, start, period = numbers[-1], numbers[-1] + 1, 1
    if family.takes_group_size or family.in_turns:
        group = group_size or pp
        start, period = -(-4 * group // num_slices), group // math.gcd(group, num_slices)
        numbers = list({count % period: count for count in numbers}.values())
    elif family.placement is v_shape and family.counts is None:
        start, period = -(-(2 * pp + 1 + num_slices) // num_slices), 1
    elif not family.is_automatic:
        return {full: full}
    alike = {count: count if count < start else start + (count - start) % period for count in numbers}
    found = {alike[count]: count for count in numbers if alike[count] != alike[full]}
    return found | {full: full}


class BufferOptions(NamedTuple):
    """The arguments of `layout_buffers` after the parameters and the tp_rank."""

    tp: int
    num_shards: int
    bucket_size: int
    tied_kind: BufferKind
    num_expert_ranks: int
    num_expert_shards: int
    matrices_apart: bool  # in buckets, for --optimizer muon


@dataclass(frozen=True, eq=False)
class ParameterLayout:
    """The parameters of every stage, and what decides on their layout in flat buffers."""

    model: ResolvedModelConfig
    sequence_parallel: bool
    partition: Partition
    etp: int
    freeze: tuple[str, ...]
    options: BufferOptions

    @cached_property
    def stages(self) -> tuple[tuple[ParamSpec, ...], ...]:
        """The parameters of every stage, in model order."""
        specs = model_parameters(self.model, self.sequence_parallel, self.etp, self.freeze)
        has_copy = self.options.tied_kind == "tied"
        return tuple(
            stage_parameters(specs, range(first, end), has_embedding, has_head, has_tied_copy=has_copy)
            for first, end, has_embedding, has_head in self.partition.stages
        )


_parameter_layout = lru_cache(maxsize=SCHEDULES_CACHED)(ParameterLayout)


@lru_cache(maxsize=SCHEDULES_CACHED)
def _with_recompute(layer: LayerSpec, recompute: RecomputeConfig) -> LayerSpec:  # alike layers are one object
    return replace(layer, recompute=recompute)


@dataclass(frozen=True)
class RunPlan:
    """A resolved configuration on a grid of ranks, made by `plan.resolve.resolve`."""

    config: ResolvedConfig
    topology: Topology
    placement: Placement
    partition: Partition  # the layers of each stage
    specs: tuple[ParamSpec, ...] = field(compare=False, repr=False)  # all parameters of the model
    batch: BatchSchedule
    schedule_name: str  # 'auto' resolved
    # units into which each stage of the schedule is split (`in_units`); placement and partition are then those of the
    # units, which are what everything else calls stages. Empty: stages are not split
    num_units: tuple[int, ...] = ()
    offloaded: frozenset[int] = frozenset()  # units whose activations are offloaded
    expert_load: ExpertLoad = BALANCED  # for which memory and time are given; a run itself plans for balanced routing

    @cached_property
    def model(self) -> ModelSpec:
        """The parts of the model."""
        config = self.config
        frozen = frozenset(spec.name for spec in self.specs if not spec.trainable)
        model = model_spec(config.model, config.precision, config.parallel.cp_comm_type, frozen)
        if self.expert_load != BALANCED:
            model = with_load(model, self.expert_load.of(self.config.model, self.topology.ep))
        return self._with_own_recompute(model) if self.num_units and self.recompute_differs else model

    @property
    def recompute_differs(self) -> bool:
        """True if what a layer recomputes depends on its place in its stage."""
        recompute = self.config.recompute
        return recompute.recompute_method == "block" or recompute.recompute_memory_budget is not None

    def _with_own_recompute(self, model: ModelSpec) -> ModelSpec:
        """Return the model with the recompute that each layer has in its whole stage."""
        whole = self.whole_stages()
        chosen = (each for stage in range(whole.placement.num_stages) for each in whole.layer_recompute(stage))
        return replace(model, layers=tuple(map(_with_recompute, model.layers, chosen)))

    @property
    def expert_imbalance(self) -> float:
        """Rows of the fullest expert-parallel rank over the mean, in the layer where they are the most."""
        layers = (*self.model.kinds, *self.model.predictions)
        return max((layer.imbalance for layer in layers if layer.num_experts), default=1.0)

    @cached_property
    def shape(self) -> RankShape:
        """One microbatch of the run on any of its ranks."""
        config, tp = self.config, self.topology.tp
        shape = rank_shape(config, tp, config.parallel.sequence_parallel, config.training.micro_batch_size)
        return replace(shape, ep_inner=self.topology.ep_inner)

    @cached_property
    def slices(self) -> tuple[SequenceSlice, ...]:
        """The slices of every sequence in the order of their positions; one without --pipe-sp-splits."""
        parallel, seq = self.config.parallel, self.config.model.seq_length
        cut = parallel.pipe_sp_splits, parallel.pipe_sp_strategy
        return sequence_slices(self.model, self.config.recompute, seq, *cut, slice_unit(self.config))

    @property
    def num_slices(self) -> int:
        """Number of slices of every microbatch (--pipe-sp-splits)."""
        return self.config.parallel.pipe_sp_splits

    @cached_property
    def slice_shapes(self) -> tuple[RankShape, ...]:
        """The slices of one microbatch on any rank; `shape` alone without --pipe-sp-splits."""
        if self.num_slices == 1:
            return (self.shape,)
        return tuple(replace(self.shape, seq=each.length // self.topology.cp, slice=each) for each in self.slices)

    @property
    def message_bytes(self) -> int:
        """Bytes of one activation or gradient from a stage to its neighbour."""
        return self.shape.hidden_bytes(self.config.model.hidden_size)

    @property
    def num_chunks(self) -> int:
        """Number of stages on each pipeline rank, before they are split; with two directions, of one direction."""
        return (len(self.num_units) or self.placement.num_stages) // self.placement.num_ranks

    @property
    def sharding(self) -> ShardingPolicy | None:
        """When weights are gathered and gradients reduced within a step; None without sharded gradients."""
        parallel = self.config.parallel
        strategy, granularity = parallel.data_parallel_sharding_strategy, parallel.data_parallel_sharding_granularity
        if strategy not in SHARDED_GRADS:
            return None
        return ShardingPolicy(strategy == SHARDED_PARAMS, granularity, parallel.data_parallel_sharding_prefetch)

    def whole_stages(self) -> RunPlan:
        """Return the plan without units."""
        if not self.num_units:
            return self
        placement, partition = joined_units(self.placement, self.partition, self.num_units)
        return replace(self, placement=placement, partition=partition, num_units=(), offloaded=frozenset())

    def in_units(self) -> RunPlan:
        """Return the plan with its stages, which are whole, split into units: into those of sharded weights and then of
        each its offloaded groups of layers, one by one, and the rest.
        """
        wanted, count = self.config.parallel.data_parallel_sharding_units, self.config.offload.cpu_offloading_num_layers
        if wanted == 1 and not count:
            return self
        counts, num_units, offloaded = list[int](), list[int](), set[int]()
        for stage in self.partition.stages:
            before = len(counts)
            for num_layers in divided(stage.num_layers, wanted):
                moved = offloaded_groups(self.config, num_layers)
                offloaded.update(range(len(counts), len(counts) + len(moved)))
                rest = num_layers - sum(moved)
                counts += [*moved, rest] if rest or not moved else moved
            if stage.has_head and len(counts) - 1 in offloaded:
                counts.append(0)
            num_units.append(len(counts) - before)
        partition = from_counts(counts, self.partition.num_layers)
        plan = replace(self, placement=split_placement(self.placement, num_units), partition=partition)
        return replace(plan, num_units=tuple(num_units), offloaded=frozenset(offloaded))

    @property
    def stage_specs(self) -> tuple[tuple[ParamSpec, ...], ...]:
        """The parameters of each stage, in model order; a tied embedding's only once if both ends are on one rank."""
        return self._parameter_layout.stages

    @cached_property
    def _parameter_layout(self) -> ParameterLayout:
        parallel, t = self.config.parallel, self.topology
        options = BufferOptions(
            t.tp,
            self.num_optimizer_shards,
            parallel.ddp_bucket_size,
            self.tied_kind,
            t.ep * t.etp,
            t.sharing(True)[0] if parallel.use_distributed_optimizer else 1,
            OPTIMIZERS[self.config.optimizer.optimizer].matrix_states is not None,
        )
        freeze = self.config.optimizer.freeze
        return _parameter_layout(self.config.model, parallel.sequence_parallel, self.partition, t.etp, freeze, options)

    def buffers(self, stage: int, tp_rank: int) -> tuple[BufferLayout, ...]:
        """Return the flat buffers of a stage on this tp_rank."""
        return _stage_buffers(self._parameter_layout, stage, tp_rank)

    def trained_buffers(self, stages: Iterable[int]) -> tuple[BufferLayout, ...]:
        """Return the buffers of these stages that have gradients; they are of equal size on all tp_ranks."""
        return tuple(layout for stage in stages for layout in self.buffers(stage, 0) if layout.trainable)

    @property
    def active_parameters(self) -> int:
        """Parameters that a token goes through: all but those of the experts that did not choose it."""
        count, topk = self.config.model.num_experts or 1, self.config.model.moe_router_topk
        of_experts = sum(spec.num_elements for spec in self.specs if spec.is_expert)
        return sum(spec.num_elements for spec in self.specs) - of_experts * (count - topk) // count

    def num_elements(self, stages: Iterable[int]) -> int:
        """Return the parameters of these stages on one rank, padding of the buffers included."""
        return sum(layout.numel for stage in stages for layout in self.buffers(stage, 0))

    def elements_by_kind(self, stages: Iterable[int]) -> Counter[bool]:
        """Return the trained parameters of these stages on one rank, padding included: False dense ones, True of
        experts.
        """
        held: Counter[bool] = Counter()
        for layout in self.trained_buffers(stages):
            held[layout.is_expert] += layout.numel
        return held

    def shard_elements(self, stages: Iterable[int]) -> dict[bool, int]:
        """Return the parameters of these stages whose optimizer state is on one rank, padding included: True for
        buckets of matrices that the update rule treats as such, False for all others.
        """
        total = {False: 0, True: 0}
        for layout in self.trained_buffers(stages):
            for bucket in layout.buckets:
                is_apart = self._parameter_layout.options.matrices_apart and bucket.has_matrices
                total[is_apart] += (bucket.stop - bucket.start) // layout.num_shards
        return total

    @property
    def state_dtypes(self) -> StateDtypes:
        """The dtypes of main gradients, masters and moments."""
        return state_dtypes(self.config.optimizer, self.config.precision, changes_in_flight=not self.is_synchronous)

    @cached_property
    def stage_costs(self) -> Costs:
        """Seconds of every op of every stage, measured (--pipeline-layer-times) or relative from FLOPs."""
        costs = stage_costs(self.layer_costs, self.partition, self.config.parallel.pipeline_rank_speeds or ())
        return costs if self.num_slices == 1 else replace(costs, slice_shares=self.slice_shares)

    @property
    def slice_shares(self) -> Mapping[tuple[int, Op], tuple[float, ...]]:
        """The share of each slice in the costs of every stage."""
        return slice_shares(self.model, self.partition, self.config.recompute, self.slices)

    @cached_property
    def layer_costs(self) -> LayerCosts:
        """Costs of the parts of the model on a rank of speed 1."""
        file = self.config.parallel.pipeline_layer_times
        return self.flop_costs if file is None else self._budgeted(measured_costs(Path(file), self.config))

    @property
    def flop_costs(self) -> LayerCosts:
        """Costs of the parts of the model from FLOPs."""
        return self._budgeted(flop_costs(self.model, self.config.model.seq_length, self.config.recompute))

    def _budgeted(self, costs: LayerCosts) -> LayerCosts:
        """Return costs that know what each layer recomputes, where a stage alone does not say it."""
        has_budget = self.config.recompute.recompute_memory_budget is not None
        has_own = has_budget or (self.num_units and self.recompute_differs)
        return replace(costs, specs=self.model.layers, shape=self.shape) if has_own else costs

    def layer_recompute(self, stage: int) -> tuple[RecomputeConfig, ...]:
        """Return the recompute of each layer of a stage."""
        return layer_recompute(layers_of(self.model, self.partition.stages[stage]), self.shape)

    @property
    def rank_speeds(self) -> tuple[float, ...]:
        """Relative speed of each pp_rank; 1 is the speed of the costs."""
        return self.config.parallel.pipeline_rank_speeds or (1.0,) * self.topology.pp

    def schedule(self, num_microbatches: int) -> Schedule:
        """Return the lowered training schedule of a step with this many microbatches; of an asynchronous schedule that
        of a step which fills and drains the pipeline, see `stream`.
        """
        return self._training(num_microbatches).schedule

    def stream(self, num_microbatches: int) -> Stream:
        """Return the stream of an asynchronous schedule, with this many microbatches in each step."""
        return _stream(self.schedule_name, self.topology.pp, num_microbatches, self._receive_depth)

    @cached_property
    def parts(self) -> Parts | None:
        """The parts in which stages run (--overlap-moe-expert-parallel-comm); None: stages run as a whole."""
        if not self.config.parallel.overlap_moe_expert_parallel_comm:
            return None
        return parts_of(self.partition, [layer.num_experts > 0 for layer in self.model.layers])

    def part_schedule(self, num_microbatches: int) -> Schedule:
        """Return the lowered schedule of `parts` of a step: that of `schedule`, with the parts of pairs merged."""
        return self._in_parts(num_microbatches).schedule

    def forward_schedule(self, num_microbatches: int, num_slices: int = 1) -> Schedule:
        """Return the lowered forward-only schedule of an evaluation batch."""
        return self._forward_only(num_microbatches, num_slices).schedule

    @property
    def is_synchronous(self) -> bool:
        """False for schedules that update weights while microbatches are in flight, unlike one process."""
        return SCHEDULES[self.schedule_name].is_synchronous

    @property
    def splits_backward(self) -> bool:
        """True if the training schedule has I and W instead of B, at least in part."""
        return SCHEDULES[self.schedule_name].splits_backward

    def weight_versions(self, num_microbatches: int, pp_rank: int) -> WeightVersions:
        """Return the versions of the weights that a rank uses in the stream of an asynchronous schedule."""
        versions = SCHEDULES[self.schedule_name].versions
        assert versions is not None, f"{self.schedule_name} has one version of the weights"
        return weight_versions(self.stream(num_microbatches).stretch, pp_rank, versions)

    def num_weight_versions(self, pp_rank: int) -> int:
        """Return the versions of its weights that a rank holds at once, for any number of microbatches of the run."""
        if self.is_synchronous:
            return 1
        return max(self.weight_versions(count, pp_rank).num_held for count in self.decisive_counts)

    @property
    def accumulates_apart(self) -> bool:
        """True if the gradients of a step are added up while those of the step before wait for their update."""
        return SCHEDULES[self.schedule_name].is_delayed

    def slots(self, num_microbatches: int, pp_rank: int) -> Slots:
        """Return the slot of each (stage, microbatch) of this rank: static buffers of CUDA graphs from F to B or W."""
        return assign_slots(self.schedule(num_microbatches).rows[pp_rank])

    def num_slots(self, pp_rank: int) -> dict[int, int]:
        """Return the number of slots of each stage of the rank, enough for any number of microbatches of the run."""
        of_counts = [num_slots(self.slots(count, pp_rank)) for count in self.decisive_counts]
        return {stage: max(counts[stage] for counts in of_counts) for stage in self.placement.stages_of(pp_rank)}

    @cached_property
    def send_depth(self) -> int:
        """Enough in-flight sends of a channel that none blocks for any number of microbatches of the run, plus one."""
        forward_only = self._forward_only(self.batch.num_microbatches, self.num_slices)
        steps = [forward_only, *map(self._training, self.decisive_counts)]
        if self.parts is not None:
            steps += map(self._in_parts, self.decisive_counts)
        depths = [step.send_depth for step in steps]
        if not self.is_synchronous:
            for stream in map(self.stream, self.decisive_counts):
                depths += [unhindered_send_depth(stream.stretch), *stream.send_depth.values()]
        return 1 + max(depths)

    @cached_property
    def decisive_counts(self) -> Mapping[int, int]:
        """Numbers of microbatches whose steps decide on the memory and the sends of the run: see `decisive_counts`."""
        counts = (size // self.batch.samples_per_microbatch for size in self.batch.sizes)
        group_size = self.config.parallel.microbatch_group_size_per_virtual_pipeline_stage
        family = SCHEDULES[self.schedule_name]
        return decisive_counts(family, self.topology.pp, group_size, counts, self.num_slices)

    @property
    def num_optimizer_shards(self) -> int:
        """Ranks that share a parameter's optimizer state: its replicas with the distributed optimizer, else 1."""
        return self.topology.num_shards if self.config.parallel.use_distributed_optimizer else 1

    @property
    def tied_across_ranks(self) -> bool:
        """True if the word embedding is used by the first and the last stage, on different ranks."""
        return self.tied_kind == "tied"

    @property
    def tied_kind(self) -> BufferKind:
        """The word embedding: 'plain' within one stage, 'shared' by two stages of a rank (a V, or two directions),
        'tied' between two ranks. Other stages than the first use it if it is the output layer, or for predictions.
        """
        last = self.placement.num_stages - 1
        if not self.config.model.has_embedding_at_both_ends or last == 0:
            return "plain"
        return "shared" if last in self.placement.stages_of(self.placement.rank_of_stage[0]) else "tied"

    def borrows_embedding(self, stage: int) -> bool:
        """Return True if the stage has the head and uses the first stage's embedding, on the same rank."""
        return self.tied_kind == "shared" and self.partition.stages[stage].has_head

    def order_of_first_use(self, pp_rank: int) -> tuple[int, ...]:
        """Return the stages of pp_rank in the order in which a full step first runs them."""
        row = self.schedule(self.batch.num_microbatches).rows[pp_rank]
        run = dict.fromkeys(stage for stage, op, _ in row if op is Op.F)
        return (*run, *(stage for stage in self.placement.stages_of(pp_rank) if stage not in run))

    @property
    def _receive_depth(self) -> int:
        parallel = self.config.parallel
        return parallel.pipeline_receive_depth if parallel.overlap_p2p_comm else 1

    def _training(self, num_microbatches: int) -> LoweredSchedule:
        parallel, limit = self.config.parallel, self.config.parallel.pipeline_memory_limit
        return _training_schedule(
            self.schedule_name,
            self.topology.pp,
            self.num_chunks,
            num_microbatches,
            parallel.microbatch_group_size_per_virtual_pipeline_stage,
            self._receive_depth,
            None if limit is None else (*self._scheduled_costs, limit),
            parallel.overlap_moe_expert_parallel_comm,
            self.num_slices,
            self.num_units,
            self.sharding,
            self._reading_in_w,
            self._scheduled_costs if self.config.recompute.recompute_in_bubbles else None,
            self.offloaded,
        )

    @property
    def _scheduled_costs(self) -> ScheduledCosts:
        return self.layer_costs, self.whole_stages().partition, self.rank_speeds

    @cached_property
    def _reading_in_w(self) -> frozenset[int]:
        """The stages whose W reads weights, where these are sharded."""
        if self.sharding is None or not self.sharding.gathers or not self.splits_backward:
            return frozenset()
        stages = enumerate(self.partition.stages)
        return frozenset(stage for stage, layers in stages if reads_weights_in_w(self.model, self.shape, layers))

    def _in_parts(self, num_microbatches: int) -> LoweredSchedule:
        assert self.parts is not None, "without --overlap-moe-expert-parallel-comm stages run as a whole"
        schedule, delays = self.schedule(num_microbatches), self.config.parallel.delay_wgrad_compute
        return _part_schedule(schedule.without_messages(), self.parts, self._receive_depth, delays)

    def _forward_only(self, num_microbatches: int, num_slices: int) -> LoweredSchedule:
        policy = self.sharding if self.sharding is not None and self.sharding.gathers else None
        more = num_slices, policy, self.num_units
        return _forward_only_schedule(self.placement, num_microbatches, self._receive_depth, *more)


ScheduledCosts = tuple[LayerCosts, Partition, tuple[float, ...]]  # of whole stages, their cut, speeds of ranks


@lru_cache(maxsize=SCHEDULES_CACHED)
def _training_schedule(
    name: str,
    pp: int,
    num_chunks: int,
    num_microbatches: int,
    group_size: int | None,
    receive_depth: int,
    searched: tuple[LayerCosts, Partition, tuple[float, ...], int] | None,  # with a memory limit (zb-auto)
    has_pairs: bool,  # each backward is merged with the forward after it
    num_slices: int,  # of each microbatch
    num_units: tuple[int, ...],  # of each stage; empty: stages are not split
    policy: ShardingPolicy | None,
    reading_in_w: frozenset[int],  # stages, or units
    replayed: ScheduledCosts | None,  # --recompute-in-bubbles
    offloaded: frozenset[int],  # units
) -> LoweredSchedule:
    """Build and lower a training schedule."""
    goal = None
    if searched is not None:
        costs, partition, rank_speeds, limit = searched
        goal = AutoGoal(stage_costs(costs, partition, rank_speeds), limit)
    if has_pairs and name == "1f1b":  # its own warm-up is too short: each pair would wait for that of the next rank
        name = "interleaved"
    planned = build_schedule(name, pp, num_chunks, num_microbatches, group_size, goal, num_slices)
    planned = pair_up(planned) if has_pairs else planned
    if replayed is not None:
        planned = replay_ahead(planned, stage_costs(*replayed))
    schedule = lower(split_stages(planned, num_units) if num_units else planned, receive_depth)
    if policy is not None:
        schedule = shard(replace(schedule, reading_in_w=reading_in_w), policy)
    if offloaded:
        schedule = offload(schedule, offloaded)
    validate(schedule)
    return LoweredSchedule(schedule, num_units)


@lru_cache(maxsize=SCHEDULES_CACHED)
def _stream(name: str, pp: int, num_microbatches: int, receive_depth: int) -> Stream:
    return build_stream(name, pp, num_microbatches, receive_depth)


@lru_cache(maxsize=SCHEDULES_CACHED)
def _part_schedule(stages: Schedule, parts: Parts, receive_depth: int, delay_weights: bool) -> LoweredSchedule:
    """Cut a schedule without messages into parts, lower and prove it. receive_depth: in stages."""
    ahead, planned = receive_depth * max(map(len, parts.of_stage)), expand(stages, parts, delay_weights)
    schedule = carry(planned, lower(planned.compute_only(), ahead))
    prove(schedule, stages, parts)
    return LoweredSchedule(schedule)


@lru_cache(maxsize=SCHEDULES_CACHED)
def _forward_only_schedule(
    placement: Placement,
    num_microbatches: int,
    receive_depth: int,
    num_slices: int,
    policy: ShardingPolicy | None,
    num_units: tuple[int, ...],
) -> LoweredSchedule:
    schedule = build_forward_only(placement, num_microbatches, receive_depth, num_slices)
    if policy is not None:
        schedule = shard(schedule, policy)
        validate(schedule)
    return LoweredSchedule(schedule, num_units)


def offloaded_groups(config: ResolvedConfig, num_layers: int) -> list[int]:
    """Return the numbers of layers of the groups of so many layers that --cpu-offloading-num-layers moves."""
    sizes, count = group_sizes(config.recompute, num_layers), config.offload.cpu_offloading_num_layers
    return [size for size, end in zip(sizes, accumulate(sizes), strict=True) if end - size < count]


@lru_cache(maxsize=64 * SCHEDULES_CACHED)
def _stage_buffers(layout: ParameterLayout, stage: int, tp_rank: int) -> tuple[BufferLayout, ...]:
    return layout_buffers(layout.stages[stage], tp_rank, *layout.options)
