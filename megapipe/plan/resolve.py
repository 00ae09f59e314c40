"""Resolve a configuration on a number of ranks to a RunPlan, or raise one ConfigError with the rule and a way out.

Everything that depends on the number of ranks or on the schedule is decided here: derived sizes, the grid, the
partition of the layers, the batch, the length of the run. All other rules are in `config.rules`.
"""

from __future__ import annotations

import dataclasses
import math
from functools import cache

from megapipe.config.config import (
    Config,
    ResolvedConfig,
    ResolvedModelConfig,
    ResolvedOptimizerConfig,
    ResolvedParallelConfig,
    ResolvedTrainingConfig,
    convert,
)
from megapipe.config.model import ModelConfig
from megapipe.config.parallel import ParallelConfig
from megapipe.config.rules.check import check
from megapipe.config.rules.proposals import divisors
from megapipe.config.training import OptimizerConfig, TrainingConfig
from megapipe.data.build_datasets import DEFAULT_SPLIT
from megapipe.errors import ConfigError
from megapipe.layers.model import model_parameters
from megapipe.plan.balance import balanced_cut
from megapipe.plan.batch import BatchSchedule, batch_schedule
from megapipe.plan.cut import cut_flags, cut_layers
from megapipe.plan.run_plan import RunPlan
from megapipe.plan.schedule_choice import check_schedule, group_size, memory_limit, schedule_and_chunks
from megapipe.schedule.families import SCHEDULES
from megapipe.schedule.placement import Placement
from megapipe.sharding.audit import audit_slices, audit_stages
from megapipe.topology import Topology


def resolve(config: Config, world_size: int, ranks_per_node: int | None = None) -> RunPlan:
    """Plan a run on `world_size` ranks, `ranks_per_node` of them on each node (None: one node).

    config.model.vocab_size must be known (the tokenizer's). Raises ConfigError for
    everything that cannot be run.
    """
    check(config)
    check_schedule(config)
    model = resolve_model(config.model, config.parallel.tensor_model_parallel_size)
    schedule_name, chunks = schedule_and_chunks(config.parallel, model.num_layers)
    placement = SCHEDULES[schedule_name].place(config.parallel.pipeline_model_parallel_size, chunks)
    topology = _topology(config.parallel, model, world_size, ranks_per_node, placement)
    training, batch = _batch(config.training, topology)
    parallel = _parallel(config.parallel, topology, schedule_name, chunks)
    partition = cut_layers(model, cut_flags(parallel), placement)
    specs = model_parameters(model, parallel.sequence_parallel)
    optimizer = _optimizer(config.optimizer, training, batch)
    data = config.data
    if data.data_path is not None and data.split is None:
        data = dataclasses.replace(data, split=DEFAULT_SPLIT)
    resolved = convert(
        ResolvedConfig, config, model=model, parallel=parallel, training=training, optimizer=optimizer, data=data
    )
    draft = RunPlan(resolved, topology, placement, partition, specs, batch, schedule_name)
    _check_counts(draft)
    plan = _balanced(draft)
    _audit_slices(model, parallel.sequence_parallel, topology.tp)
    audit_stages(specs, dict(enumerate(plan.stage_specs)))
    _make_schedules(plan)
    _check_schedule(plan)
    return plan


def _balanced(draft: RunPlan) -> RunPlan:
    """Return the plan with its layers divided as --pipeline-balance asks."""
    return dataclasses.replace(draft, partition=balanced_cut(draft))


@cache
def _audit_slices(model: ResolvedModelConfig, sequence_parallel: bool, tp: int) -> None:
    audit_slices(model_parameters(model, sequence_parallel), tp)


def vary(plan: RunPlan, config: Config) -> RunPlan:
    """Return the plan of a configuration that differs from the plan's only in training and recompute.

    Grid, parameters and their audits are taken from the plan. Raises ConfigError as `resolve` does.
    """
    check(config)
    training, batch = _batch(config.training, plan.topology)
    optimizer = _optimizer(config.optimizer, training, batch)
    resolved = dataclasses.replace(plan.config, training=training, optimizer=optimizer, recompute=config.recompute)
    draft = dataclasses.replace(plan, config=resolved, batch=batch)
    _check_counts(draft)
    varied = _balanced(draft)
    _make_schedules(varied)
    _check_schedule(varied)
    return varied


