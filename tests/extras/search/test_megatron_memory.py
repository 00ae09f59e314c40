"""Megatron's memory estimate against values computed by hand and values published by its authors."""

from __future__ import annotations

from typing import Any

import pytest

from megapipe.extras.search.search_report import block_parameters, megatron_memory
from megapipe.plan.hardware import GIB
from megapipe.plan.resolve import resolve
from tests.extras.search.published import published_runs
from tests.tiny import small_config

RUNS = {run.name: run for run in published_runs()}


@pytest.mark.parametrize(
    ("name", "state", "activations"),
    [
        ("22B selective, sp", 45.5625, 9.5625),
        ("175B selective, sp", 45.5625, 12.3515625),
        ("530B selective, sp", 31.640625, 23.076171875),
        ("1T selective, sp", 32.958984375, 26.5625),
    ],
)
def test_it_gives_the_figures_of_korthikanti_2022(name: str, state: float, activations: float) -> None:
    """Compare with figure 1, in GiB.

    The figure counts 12 h^2 parameters per layer and 34 / t only; our estimate adds norms, the embedding and its
    activations.
    """
    run = RUNS[name]
    plan = run.plan()
    found, t, model = megatron_memory(plan), plan.topology, plan.config.model
    without_embedding = block_parameters(model).total() / t.pp / t.tp * 18 / GIB
    assert without_embedding == pytest.approx(state, rel=1e-3)
    tokens = model.seq_length * plan.config.training.micro_batch_size
    if t.pp > 1:
        in_flight = 1 + (t.pp - 1) / (t.pp * plan.num_chunks) if plan.num_chunks > 1 else 1
        besides = in_flight * tokens * (8 + model.hidden_size) * t.pp / t.tp
    else:
        besides = tokens * (8 + model.hidden_size + 4 * model.hidden_size + 4 * 51200) / t.tp
    assert (found.activation_bytes - besides) / GIB == pytest.approx(activations, rel=1e-9)


def test_a_small_model_by_hand() -> None:
    """Compare with values computed by hand.

    The model has 8 layers, hidden 64, ffn 256, 8 heads, sequence 32 and vocabulary 128, on tp 2 x pp 2 x dp 2 with 2
    microbatches of size 2.
    """
    changes = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "global_batch_size": 8}
    plain = resolve(small_config(make_vocab_size_divisible_by=64, **changes), 8)
    # A layer has 4 x 64 x 64 + 2 x 64 x 256 = 49,152 parameters that tp cuts and norms of 4 x 64; the final norm: 128.
    # A rank holds half of the layers and the embedding of 8,192, and whole norms.
    assert megatron_memory(plain).parameters == (393_216 / 2 + 8_192) / 2 + 2_176 / 2 == 103_488
    assert megatron_memory(plain).state_bytes == 103_488 * 18
    sharded = resolve(small_config(make_vocab_size_divisible_by=64, use_distributed_optimizer=True, **changes), 8)
    assert megatron_memory(sharded).state_bytes == 103_488 * (6 + 12 / 2)
    # 64 tokens: 64 x 64 x (10 + 12) = 90,112 bytes per layer; 8 layers, and 2 x 64 x 72; plus 5 %
    assert megatron_memory(plain).activation_bytes == pytest.approx(1.05 * (8 * 90_112 + 9_216))
    more = {"use_distributed_optimizer": True, "sequence_parallel": True, "recompute_granularity": "selective"}
    # 64 x 64 x 34 = 139,264 bytes per layer
    assert (
        megatron_memory(resolve(small_config(make_vocab_size_divisible_by=64, **more, **changes), 8)).activation_bytes
        == (8 * 139_264 + 9_216) / 2
    )


def test_experts_and_latent_attention_by_hand() -> None:
    """The same model with 8 experts of width 32 and a shared one of 48 in every second layer, over ep 4, and latents of
    16 and 24 channels; the figures are those of Megatron-LM 0.19's formulas.
    """
    latent = {"multi_latent_attention": True, "q_lora_rank": 16, "kv_lora_rank": 24, "qk_head_dim": 8}
    latent |= {"qk_pos_emb_head_dim": 4, "v_head_dim": 8, "qk_layernorm": True, "position_embedding_type": "rope"}
    experts = {"num_experts": 8, "moe_ffn_hidden_size": 32, "moe_shared_expert_intermediate_size": 48}
    grid = {"tp": 2, "sp": True, "pp": 2, "ep": 4, "etp": 1, "global_batch_size": 16, "zero": True}
    options: dict[str, Any] = {**latent, **experts, **grid, "moe_layer_freq": "2", "normalization": "RMSNorm"}
    plan = resolve(small_config(make_vocab_size_divisible_by=64, add_bias_linear=False, **options), 16)
    queries = 16 * (64 + 8 * 12 + 1)
    keys = 24 * (64 + 8 * 16 + 1) + 64 * 4
    attention = queries + keys + 8 * 8 * 64
    sharded = 8 * attention + 4 * 2 * 64 * 256 + 4 * 2 * 64 * 48
    replicated, routed = 8 * 2 * 64 + 64 + 4 * 64 * 8, 4 * 2 * 64 * 32 * 8
    dense = (sharded / 2 + 8_192) / 2 + replicated / 2
    found = megatron_memory(plan)
    assert found.parameters == dense + routed / 2 / 4
    assert (plan.topology.dp, plan.topology.edp) == (4, 2)
    assert found.state_bytes == dense * (6 + 12 / 4) + routed / 2 / 4 * (6 + 12 / 2)
