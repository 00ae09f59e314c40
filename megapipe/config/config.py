"""The whole configuration: twelve sections."""

from __future__ import annotations

from dataclasses import dataclass, field

from megapipe.config.checkpoint import CheckpointConfig
from megapipe.config.data import DataConfig
from megapipe.config.gpu import GpuConfig
from megapipe.config.kernels import KernelsConfig
from megapipe.config.logging import LoggingConfig
from megapipe.config.model import ModelConfig
from megapipe.config.offload import OffloadConfig
from megapipe.config.optimizer import OptimizerConfig
from megapipe.config.parallel import ParallelConfig
from megapipe.config.precision import PrecisionConfig
from megapipe.config.recompute import RecomputeConfig
from megapipe.config.training import TrainingConfig


@dataclass(frozen=True)
class Config:
    """What is wanted. A field that is None is derived from the others by planner.resolve."""

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