def resolve_model(model: ModelConfig, tp: int) -> ResolvedModelConfig:
    """Fill in the sizes that are derived from others. Raises ConfigError if the vocabulary is unknown."""
    if model.vocab_size is None:
        raise ConfigError(
            "the size of the vocabulary is unknown; give --vocab-size, or --tokenizer-type and --tokenizer-model"
        )
    multiple = model.make_vocab_size_divisible_by * tp
    kv_channels = model.head_size()
    filled = convert(
        ResolvedModelConfig,
        model,
        padded_vocab_size=model.padded_vocab_size or -(-model.vocab_size // multiple) * multiple,
        ffn_hidden_size=model.feed_forward_size(),
        num_query_groups=model.query_groups(),
        kv_channels=kv_channels,
        max_position_embeddings=model.max_position_embeddings or model.seq_length,
        softmax_scale=model.softmax_scale or 1.0 / math.sqrt(kv_channels),
    )
    _check_query_groups(filled, tp)
    return filled


def _check_query_groups(model: ResolvedModelConfig, tp: int) -> None:
    groups = model.num_query_groups
    if groups % tp and tp % groups:
        ways = ", ".join(str(n) for n in divisors(model.num_attention_heads) if groups % n == 0 or n % groups == 0)
        raise ConfigError(
            f"--num-query-groups {groups} and --tensor-model-parallel-size {tp}: one must divide the other, so that "
            f"each rank holds whole key/value heads or a copy of one; use a tensor-parallel size of {ways}"
        )


def _check_schedule(plan: RunPlan) -> None:
    """Raise ConfigError for what CUDA graphs and steps without a barrier cannot do with the schedule."""
    if plan.config.gpu.cuda_graph_impl != "none" and plan.overlaps_stages:
        raise ConfigError(
            f"--cuda-graph-impl {plan.config.gpu.cuda_graph_impl}: --pipeline-schedule {plan.schedule_name} runs two "
            "graphs at the same time, which share cuBLAS's workspace; use zb-v"
        )
    if not plan.config.optimizer.optimizer_post_validation:
        return
    if plan.placement.second_direction is not None or not SCHEDULES[plan.schedule_name].is_synchronous:
        raise ConfigError(
            "--optimizer-post-validation removes the barrier between synchronous steps of a pipeline with one "
            f"direction, which --pipeline-schedule {plan.schedule_name} is not; leave the flag out, or "
            "choose zb-h2 or zb-v"
        )
    if plan.tied_across_ranks:
        raise ConfigError(
            "--optimizer-post-validation with a tied embedding on the first and the last rank: the first rank's update "
            "needs the last one's gradient, which is a barrier again; add --untie-embeddings-and-output-weights, "
            "choose a V-shaped schedule (both ends on one rank), or leave the flag out"
        )


def _topology(
    parallel: ParallelConfig,
    model: ResolvedModelConfig,
    world_size: int,
    ranks_per_node: int | None,
    placement: Placement,
) -> Topology:
    tp = parallel.tensor_model_parallel_size
    return Topology.of_world(
        world_size,
        tp=tp,
        cp=parallel.context_parallel_size,
        pp=parallel.pipeline_model_parallel_size,
        order=parallel.rank_order,
        ranks_per_node=ranks_per_node,
        allow_tp_across_nodes=parallel.allow_tp_across_nodes,
        kv_replicas=max(1, tp // model.num_query_groups),
        mirrored_pipeline=placement.second_direction is not None,
    )


def _batch(training: TrainingConfig, topology: Topology) -> tuple[ResolvedTrainingConfig, BatchSchedule]:
    """Derive the global batch, and the length of the run in both units from whichever is given."""
    ranks_per_replica = topology.tp * topology.cp * topology.pp
    batch = batch_schedule(
        training.global_batch_size,
        training.micro_batch_size,
        topology.dp,
        training.rampup_batch_size,
        ranks_per_replica,
    )
    iters, samples = training.train_iters, training.train_samples
    if iters is None and samples is not None:
        iters = batch.steps_for(samples)
        if iters == 0:
            raise ConfigError(f"--train-samples {samples} is less than one step of {batch.sizes[0]} sequences")
    elif iters is not None:
        samples = batch.samples_after(iters)
    resolved = convert(
        ResolvedTrainingConfig,
        training,
        global_batch_size=batch.full,
        train_iters=iters or 0,
        train_samples=samples or 0,
    )
    return resolved, batch


def _parallel(parallel: ParallelConfig, topology: Topology, schedule_name: str, chunks: int) -> ResolvedParallelConfig:
    return convert(
        ResolvedParallelConfig,
        parallel,
        sequence_parallel=parallel.sequence_parallel and topology.tp > 1,
        num_virtual_stages_per_pipeline_rank=chunks,
        microbatch_group_size_per_virtual_pipeline_stage=group_size(parallel, schedule_name),
        pipeline_memory_limit=memory_limit(parallel, schedule_name),
        ddp_bucket_size=parallel.ddp_bucket_size or max(40_000_000, 1_000_000 * topology.dp),
    )


def _check_counts(plan: RunPlan) -> None:
    """Raise ConfigError if the schedule cannot run some number of microbatches of the run (a ramp-up changes it)."""
    counts, batch, training = SCHEDULES[plan.schedule_name].counts, plan.batch, plan.config.training
    for size in batch.sizes:
        count = size // batch.samples_per_microbatch
        trouble, near = counts(plan.topology.pp, count) if counts else ("", ())
        if trouble:
            flag = (
                "--global-batch-size"
                if size == batch.full
                else f"--rampup-batch-size {batch.start} {batch.increment} reaches"
            )
            ways = " or ".join(str(number * batch.samples_per_microbatch) for number in near)
            raise ConfigError(
                f"--pipeline-schedule {plan.schedule_name} {trouble}; {flag} {size}, {count} microbatch(es) of "
                f"{training.micro_batch_size} x dp {plan.topology.dp}: use {ways} instead"
            )


def _make_schedules(plan: RunPlan) -> None:
    """Build the schedules of all numbers of microbatches of the run, so that errors surface now."""
    for size in plan.batch.sizes:
        plan.schedule(size // plan.batch.samples_per_microbatch)


def _optimizer(
    optimizer: OptimizerConfig, training: ResolvedTrainingConfig, batch: BatchSchedule
) -> ResolvedOptimizerConfig:
    """Convert decay lengths to samples, whichever unit they were given in, and fill in both ends of ramps."""
    decay_samples = optimizer.lr_decay_samples
    if decay_samples is None:
        iters = optimizer.lr_decay_iters
        decay_samples = training.train_samples if iters is None else iters * batch.full
    start, end = optimizer.start_weight_decay, optimizer.end_weight_decay
    return convert(
        ResolvedOptimizerConfig,
        optimizer,
        lr_decay_iters=optimizer.lr_decay_iters or training.train_iters,
        lr_decay_samples=decay_samples,
        start_weight_decay=optimizer.weight_decay if start is None else start,
        end_weight_decay=optimizer.weight_decay if end is None else end,
        lr_wsd_decay_samples=optimizer.lr_wsd_decay_samples or (optimizer.lr_wsd_decay_iters or 0) * batch.full,
        lr_warmup_samples=optimizer.lr_warmup_samples or optimizer.lr_warmup_iters * batch.full,
        decoupled_lr=optimizer.lr if optimizer.decoupled_lr is None else optimizer.decoupled_lr,
        decoupled_min_lr=optimizer.min_lr if optimizer.decoupled_min_lr is None else optimizer.decoupled_min_lr,
    )
