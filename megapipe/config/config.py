"""The whole configuration: `Config` as the user wrote it, `ResolvedConfig` with all that `plan.resolve` derives.

The resolved classes narrow the types of the fields that are filled in. A field that is still None was not given and is
not needed (no checkpoint directory, no groups of microbatches in this schedule, ...).
"""

from __future__ import annotations

import dataclasses
import typing
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar

from megapipe.config.files import CheckpointConfig, DataConfig, LoggingConfig
from megapipe.config.gpu import GpuConfig, KernelsConfig
from megapipe.config.model import ModelConfig, PrecisionConfig
from megapipe.config.options import ConfigField, kind_of
from megapipe.config.parallel import OffloadConfig, ParallelConfig, RecomputeConfig
from megapipe.config.training import OptimizerConfig, TrainingConfig
from megapipe.errors import ConfigError

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

    @property
    def drain_intervals(self) -> dict[str, int]:
        """The flags after whose numbers of steps the pipeline of an asynchronous schedule drains."""
        copies = self.training.check_weight_hash_across_dp_replicas_interval
        intervals = {
            "--eval-interval": self.training.eval_interval if self.training.eval_iters else None,
            "--save-interval": self.checkpoint.save_interval,
            "--exit-interval": self.training.exit_interval,
            "--check-weight-hash-across-dp-replicas-interval": copies,
        }
        return {flag: steps for flag, steps in intervals.items() if steps}


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
    pipeline_receive_depth: int
    tp_comm_overlap: bool
    ddp_bucket_size: int
    data_parallel_sharding_strategy: str


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
class ResolvedLoggingConfig(LoggingConfig):
    """The logging section of a run of known length."""

    log_interval: int


@dataclass(frozen=True, kw_only=True)
class ResolvedConfig(Config):
    """A configuration on a given number of ranks."""

    model: ResolvedModelConfig
    parallel: ResolvedParallelConfig
    training: ResolvedTrainingConfig
    optimizer: ResolvedOptimizerConfig
    logging: ResolvedLoggingConfig


def convert(section_type: type[Section], section: object, **changes: Any) -> Section:
    """Return a section, or a whole configuration, as its resolved type (or back), with some values changed."""
    given = {one.name: getattr(section, one.name) for one in dataclasses.fields(section)}  # type: ignore[arg-type]
    return section_type(**given | changes)


@cache
def section_types() -> dict[str, type]:
    """Return section name -> dataclass, in the order of `Config`."""
    return dict(typing.get_type_hints(Config))


@cache
def all_fields() -> tuple[ConfigField, ...]:
    """Return every field of every section, in the order of declaration."""
    found = []
    for section, section_type in section_types().items():
        types = typing.get_type_hints(section_type)
        for one in dataclasses.fields(section_type):
            found.append(ConfigField(section, one.name, kind_of(types[one.name]), one.default, one.metadata["option"]))
    return tuple(found)


@cache
def fields_by_key() -> dict[str, ConfigField]:
    """Return 'section.name' -> field."""
    return {one.key: one for one in all_fields()}


def value_of(config: Config, field: ConfigField) -> Any:
    """Return the field's value in a configuration."""
    return getattr(getattr(config, field.section), field.name)


def given(config: Config, *keys: str) -> list[str]:
    """Return the flags of those fields ('section.name') that have another value than their default."""
    fields = [fields_by_key()[key] for key in keys]
    return [field.main_flag for field in fields if value_of(config, field) != field.default]


def make_config(values: dict[str, Any]) -> Config:
    """Build the configuration with these values by 'section.name', and defaults elsewhere."""
    sections: dict[str, dict[str, Any]] = {name: {} for name in section_types()}
    for key, value in values.items():
        section, name = key.split(".")
        sections[section][name] = value
    return Config(**{name: section_types()[name](**fields) for name, fields in sections.items()})


def resolve_model(model: ModelConfig, tp: int) -> ResolvedModelConfig:
    """Fill in the sizes that are derived from others. Raises ConfigError if the vocabulary is unknown."""
    if model.vocab_size is None:
        raise ConfigError(
            "the size of the vocabulary is unknown; give --vocab-size, or --tokenizer-type and --tokenizer-model"
        )
    multiple = model.make_vocab_size_divisible_by * tp
    return convert(
        ResolvedModelConfig,
        model,
        padded_vocab_size=model.padded_vocab_size or -(-model.vocab_size // multiple) * multiple,
        max_position_embeddings=model.max_position_embeddings or model.seq_length,
        **derived_options(model),
    )


def derived_options(model: ModelConfig) -> dict[str, Any]:
    """Return the options of the layers that follow from others where they are not given."""
    return {
        "ffn_hidden_size": model.feed_forward_size(),
        "moe_ffn_hidden_size": model.moe_ffn_hidden_size or (model.num_experts and model.feed_forward_size()),
        "num_query_groups": model.query_groups(),
        "kv_channels": model.head_size(),
        "softmax_scale": model.attention_scale(),
        "latent_norm_epsilon": model.latent_epsilon(),
        "moe_router_group_score_topk": model.group_score_topk(),
        **_sinkhorn_scores(model),
    }


def _sinkhorn_scores(model: ModelConfig) -> dict[str, Any]:
    """Return how the scores of experts become weights if --moe-router-load-balancing-type is sinkhorn, as in Megatron:
    sigmoid of one chosen expert, softmax over all experts of several.
    """
    if not model.has_sinkhorn:
        return {}
    unread = dict.fromkeys(("moe_router_topk_scaling_factor", "moe_router_num_groups", "moe_router_group_topk"))
    several = model.moe_router_topk > 1
    score = "softmax" if several else "sigmoid"
    return unread | {"moe_router_score_function": score, "moe_router_pre_softmax": several}
