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
from megapipe.config.layers import layer_kinds, layers_text
from megapipe.config.model import ModelConfig
from megapipe.config.rules.check import check
from megapipe.config.rules.proposals import divisors
from megapipe.config.rules.sft import with_implied
from megapipe.config.training import OptimizerConfig, TrainingConfig
from megapipe.data.build_datasets import DEFAULT_SPLIT
from megapipe.errors import ConfigError
from megapipe.layers.model import model_parameters
from megapipe.plan.batch import BatchSchedule, batch_schedule
from megapipe.plan.cut import balanced_cut, cut_layers
from megapipe.plan.run_plan import RunPlan
from megapipe.plan.schedule_choice import check_schedule, group_size, memory_limit, schedule_and_chunks
from megapipe.schedule.families import SCHEDULES
from megapipe.sharding.audit import audit_slices, audit_stages
from megapipe.topology import Topology


def resolve(config: Config, world_size: int, ranks_per_node: int | None = None) -> RunPlan:
    """Plan a run on `world_size` ranks, `ranks_per_node` of them on each node (None: one node).

    config.model.vocab_size must be known (the tokenizer's). Raises ConfigError for everything that cannot be run.
    """
    config = with_implied(config)
    check(config)
    check_schedule(config)
    model = resolve_model(config.model, config.parallel.tensor_model_parallel_size)
    schedule_name, chunks = schedule_and_chunks(config.parallel, model.num_layers)
    placement = SCHEDULES[schedule_name].place(config.parallel.pipeline_model_parallel_size, chunks)
    tp = config.parallel.tensor_model_parallel_size
    topology = Topology.of_world(
        world_size,
        tp=tp,
        cp=config.parallel.context_parallel_size,
        pp=config.parallel.pipeline_model_parallel_size,
        order=config.parallel.rank_order,
        ranks_per_node=ranks_per_node,
        allow_tp_across_nodes=config.parallel.allow_tp_across_nodes,
        kv_replicas=kv_replicas(model, tp),
        mirrored_pipeline=placement.second_direction is not None,
    )
    training, batch = _batch(config.training, topology)
    parallel = convert(
        ResolvedParallelConfig,
        config.parallel,
        sequence_parallel=config.parallel.sequence_parallel and tp > 1,
        num_virtual_stages_per_pipeline_rank=chunks,
        microbatch_group_size_per_virtual_pipeline_stage=group_size(config.parallel, schedule_name),
        pipeline_memory_limit=memory_limit(config.parallel, schedule_name),
        ddp_bucket_size=config.parallel.ddp_bucket_size or max(40_000_000, 1_000_000 * topology.dp),
    )
    partition = cut_layers(model, parallel, placement)
    optimizer, data = _optimizer(config.optimizer, training, batch), config.data
    if data.data_path is not None and data.split is None:
        data = dataclasses.replace(data, split=DEFAULT_SPLIT)
    resolved = convert(
        ResolvedConfig, config, model=model, parallel=parallel, training=training, optimizer=optimizer, data=data
    )
    specs = model_parameters(model, parallel.sequence_parallel)
    plan = _balanced_and_checked(RunPlan(resolved, topology, placement, partition, specs, batch, schedule_name))
    _audit_slices(model, parallel.sequence_parallel, tp)
    audit_stages(specs, dict(enumerate(plan.stage_specs)))
    return plan


def vary(plan: RunPlan, config: Config) -> RunPlan:
    """Return the plan of a configuration that differs from the plan's only in training and recompute.

    Grid, parameters and their audits are taken from the plan. Raises ConfigError as `resolve` does.
    """
    config = with_implied(config)
    check(config)
    training, batch = _batch(config.training, plan.topology)
    optimizer = _optimizer(config.optimizer, training, batch)
    resolved = dataclasses.replace(plan.config, training=training, optimizer=optimizer, recompute=config.recompute)
    return _balanced_and_checked(dataclasses.replace(plan, config=resolved, batch=batch))


def _balanced_and_checked(draft: RunPlan) -> RunPlan:
    """Return the plan with its layers divided as --pipeline-balance asks.

    Raises ConfigError if its schedule cannot run some number of microbatches of the run (a ramp-up changes it), CUDA
    graphs or steps without a barrier.
    """
    counts, batch, name = SCHEDULES[draft.schedule_name].counts, draft.batch, draft.schedule_name
    for size in batch.sizes:
        count = size // batch.samples_per_microbatch
        trouble, near = counts(draft.topology.pp, count) if counts else ("", ())
        if trouble:
            ways = " or ".join(str(number * batch.samples_per_microbatch) for number in near)
            raise ConfigError(
                f"--pipeline-schedule {name} {trouble}; {batch.flag_of(size)} {size}, {count} microbatch(es) of "
                f"{draft.config.training.micro_batch_size} x dp {draft.topology.dp}: use {ways} instead"
            )
    plan = dataclasses.replace(draft, partition=balanced_cut(draft))
    for count in plan.decisive_counts:  # now, so that errors surface before anything starts
        plan.schedule(count)
    if plan.config.gpu.cuda_graph_impl != "none" and plan.overlaps_stages:
        raise ConfigError(
            f"--cuda-graph-impl {plan.config.gpu.cuda_graph_impl}: --pipeline-schedule {name} runs two graphs at the "
            "same time, which share cuBLAS's workspace; use zb-v"
        )
    if not plan.config.optimizer.optimizer_post_validation:
        return plan
    if plan.placement.second_direction is not None or not plan.is_synchronous:
        raise ConfigError(
            "--optimizer-post-validation removes the barrier between synchronous steps of a pipeline with one "
            f"direction, which --pipeline-schedule {name} is not; leave the flag out, or choose zb-h2 or zb-v"
        )
    if plan.tied_across_ranks:
        raise ConfigError(
            "--optimizer-post-validation with a tied embedding on the first and the last rank: the first rank's update "
            "needs the last one's gradient, which is a barrier again; add --untie-embeddings-and-output-weights, "
            "choose a V-shaped schedule (both ends on one rank), or leave the flag out"
        )
    return plan


