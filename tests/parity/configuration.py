"""A drawn grid as a configuration: a model of a few tiny layers, every option that the grid names, fp64."""

from __future__ import annotations

import dataclasses
from typing import Any

from megapipe.config.config import Config
from megapipe.config.data import DataConfig
from megapipe.config.model import ModelConfig
from megapipe.config.offload import OffloadConfig
from megapipe.config.optimizer import OptimizerConfig
from megapipe.config.parallel import ParallelConfig
from megapipe.config.precision import PrecisionConfig
from megapipe.config.recompute import RecomputeConfig
from megapipe.config.training import TrainingConfig
from tests.parity.options import Grid, schedule_name

SEQ = 12  # tp 2, 3 and 4 divide it
BUCKETS = {"whole stage": None, "some parameters": 1200, "one parameter": 1}
DOCUMENTS = {
    "ignored": (),
    "masked loss": ("eod_mask_loss",),
    "own positions": ("reset_position_ids",),
    "own attention": ("reset_attention_mask",),
    "all": ("eod_mask_loss", "reset_position_ids", "reset_attention_mask"),
}
POSITIONS: dict[str, dict[str, Any]] = {
    "learned": {},
    "none": {"position_embedding_type": "none"},
    "rope": {"position_embedding_type": "rope"},
    "half rope, llama3": {"position_embedding_type": "rope", "rotary_percent": 0.5, "rope_scaling_type": "llama3"},
    "rope, yarn": {"position_embedding_type": "rope", "rope_scaling_type": "yarn"},
    "rope, linear": {"position_embedding_type": "rope", "rope_scaling_type": "linear", "rotary_base": 300.0},
}
VOCABULARIES: dict[str, dict[str, Any]] = {
    "full": {"vocab_size": 48, "make_vocab_size_divisible_by": 1},
    "padded": {"vocab_size": 43, "make_vocab_size_divisible_by": 4},
    "a rank of padding": {
        "vocab_size": 9,
        "make_vocab_size_divisible_by": 12,
    },  # with tp > 1 the last rank has no real row
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adam": {"optimizer": "adam", "adam_eps": 1e-3},
    "sgd": {"optimizer": "sgd"},
    "sgd without momentum": {"optimizer": "sgd", "sgd_momentum": 0.0},
}
P2P: dict[str, dict[str, Any]] = {
    "overlapped": {},
    "two receives ahead": {"pipeline_receive_depth": 2},
    "not overlapped": {"overlap_p2p_comm": False},
}


def configuration(grid: Grid, dtype: str = "fp64") -> Config:
    """The configuration of a whole grid."""
    num_layers, cut = _cut(grid["cut"], grid["pp"], grid["chunks"])
    return Config(
        model=_model(grid, num_layers),
        parallel=_parallel(grid, cut),
        recompute=_recompute(grid),
        # in grids of larger microbatches, two layers of each stage wait on the host
        offload=OffloadConfig(2, 1) if grid["micro_batch_size"] == 2 else OffloadConfig(),
        training=_training(grid),
        optimizer=OptimizerConfig(**_same_name(OptimizerConfig, grid) | {"lr": 0.02} | OPTIMIZERS[grid["optimizer"]]),
        precision=PrecisionConfig(dtype=dtype),
        data=DataConfig(**_flags(DOCUMENTS[grid["documents"]])),
    )


def _same_name(section: type, grid: Grid) -> dict[str, Any]:
    """The options that carry the name of a field of the section, and its values."""
    return {field.name: grid[field.name] for field in dataclasses.fields(section) if field.name in grid}


def _flags(names: tuple[str, ...]) -> dict[str, Any]:
    return dict.fromkeys(names, True)


