"""Rules of --data-parallel-sharding-strategy: what the ranks with the same parameters share out (ZeRO, FSDP, HSDP)."""

from __future__ import annotations

from collections.abc import Iterator

from megapipe.config.config import Config
from megapipe.config.parallel import ParallelConfig
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


RULES = (strategy, units)
