"""What the tests of verify share: a tiny configuration and the comparison on this rank."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from megapipe.build.precision import parameter_dtype
from megapipe.comm.groups import build_process_groups
from megapipe.config.config import Config
from megapipe.config.data import DataConfig
from megapipe.config.model import ModelConfig
from megapipe.config.optimizer import OptimizerConfig
from megapipe.config.parallel import ParallelConfig
from megapipe.config.precision import PrecisionConfig
from megapipe.config.recompute import RecomputeConfig
from megapipe.config.training import TrainingConfig
from megapipe.planner.resolve import resolve
from megapipe.train.step import Rates
from megapipe.verify.batches import random_batches
from megapipe.verify.parity import ParityStep, compare_with_oracle
from megapipe.verify.tolerance import FP64, Tolerance
from megapipe.verify.weights import drawn_slices

SECTIONS = (ModelConfig, ParallelConfig, RecomputeConfig, TrainingConfig, OptimizerConfig, PrecisionConfig, DataConfig)
TINY: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 16,
    "ffn_hidden_size": 12,
    "num_attention_heads": 4,
    "kv_channels": 6,
    "seq_length": 8,
    "vocab_size": 21,
    "make_vocab_size_divisible_by": 4,
    "micro_batch_size": 2,
    "global_batch_size": 12,
    "train_iters": 3,
    "lr": 1e-2,
    "adam_eps": 1e-3,
    "weight_decay": 0.1,
    "dtype": "fp64",
}


def config_of(**options: Any) -> Config:
    """A configuration from the fields of all sections at once; tp, pp, chunks for the long names."""
    short = {
        "tp": "tensor_model_parallel_size",
        "pp": "pipeline_model_parallel_size",
        "chunks": "num_virtual_stages_per_pipeline_rank",
        "zero": "use_distributed_optimizer",
    }
    options = TINY | {short.get(name, name): value for name, value in options.items()}
    names = {section: [field.name for field in dataclasses.fields(section)] for section in SECTIONS}
    unknown = set(options) - {name for its_names in names.values() for name in its_names}
    assert not unknown, unknown
    made = [section(**{name: options[name] for name in its_names if name in options}) for section, its_names in names.items()]
    return Config(*made)


def parity(rank: int, world_size: int, config: Config, tolerance: Tolerance = FP64, steps: int = 3) -> list[ParityStep]:
    """The comparison of a configuration as it stands, on this rank."""
    plan = resolve(config, world_size)
    groups = build_process_groups(plan.topology, rank, "gloo", 60)
    config = plan.config
    counts = [plan.batch.full // plan.batch.samples_per_microbatch] * steps
    batches = random_batches(config, plan.topology.dp, counts, seed=1)
    rates = [Rates(config.optimizer.lr or 0.0, config.optimizer.weight_decay)] * steps
    slices = drawn_slices(config.training.seed, parameter_dtype(config.precision.dtype))
    return compare_with_oracle(plan, groups, torch.device("cpu"), slices, batches, rates, tolerance)
