"""The resolved configuration: the same fields as `Config`, with what is derived filled in. Made by `plan.resolve`.

A class here narrows the types of the fields that `resolve` fills in; all other fields keep the meaning they have in `Config`. A field
that is still None was not asked for and is not needed (no checkpoint directory, no groups of microbatches in this schedule, ...).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

from megapipe.config.config import Config
from megapipe.config.model import ModelConfig
from megapipe.config.optimizer import OptimizerConfig
from megapipe.config.parallel import ParallelConfig
from megapipe.config.training import TrainingConfig

Section = TypeVar("Section")


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
