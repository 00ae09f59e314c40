"""Rules of main gradients and moments narrower than fp32 (--use-precision-aware-optimizer), of Muon, of the options of
update rules, and of what the ranks with the same parameters share out.
"""

from __future__ import annotations

from collections.abc import Iterator

from megapipe.config.config import Config
from megapipe.config.options import read_numbers
from megapipe.config.parallel import strategy_of
from megapipe.config.rules.gpu import ANY_UPDATE
from megapipe.config.training import NEWTON_SCHULZ, OPTIMIZERS, OptimizerConfig
from megapipe.errors import ConfigError

FLAG = "--use-precision-aware-optimizer"
STRATEGY = "--data-parallel-sharding-strategy"
UNITS = "--data-parallel-sharding-units"
INSTANCES = "--num-distributed-optimizer-instances"


def precision_aware(config: Config) -> Iterator[str]:
    """Yield what rules out narrow training state. Megatron also asks for the distributed optimizer; here it works
    without."""
    optimizer, dtype, impl = config.optimizer, config.precision.dtype, config.kernels.optimizer_impl
    if not optimizer.use_precision_aware_optimizer:
        return
    if dtype == "fp64":
        yield f"{FLAG} with --dtype fp64: fp64 is for verification, which narrow state would spoil; leave it out"
    elif impl not in ANY_UPDATE:
        yield f"--optimizer-impl {impl} updates fp32 state, which {FLAG} may narrow; use --optimizer-impl torch"


def muon(config: Config) -> Iterator[str]:
    """Check the options of Muon."""
    optimizer, impl = config.optimizer, config.kernels.optimizer_impl
    if OPTIMIZERS[optimizer.optimizer].matrix_states is not None and impl not in ANY_UPDATE:
        yield f"--optimizer-impl {impl} has no rules over matrices, such as {optimizer.optimizer}; leave it out"
    if optimizer.optimizer != "muon":
        return
    steps, period = optimizer.muon_num_ns_steps, len(NEWTON_SCHULZ[optimizer.muon_coefficient_type])
    if steps % period:
        nearest = max(1, round(steps / period)) * period
        yield (
            f"--muon-num-ns-steps {steps}: --muon-coefficient-type {optimizer.muon_coefficient_type} has coefficients "
            f"for {period} steps in turn; give a multiple, such as {nearest}, or --muon-coefficient-type simple"
        )
    if optimizer.muon_tp_mode == "blockwise":
        yield (
            "--muon-tp-mode blockwise orthogonalizes the slice of each rank, so that results change with tp; give "
            "duplicated or distributed, which are both the update of one process"
        )
    elif optimizer.muon_tp_mode is None and config.parallel.tensor_model_parallel_size > 1:
        yield (
            "--optimizer muon with tensor parallelism needs --muon-tp-mode duplicated (or distributed: here the same), "
            "because Megatron's default, blockwise up to 0.18, is another optimizer"
        )


def options(config: Config) -> Iterator[str]:
    """Check the options of an extension's update rule."""
    try:
        rule_options(config.optimizer)
    except ConfigError as error:
        yield str(error)


def rule_options(optimizer: OptimizerConfig) -> dict[str, float]:
    """Return the options of the update rule, with its defaults. Raises ConfigError."""
    defaults, owner = OPTIMIZERS[optimizer.optimizer].options, f"--optimizer {optimizer.optimizer}"
    return read_numbers("--optimizer-options", optimizer.optimizer_options, defaults, owner)


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
    """Check that the memory of ranks, which counts whole stages, is not given with their parts."""
    count = config.parallel.data_parallel_sharding_units
    if count > 1 and config.parallel.pipeline_rank_memory is not None:
        rule = "does not work with --pipeline-rank-memory yet, which counts whole stages"
        yield f"{UNITS} {count} {rule}; leave one of the two out"


RULES = (precision_aware, muon, options, strategy, units)
