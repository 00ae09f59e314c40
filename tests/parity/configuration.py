"""The configuration of a drawn grid: a model of a few tiny layers with every option of the grid, in fp64."""

from __future__ import annotations

from typing import Any

from megapipe.config.config import Config
from tests.parity.options import OPTIONS, Grid, schedule_name
from tests.tiny import make_config

SEQ = 12  # tp 2, 3 and 4 divide it
# options of a grid that are options of the configuration too
SAME_NAME = (
    *("micro_batch_size", "rank_order", "sequence_parallel", "use_distributed_optimizer", "overlap_grad_reduce"),
    *("overlap_param_gather", "qk_layernorm", "qk_layernorm_scope", "normalization", "layernorm_zero_centered_gamma"),
    *("activation", "norm_position", "embedding_scale", "residual_scale", "logits_scaling", "qk_layernorm_after_rope"),
    *(
        "attention_output_gate",
        "qk_l2_norm",
        "window_size",
        "softmax_scale",
        "attn_logit_softcapping",
        "final_logit_softcapping",
    ),
    "attention_softmax_in_fp32",
    *("hidden_dropout", "attention_dropout", "calculate_per_token_loss", "label_smoothing", "z_loss"),
    *("clip_grad", "weight_decay", "decoupled_lr"),
)
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
# options of the layers in turn, in place of the model's
STACKS: dict[str, tuple[str, ...]] = {
    "windows": ("window_size=3", "window_size=none softmax_scale=0.4", "window_size=7 attn_logit_softcapping=1.5"),
    "rotary": (
        "position_embedding_type=rope rotary_base=100",
        "position_embedding_type=none",
        "position_embedding_type=rope rotary_percent=0.5 rope_scaling_type=linear",
    ),
    "heads": ("num_query_groups=1 qk_layernorm=true", "num_query_groups={heads}", "qk_layernorm=false window_size=4"),
    "widths": (
        "ffn_hidden_size=12 activation=relu norm_position=around",
        "ffn_hidden_size=36 activation=swiglu norm_position=after",
        "activation=gelu norm_position=before",
    ),
    "missing parts": ("", "attention=none ffn_hidden_size=12", "mlp=none"),
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
    """Return the configuration of a whole grid."""
    num_layers, cut = _cut(grid["cut"], grid["pp"], grid["chunks"])
    heads = 6 if grid["tp"] == 3 else 4
    unit = grid["micro_batch_size"] * grid["dp"]
    if isinstance(grid["microbatches"], str):  # in the first three steps, such as "1, 2, 3"
        first = int(grid["microbatches"].split(",")[0]) * unit
        batch: dict[str, Any] = {"global_batch_size": first + 2 * unit, "rampup_batch_size": (first, unit, 2 * first)}
    else:
        batch = {"global_batch_size": grid["microbatches"] * unit}
    # in grids of larger microbatches, two layers of each stage are offloaded
    offload = {"cpu_offloading_num_layers": 2, "min_offloaded_tensor_size": 1} if grid["micro_batch_size"] == 2 else {}
    return make_config(
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
        tp=grid["tp"],
        pp=grid["pp"],
        chunks=grid["chunks"],
        pipeline_schedule=schedule_name(grid["schedule"], grid["family"]),
        microbatch_group_size_per_virtual_pipeline_stage=None if grid["microbatch_group"] == "pp" else grid["pp"] + 1,
        pipeline_memory_limit=grid["pp"] + 1 if grid["memory_limit"] == "pp + 1" else None,
        ddp_bucket_size=BUCKETS[grid["bucket"]],
        lr=0.02,
        dtype=dtype,
        **dict.fromkeys(DOCUMENTS[grid["documents"]], True),
        **POSITIONS[grid["positions"]],
        **VOCABULARIES[grid["vocabulary"]],
        **OPTIMIZERS[grid["optimizer"]],
        **P2P[grid["p2p"]],
        **_layers(grid["layers"], num_layers, heads),
        **_tp_overlap(grid),
        **_recompute(grid),
        **{name: grid[name] for name in SAME_NAME},
        **batch,
        **offload,
        **cut,
    )


def _layers(kind: str, num_layers: int, heads: int) -> dict[str, Any]:
    """Return the options that make layers differ: a frequency, a list, or a pattern, repeated in long stacks."""
    if kind in STACKS:
        words = tuple(f"1 {word.format(heads=heads)}".strip() for word in STACKS[kind])
        return {"layer_pattern": (*words, "...") if num_layers >= len(words) else words[:num_layers]}
    return {
        "alike": {},
        "windows skipped": {"window_attn_skip_freq": "2"},
        "rotary skipped": {"no_rope_freq": str([int(n % 2 == 0 and num_layers > 1) for n in range(num_layers)])},
    }[kind]


def _tp_overlap(grid: Grid) -> dict[str, Any]:
    """Run a linear's collectives in two chunks if a microbatch group is larger than pp: both kinds, or one by
    recompute."""
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
    """Return the number of layers and the options that partition them; none of the manual partitions is even."""
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
    if cut == "empty stages":  # the embedding alone, the head alone, and one stage in between
        counts = [0, 2, 0, *[1] * (stages - 4), 0][:stages]
    return sum(counts), {"pipeline_model_parallel_layout": f"E{'|'.join('t' * count for count in counts)}L"}


def _recompute(grid: Grid) -> dict[str, Any]:
    """Return the recompute options; full recompute of several layers keeps attention's results where attention is
    fused."""
    words = grid["recompute"]
    if words == "none":
        return {}
    method, _, number = words.partition(" ")
    if method == "budget":
        return {"recompute_memory_budget": float(number)}
    if method in ("uniform", "block"):
        is_unfused = grid["attention_dropout"] or grid["attn_logit_softcapping"] or grid["attention_softmax_in_fp32"]
        is_synchronous = grid["schedule"] in OPTIONS["schedule"]  # by its kind; asynchronous ones are given by name
        is_unfused = is_unfused or grid["layers"] == "windows"  # one of them is capped
        return {
            "recompute_granularity": "full",
            "recompute_method": method,
            "recompute_num_layers": int(number),
            "recompute_keep_attention": number == "2" and not is_unfused,
            "recompute_in_bubbles": number == "1" and grid["pp"] > 1 and is_synchronous,
        }
    return {"recompute_granularity": "selective", "recompute_modules": tuple(words.split())}
