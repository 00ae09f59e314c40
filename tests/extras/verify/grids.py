"""What the tests of verify share: a tiny configuration, and the comparison on this rank with a bug planted or not."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from megapipe.assembly.inference_runtime import DrawSlice
from megapipe.comm.groups import build_process_groups
from megapipe.config.config import Config
from megapipe.config.data import DataConfig
from megapipe.config.model import ModelConfig
from megapipe.config.offload import OffloadConfig
from megapipe.config.optimizer import OptimizerConfig
from megapipe.config.parallel import ParallelConfig
from megapipe.config.precision import PrecisionConfig
from megapipe.config.recompute import RecomputeConfig
from megapipe.config.training import TrainingConfig
from megapipe.extras.verify.compare import ParityStep
from megapipe.extras.verify.parity import verified_steps
from megapipe.extras.verify.report import found_text
from megapipe.extras.verify.shrink import shrink
from megapipe.plan.resolve import resolve
from megapipe.sharding.spec import ParamSpec
from tests.extras.verify.planted import Plant

SECTIONS = (
    ModelConfig,
    ParallelConfig,
    RecomputeConfig,
    OffloadConfig,
    TrainingConfig,
    OptimizerConfig,
    PrecisionConfig,
    DataConfig,
)
SHORT = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "chunks": "num_virtual_stages_per_pipeline_rank",
    "sp": "sequence_parallel",
    "zero": "use_distributed_optimizer",
}
TINY: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 16,
    "ffn_hidden_size": 12,
    "num_attention_heads": 4,
    "kv_channels": 6,
    "seq_length": 8,
    "vocab_size": 21,
    "make_vocab_size_divisible_by": 4,
    "micro_batch_size": 1,
    "global_batch_size": 8,
    "train_iters": 3,
    "lr": 1e-3,
    "weight_decay": 0.1,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "device": "cpu",
    "distributed_backend": "gloo",
}
LLAMA: dict[str, Any] = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "activation": "swiglu",
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
    "num_query_groups": 2,
}


def config_of(**options: Any) -> Config:
    """A configuration from the fields of all sections at once; tp, pp, chunks, sp and zero for their long names."""
    options = TINY | {SHORT.get(name, name): value for name, value in options.items()}
    names = {section: [field.name for field in dataclasses.fields(section)] for section in SECTIONS}
    unknown = set(options) - {name for its_names in names.values() for name in its_names}
    assert not unknown, unknown
    sections = {field.default_factory: field.name for field in dataclasses.fields(Config)}
    made = {
        sections[section]: section(**{name: options[name] for name in its_names if name in options})
        for section, its_names in names.items()
    }
    return Config(**made)


def compared(
    rank: int, world_size: int, config: Config, mode: str, plant: Plant | None = None
) -> tuple[list[ParityStep], str]:
    """All steps and the report, on this rank."""
    with pytest.MonkeyPatch.context() as patch:
        if plant is not None:
            plant(patch, rank)
        small = shrink(resolve(config, world_size), mode, world_size)
        groups = build_process_groups(small.plan.topology, rank, "gloo", 60)
        steps = verified_steps(small, groups, torch.device("cpu"))
        return steps, found_text(small, steps)


def given_slices(weights: Mapping[str, Tensor]) -> DrawSlice:
    """Return a function that cuts one rank's slice from whole tensors by name. Missing vocabulary padding is zero."""

    def slice_of(spec: ParamSpec, tp_rank: int, tp: int) -> Tensor:
        whole = weights[spec.name]
        if whole.shape[0] < spec.shape[0]:
            whole = torch.cat([whole, whole.new_zeros(spec.shape[0] - whole.shape[0], *whole.shape[1:])])
        dim = spec.slicing.dim or 0
        return torch.cat([whole.narrow(dim, i.start, i.stop - i.start) for i in spec.intervals(tp_rank, tp)], dim)

    return slice_of
