"""Configurations that plan, dry run and real ranks are compared on, and batches without meaning."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from megapipe.config.config import Config
from megapipe.config.model import ModelConfig
from megapipe.config.optimizer import OptimizerConfig
from megapipe.config.training import TrainingConfig
from megapipe.data.batch import Batch, DocumentRules
from megapipe.plan.resolve import resolve
from megapipe.plan.run_plan import RunPlan

LLAMA: dict[str, Any] = {
    "num_query_groups": 2,
    "ffn_hidden_size": 384,
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "activation": "swiglu",
    "add_bias_linear": False,
    "hidden_dropout": 0.0,
}
TP2 = {"tensor_model_parallel_size": 2}
SP2 = TP2 | {"sequence_parallel": True}
OVERLAP = {"tp_comm_overlap": True}
PP2 = {"pipeline_model_parallel_size": 2}
PP4 = {"pipeline_model_parallel_size": 4}
FP8 = {"fp8_format": "hybrid"}
ZERO1 = {"use_distributed_optimizer": True}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def selective(*modules: str) -> dict[str, Any]:
    return {"recompute_granularity": "selective", "recompute_modules": modules}


def make_plan(world_size: int, changes: dict[str, Any], base: dict[str, Any] | None = None) -> RunPlan:
    """A GPT-2 shape of 8 layers, hidden 128, sequence 128; base: fields of it that are otherwise."""
    config = Config(
        model=ModelConfig(
            num_layers=8,
            hidden_size=128,
            num_attention_heads=8,
            seq_length=128,
            vocab_size=1000,
            make_vocab_size_divisible_by=8,
            hidden_dropout=0.1,
            attention_dropout=0.0,
            untie_embeddings_and_output_weights=True,
        ),
        training=TrainingConfig(micro_batch_size=2, global_batch_size=16, train_iters=10),
        optimizer=OptimizerConfig(lr=1e-2),
    )
    for name, value in ((base or {}) | changes).items():
        section = next(
            f.name
            for f in dataclasses.fields(config)
            if name in {g.name for g in dataclasses.fields(getattr(config, f.name))}
        )
        config = dataclasses.replace(
            config, **{section: dataclasses.replace(getattr(config, section), **{name: value})}
        )
    return resolve(config, world_size)


def read_for(plan: RunPlan) -> Any:
    """(dp_rank, microbatch) -> a batch of token ids that the vocabulary has."""
    micro, seq = plan.config.training.micro_batch_size, plan.config.model.seq_length
    data = plan.config.data
    rules = DocumentRules(0, data.reset_position_ids, data.reset_attention_mask, data.eod_mask_loss)

    def read(dp_rank: int, k: int) -> Batch:
        samples = np.random.default_rng([dp_rank, k]).integers(1, plan.config.model.vocab_size, (micro, seq + 1))
        return Batch.of(samples.astype(np.int64), tuple(range(micro)), rules)

    return read