@cache
def _audit_slices(model: ResolvedModelConfig, sequence_parallel: bool, tp: int) -> None:
    audit_slices(model_parameters(model, sequence_parallel), tp)


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
    kv_replicas(filled, tp)
    return filled


def kv_replicas(model: ResolvedModelConfig, tp: int) -> int:
    """Return how many neighbouring tp ranks hold the same key/value heads: 1, tp, or the one number between them.

    Raises ConfigError if heads cannot be spread over tp, or if layers differ in a number between 1 and tp.
    """
    found: dict[int, int] = {}  # replicas -> key/value heads
    for layer, numbers in layer_kinds(model).items():
        groups = layer.num_query_groups
        if layer.has_attention and groups % tp and tp % groups:
            ways = ", ".join(str(n) for n in divisors(layer.num_attention_heads) if groups % n == 0 or n % groups == 0)
            where = "" if len(numbers) == model.num_layers else f"{layers_text(numbers)}: "
            raise ConfigError(
                f"{where}--num-query-groups {groups} and --tensor-model-parallel-size {tp}: one must divide the other, "
                f"so that each rank holds whole key/value heads or a copy of one; use a tensor-parallel size of {ways}"
            )
        if layer.has_attention:
            found[max(1, tp // groups)] = groups
    between = [number for number in found if 1 < number < tp]
    if len(between) > 1:
        some, other = (found[number] for number in between[:2])
        raise ConfigError(
            f"--tensor-model-parallel-size {tp} with layers of {some} and of {other} key/value heads: {between[0]} "
            f"ranks would share a head in some layers and {between[1]} in others; use at most {max(some, other)}"
        )
    return between[0] if between else max(found, default=1)


def _batch(training: TrainingConfig, topology: Topology) -> tuple[ResolvedTrainingConfig, BatchSchedule]:
    """Derive the global batch, and the length of the run in both units from whichever is given."""
    full, micro, rampup = training.global_batch_size, training.micro_batch_size, training.rampup_batch_size
    batch = batch_schedule(full, micro, topology.dp, rampup, topology.tp * topology.cp * topology.pp)
    iters, samples = training.train_iters, training.train_samples
    if iters is None and samples is not None:
        iters = batch.steps_for(samples)
        if iters == 0:
            raise ConfigError(f"--train-samples {samples} is less than one step of {batch.sizes[0]} sequences")
    elif iters is not None:
        samples = batch.samples_after(iters)
    lengths = {"train_iters": iters or 0, "train_samples": samples or 0}
    return convert(ResolvedTrainingConfig, training, global_batch_size=batch.full, **lengths), batch


def _optimizer(
    optimizer: OptimizerConfig, training: ResolvedTrainingConfig, batch: BatchSchedule
) -> ResolvedOptimizerConfig:
    """Convert decay lengths to samples, whichever unit they were given in, and fill in both ends of ramps."""
    decay_samples = optimizer.lr_decay_samples
    if decay_samples is None:
        iters = optimizer.lr_decay_iters
        decay_samples = training.train_samples if iters is None else batch.samples_after(iters)
    start, end = optimizer.start_weight_decay, optimizer.end_weight_decay
    return convert(
        ResolvedOptimizerConfig,
        optimizer,
        lr_decay_iters=optimizer.lr_decay_iters or training.train_iters,
        lr_decay_samples=decay_samples,
        start_weight_decay=optimizer.weight_decay if start is None else start,
        end_weight_decay=optimizer.weight_decay if end is None else end,
        lr_wsd_decay_samples=optimizer.lr_wsd_decay_samples or (optimizer.lr_wsd_decay_iters or 0) * batch.full,
        lr_warmup_samples=optimizer.lr_warmup_samples or batch.samples_after(optimizer.lr_warmup_iters),
        decoupled_lr=optimizer.lr if optimizer.decoupled_lr is None else optimizer.decoupled_lr,
        decoupled_min_lr=optimizer.min_lr if optimizer.decoupled_min_lr is None else optimizer.decoupled_min_lr,
    )
