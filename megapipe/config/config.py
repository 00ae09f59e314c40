"""The whole configuration: `Config` as the user wrote it, `ResolvedConfig` with all derived values.

`plan.resolve` derives them. The resolved classes narrow the types of the fields that it fills in; all other fields
keep their meaning. A field that is still None was not given and is not needed (no checkpoint directory, no groups of
microbatches in this schedule, ...).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeVar

from megapipe.config.checkpoint import CheckpointConfig
from megapipe.config.data import DataConfig
from megapipe.config.gpu import GpuConfig, KernelsConfig
from megapipe.config.logging import LoggingConfig
from megapipe.config.model import ModelConfig
from megapipe.config.optimizer import OptimizerConfig
from megapipe.config.parallel import ParallelConfig
from megapipe.config.precision import PrecisionConfig
from megapipe.config.recompute import OffloadConfig, RecomputeConfig
from megapipe.config.training import TrainingConfig

Section = TypeVar("Section")


@dataclass(frozen=True)
class Config:
    """The configuration as the user wrote it, in twelve sections. `plan.resolve` derives fields left at None."""

    model: ModelConfig = field(default_factory=ModelConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    kernels: KernelsConfig = field(default_factory=KernelsConfig)
    data: DataConfig = field(default_factory=DataConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    gpu: GpuConfig = field(default_factory=GpuConfig)


@dataclass(frozen=True, kw_only=True)
class ResolvedModelConfig(ModelConfig):
    """The model section with all sizes."""

    ffn_hidden_size: int
    num_query_groups: int
    kv_channels: int
    max_position_embeddings: int
    vocab_size: int
    padded_vocab_size: int
    softmax_scale: float


@dataclass(frozen=True, kw_only=True)
class ResolvedParallelConfig(ParallelConfig):
    """The parallel section on a given number of ranks. sequence_parallel: asked for, and tp is above 1."""

    num_virtual_stages_per_pipeline_rank: int
    ddp_bucket_size: int


@dataclass(frozen=True, kw_only=True)
class ResolvedTrainingConfig(TrainingConfig):
    """The training section with its batch, and its length in both units (0 where no length was given)."""

    global_batch_size: int
    train_iters: int
    train_samples: int


@dataclass(frozen=True, kw_only=True)
class ResolvedOptimizerConfig(OptimizerConfig):
    """The optimizer section with all lengths in samples (0 where the run has no length, or no WSD phase)."""

    lr_decay_iters: int
    lr_decay_samples: int
    lr_wsd_decay_samples: int
    start_weight_decay: float
    end_weight_decay: float
    decoupled_min_lr: float


@dataclass(frozen=True, kw_only=True)
class ResolvedConfig(Config):
    """A configuration on a given number of ranks."""

    model: ResolvedModelConfig
    parallel: ResolvedParallelConfig
    training: ResolvedTrainingConfig
    optimizer: ResolvedOptimizerConfig


def convert(section_type: type[Section], section: object, **changes: Any) -> Section:
    """Return a section, or a whole configuration, as its resolved type (or back), with some values changed."""
    return section_type(**vars(section) | changes)
