"""The tiny model of the tests, as options and as flags, and builders of configurations."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from megapipe.assembly.datasets import planned
from megapipe.config.config import Config
from megapipe.config.load import load_config
from megapipe.plan.run_plan import RunPlan

SHORT = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "chunks": "num_virtual_stages_per_pipeline_rank",
    "sp": "sequence_parallel",
    "zero": "use_distributed_optimizer",
    "ep": "expert_model_parallel_size",
    "etp": "expert_tensor_parallel_size",
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
NOPE = {"position_embedding_type": "none", "nope_query_scale": 0.7, "nope_query_scale_length": 3}
LLAMA: dict[str, Any] = {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "activation": "swiglu",
    "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True,
    "num_query_groups": 2,
}
SMALL: dict[str, Any] = {
    "num_layers": 8,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "seq_length": 32,
    "vocab_size": 100,
    "micro_batch_size": 2,
    "train_iters": 10,
    "lr": 1e-3,
}  # enough layers and heads for plans of many grids
TINY_FLAGS = (
    "--num-layers 2 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --vocab-size 32 --micro-batch-size 1 "
    "--make-vocab-size-divisible-by 8 --lr 1e-3 --log-interval 1 --eval-iters 0 --device cpu"
).split()


def make_config(**options: Any) -> Config:
    """Build a configuration from the fields of all sections at once; SHORT lists abbreviations."""
    options = {SHORT.get(name, name): value for name, value in options.items()}
    sections: dict[str, Any] = {}
    for section in dataclasses.fields(Config):
        assert isinstance(section.default_factory, type)
        names = {field.name for field in dataclasses.fields(section.default_factory)} & options.keys()
        sections[section.name] = section.default_factory(**{name: options.pop(name) for name in names})
    assert not options, f"no section has the options {sorted(options)}"
    return Config(**sections)


def tiny_config(**options: Any) -> Config:
    """Build the configuration of the tiny model with other options."""
    return make_config(**TINY | {SHORT.get(name, name): value for name, value in options.items()})


def small_config(**options: Any) -> Config:
    """Build the configuration of the small model of the plan's tests with other options."""
    return make_config(**SMALL | options)


def plan_for(flags: Sequence[str], num_ranks: int, ranks_per_node: int | None = None) -> RunPlan:
    """Plan flags and YAML files on that many ranks; the job may be incomplete."""
    return planned(load_config(flags, is_job=False), num_ranks, ranks_per_node)