def _model(grid: Grid, num_layers: int) -> ModelConfig:
    heads = 6 if grid["tp"] == 3 else 4
    return ModelConfig(
        num_layers=num_layers,
        hidden_size=20,
        ffn_hidden_size=24,
        num_attention_heads=heads,
        num_query_groups={"all": heads, "some": heads // 2, "one": 1}[grid["kv_heads"]],
        kv_channels=8,
        seq_length=SEQ,
        max_position_embeddings=SEQ + 2,
        rope_scaling_factor=4.0,
        rope_original_max_position_embeddings=8,
        add_bias_linear=grid["biases"] == "all",
        add_qkv_bias=grid["biases"] == "qkv",
        untie_embeddings_and_output_weights=not grid["tied"],
        **POSITIONS[grid["positions"]],
        **VOCABULARIES[grid["vocabulary"]],
        **_same_name(ModelConfig, grid),
    )


def _parallel(grid: Grid, cut: dict[str, Any]) -> ParallelConfig:
    return ParallelConfig(
        tensor_model_parallel_size=grid["tp"],
        pipeline_model_parallel_size=grid["pp"],
        num_virtual_stages_per_pipeline_rank=grid["chunks"],
        pipeline_schedule=schedule_name(grid["schedule"], grid["family"]),
        microbatch_group_size_per_virtual_pipeline_stage=None if grid["microbatch_group"] == "pp" else grid["pp"] + 1,
        pipeline_memory_limit=grid["pp"] + 1 if grid["memory_limit"] == "pp + 1" else None,
        ddp_bucket_size=BUCKETS[grid["bucket"]],
        **P2P[grid["p2p"]],
        **_tp_overlap(grid),
        **_same_name(ParallelConfig, grid),
        **cut,
    )


def _tp_overlap(grid: Grid) -> dict[str, Any]:
    """Where a microbatch group is larger than pp, a linear's collectives run in two chunks: both kinds or, by recompute, one of them."""
    if grid["microbatch_group"] == "pp":
        return {}
    gathers, reduces = {"layernorm": (True, False), "core_attn": (False, True)}.get(grid["recompute"], (True, True))
    return {
        "tp_comm_overlap": True,
        "tp_comm_overlap_chunks": 2,
        "tp_comm_overlap_ag": gathers,
        "tp_comm_overlap_rs": reduces,
    }


def _cut(cut: str, pp: int, chunks: int) -> tuple[int, dict[str, Any]]:
    """Number of layers and what says where they go; none of the cuts by hand is even."""
    stages = pp * chunks
    if cut == "cost":
        return stages + 1, {}
    if cut == "even":
        return stages if stages > 2 else 2 * stages, {"pipeline_balance": "even"}
    if cut == "ends counted":
        counted = {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True}
        return {1: 3, 2: 4}.get(stages, stages) - 2, counted
    if cut == "first and last":
        return stages, {"decoder_first_pipeline_num_layers": 2 * chunks, "decoder_last_pipeline_num_layers": 0}
    counts = [2] + [1] * (stages - 1)
    if cut == "empty stages":  # the embedding alone, the head alone, one between
        counts = [0, 2, 0, *[1] * (stages - 4), 0][:stages]
    return sum(counts), {"pipeline_model_parallel_layout": f"E{'|'.join('t' * count for count in counts)}L"}


def _recompute(grid: Grid) -> RecomputeConfig:
    """Full recompute of several layers keeps attention's results where attention is fused."""
    words = grid["recompute"]
    if words == "none":
        return RecomputeConfig()
    method, _, number = words.partition(" ")
    if method in ("uniform", "block"):
        written_out = grid["attention_dropout"] or grid["attn_logit_softcapping"] or grid["attention_softmax_in_fp32"]
        return RecomputeConfig("full", method, int(number), recompute_keep_attention=number == "2" and not written_out)
    return RecomputeConfig("selective", recompute_modules=tuple(words.split()))


def _training(grid: Grid) -> TrainingConfig:
    unit = grid["micro_batch_size"] * grid["dp"]
    if grid["microbatches"] == "1, 2, 3":  # in the three steps
        batch: dict[str, Any] = {"global_batch_size": 3 * unit, "rampup_batch_size": (unit, unit, 2 * unit)}
    else:
        batch = {"global_batch_size": grid["microbatches"] * unit}
    return TrainingConfig(**batch, **_same_name(TrainingConfig, grid))
