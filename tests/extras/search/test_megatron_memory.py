"""Megatron's estimate against figures worked out by hand and published by its authors."""

from __future__ import annotations

import pytest

from megapipe.extras.search.megatron_memory import block_parameters, megatron_memory
from megapipe.plan.hardware import GIB
from megapipe.plan.resolve import resolve
from tests.extras.search.published import published_runs
from tests.plan.test_resolve import wish

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
    """Figure 1, GiB. The figure counts 12 h^2 parameters a layer and 34 / t alone: ours has norms, embedding and what it keeps besides."""
    run = RUNS[name]
    plan = run.plan()
    found, t, model = megatron_memory(plan), plan.topology, plan.config.model
    without_embedding = block_parameters(model) / t.pp / t.tp * 18 / GIB
    assert without_embedding == pytest.approx(state, rel=1e-3)
    tokens = model.seq_length * plan.config.training.micro_batch_size
    if t.pp > 1:
        in_flight = 1 + (t.pp - 1) / (t.pp * plan.num_chunks) if plan.num_chunks > 1 else 1
        besides = in_flight * tokens * (8 + model.hidden_size) * t.pp / t.tp
    else:
        besides = tokens * (8 + model.hidden_size + 4 * model.hidden_size + 4 * 51200) / t.tp
    assert (found.activation_bytes - besides) / GIB == pytest.approx(activations, rel=1e-9)


def test_a_small_model_by_hand() -> None:
    """8 layers, hidden 64, ffn 256, 8 heads, sequence 32, vocabulary 128; tp 2 x pp 2 x dp 2, microbatch 2, 2 microbatches."""
    changes = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "global_batch_size": 8}
    plain = resolve(wish(make_vocab_size_divisible_by=64, **changes), 8)
    # a layer: 4 x 64 x 64 + 2 x 64 x 256 + 4 x 64 = 49,408; 8 and the final norm 395,392; half of it and an embedding of 8,192, by tp
    assert megatron_memory(plain).parameters == (395_392 / 2 + 8_192) / 2 == 102_944
    assert megatron_memory(plain).state_bytes == 102_944 * 18
    sharded = resolve(wish(make_vocab_size_divisible_by=64, use_distributed_optimizer=True, **changes), 8)
    assert megatron_memory(sharded).state_bytes == 102_944 * (6 + 12 / 2)
    # 64 tokens: a layer 64 x 64 x (10 + 12) = 90,112; 8 of them, and 2 x 64 x 72; 5 % on top
    assert megatron_memory(plain).activation_bytes == pytest.approx(1.05 * (8 * 90_112 + 9_216))
    more = {"use_distributed_optimizer": True, "sequence_parallel": True, "recompute_granularity": "selective"}
    # a layer 64 x 64 x 34 = 139,264
    assert (
        megatron_memory(resolve(wish(make_vocab_size_divisible_by=64, **more, **changes), 8)).activation_bytes
        == (8 * 139_264 + 9_216) / 2
    )
