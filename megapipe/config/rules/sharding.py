"""Rules of --data-parallel-sharding-strategy: what the ranks with the same parameters share out (ZeRO, FSDP, HSDP)."""

from __future__ import annotations

from collections.abc import Iterator

from megapipe.config.config import Config
from megapipe.config.parallel import SHARDED_GRADS, ParallelConfig
from megapipe.config.rules.proposals import chosen

STRATEGY = "--data-parallel-sharding-strategy"
UNITS = "--data-parallel-sharding-units"
INSTANCES = "--num-distributed-optimizer-instances"


def strategy_of(parallel: ParallelConfig) -> str:
    """Return what is sharded over data-parallel ranks: one of SHARDING_STRATEGIES."""
    given = parallel.data_parallel_sharding_strategy
    return given or ("optim" if parallel.use_distributed_optimizer else "no_shard")


def strategy(config: Config) -> Iterator[str]:
    """Check the strategy, and the options that need one."""
    parallel, found = config.parallel, strategy_of(config.parallel)
    if found == "no_shard" and parallel.use_distributed_optimizer:
        ways = f"use {STRATEGY} optim, or --no-use-distributed-optimizer"
        yield f"{STRATEGY} no_shard contradicts --use-distributed-optimizer, which is optim; {ways}"
    if found != "no_shard":
        return
    ways = f"--use-distributed-optimizer or {STRATEGY} optim"
    if parallel.overlap_param_gather:
        yield f"--overlap-param-gather needs {ways}; add one, or leave this out"
    if parallel.num_distributed_optimizer_instances > 1:
        yield f"{INSTANCES} {parallel.num_distributed_optimizer_instances} needs {ways}; add one, or leave this out"


def unsupported(config: Config) -> Iterator[str]:
    """Yield what sharded gradients and weights do not work with yet."""
    found = strategy_of(config.parallel)
    instances = config.parallel.num_distributed_optimizer_instances
    if instances > 1 and config.model.num_experts is not None:
        yield f"{INSTANCES} {instances} does not work with --num-experts yet; leave it out"
    if found not in SHARDED_GRADS:
        return
    for option in chosen(
        ("--transformer-impl transformer_engine", config.kernels.transformer_impl != "local"),
        ("--fp8-format", config.precision.fp8_format is not None),
        (f"--cuda-graph-impl {config.gpu.cuda_graph_impl}", config.gpu.cuda_graph_impl != "none"),
        ("--compile-blocks on", config.kernels.compile_blocks == "on"),
        ("--overlap-moe-expert-parallel-comm", config.parallel.overlap_moe_expert_parallel_comm),
    ):
        yield f"{STRATEGY} {found} does not work with {option} yet; use {STRATEGY} optim, or leave {option} out"


def units(config: Config) -> Iterator[str]:
    """Check what counts layers of whole stages, of which units are parts."""
    count = config.parallel.data_parallel_sharding_units
    if count == 1:
        return
    for option in chosen(
        ("--recompute-method block", config.recompute.recompute_method == "block"),
        ("--pipeline-rank-memory", config.parallel.pipeline_rank_memory is not None),
    ):
        yield f"{UNITS} {count} does not work with {option} yet, which counts whole stages; leave one of the two out"


RULES = (strategy, unsupported, units)
