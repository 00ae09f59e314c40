"""Resolve a configuration on a number of ranks to a RunPlan, or raise one ConfigError with the rule and a way out.

Everything that depends on the number of ranks or on the schedule is decided here: derived sizes, the grid, the
partition of the layers, the batch, the length of the run. All other rules are in `config.rules`.
"""

from __future__ import annotations

import dataclasses
from functools import cache

from megapipe.config.config import (
    Config,
    ResolvedConfig,
    ResolvedLoggingConfig,
    ResolvedModelConfig,
    ResolvedOptimizerConfig,
    ResolvedParallelConfig,
    ResolvedTrainingConfig,
    convert,
    resolve_model,
)
from megapipe.config.parallel import strategy_of
from megapipe.config.rules.check import check
from megapipe.config.rules.gpu import overlaps_by_default, with_compiled, with_own_kernels
from megapipe.config.rules.training import with_implied
from megapipe.config.training import OptimizerConfig
from megapipe.data.build_datasets import DEFAULT_SPLIT
from megapipe.plan.batch import BatchSchedule
from megapipe.plan.cut import balanced_cut
from megapipe.plan.run_plan import RunPlan
from megapipe.plan.schedule_choice import cut_layers, group_size, memory_limit, schedule_and_chunks
from megapipe.plan.world_rules import batch_of, check_counts, num_steps, placement_of, topology_of, world_rules
from megapipe.schedule.lower import default_receive_depth
from megapipe.sharding.audit import audit_slices, audit_stages
from megapipe.topology import Topology
from megapipe.trace.parameters import model_parameters


def resolve(config: Config, world_size: int, ranks_per_node: int | None = None) -> RunPlan:
    """Plan a run on `world_size` ranks, `ranks_per_node` of them on each node (None: one node).

    config.model.vocab_size must be known (the tokenizer's). Raises ConfigError for everything that cannot be run.
    """
    config = with_compiled(with_own_kernels(with_implied(config)))
    check(config, world_rules(world_size, ranks_per_node))
    own, tp = config.parallel, config.parallel.tensor_model_parallel_size
    model = resolve_model(config.model, tp)
    schedule_name, chunks = schedule_and_chunks(own, model.num_layers)
    placement = placement_of(config)
    topology = topology_of(config, world_size, ranks_per_node)
    training, batch = _batch(config, topology)
    parallel = convert(
        ResolvedParallelConfig,
        own,
        sequence_parallel=own.sequence_parallel and tp > 1,
        num_virtual_stages_per_pipeline_rank=chunks,
        microbatch_group_size_per_virtual_pipeline_stage=group_size(own, schedule_name),
        pipeline_memory_limit=memory_limit(own, schedule_name),
        pipeline_receive_depth=own.pipeline_receive_depth or default_receive_depth(training.device != "cpu"),
        tp_comm_overlap=overlaps_by_default(config) if own.tp_comm_overlap is None else own.tp_comm_overlap,
        data_parallel_sharding_strategy=strategy_of(own),
        use_distributed_optimizer=strategy_of(own) != "no_shard",
        ddp_bucket_size=own.ddp_bucket_size or max(40_000_000, 1_000_000 * topology.dp),
    )
    partition = cut_layers(model, parallel, placement)
    optimizer, data = _optimizer(config.optimizer, training, batch), config.data
    if data.data_path is not None and data.split is None:
        data = dataclasses.replace(data, split=DEFAULT_SPLIT)
    interval = config.logging.log_interval or max(1, min(100, (training.train_iters or 2000) // 20))
    logging = convert(ResolvedLoggingConfig, config.logging, log_interval=interval)
    sections = {"model": model, "parallel": parallel, "training": training, "optimizer": optimizer}
    resolved = convert(ResolvedConfig, config, **sections, data=data, logging=logging)
    specs = model_parameters(model, parallel.sequence_parallel, topology.etp, optimizer.freeze)
    plan = _balanced_and_checked(RunPlan(resolved, topology, placement, partition, specs, batch, schedule_name))
    _audit_slices(model, parallel.sequence_parallel, tp, topology.ep, topology.etp)
    audit_stages(specs, dict(enumerate(plan.stage_specs)))
    return plan


def vary(plan: RunPlan, config: Config) -> RunPlan:
    """Return the plan of a configuration that differs from the plan's only in training and recompute.

    Grid, parameters and their audits are taken from the plan. Raises ConfigError as `resolve` does.
    """
    config = with_compiled(with_own_kernels(with_implied(config)))
    check(config)
    training, batch = _batch(config, plan.topology)
    check_counts(config, plan.schedule_name, plan.topology, batch)
    optimizer = _optimizer(config.optimizer, training, batch)
    resolved = dataclasses.replace(plan.config, training=training, optimizer=optimizer, recompute=config.recompute)
    return _balanced_and_checked(dataclasses.replace(plan, config=resolved, batch=batch))


def _balanced_and_checked(draft: RunPlan) -> RunPlan:
    """Return the plan with its layers divided as --pipeline-balance asks, and its stages split into units.

    Raises ConfigError if a rank's memory is too small.
    """
    draft = draft.whole_stages()
    plan = dataclasses.replace(draft, partition=balanced_cut(draft)).in_units()
    for count in plan.decisive_counts:  # now, so that errors surface before anything starts
        if plan.parts is None:
            plan.schedule(count)
        else:
            plan.part_schedule(count)
    return plan


@cache
def _audit_slices(model: ResolvedModelConfig, sequence_parallel: bool, tp: int, ep: int, etp: int) -> None:
    audit_slices(model_parameters(model, sequence_parallel, etp), tp, ep * etp)


def _batch(config: Config, topology: Topology) -> tuple[ResolvedTrainingConfig, BatchSchedule]:
    """Derive the global batch, and the length of the run in both units from whichever is given."""
    training, batch = config.training, batch_of(config, topology)
    iters, samples = num_steps(config, batch), training.train_samples
    if training.train_iters is not None:
        samples = batch.samples_after(training.train_iters)
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
