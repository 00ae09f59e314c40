"""Megatron's memory estimate against values computed by hand and values published by its authors."""

from __future__ import annotations

import pytest

from megapipe.extras.search.megatron_memory import block_parameters, megatron_memory
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
    """Compare with values computed by hand.

    The model has 8 layers, hidden 64, ffn 256, 8 heads, sequence 32 and vocabulary 128, on tp 2 x pp 2 x dp 2 with 2
    microbatches of size 2.
    """
    changes = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "global_batch_size": 8}
    plain = resolve(small_config(make_vocab_size_divisible_by=64, **changes), 8)
    # A layer has 4 x 64 x 64 + 2 x 64 x 256 + 4 x 64 = 49,408 parameters, 8 layers and the final norm 395,392. A rank
    # holds half of them and the embedding of 8,192, divided by tp.
    assert megatron_memory(plain).parameters == (395_392 / 2 + 8_192) / 2 == 102_944
    assert megatron_memory(plain).state_bytes == 102_944 * 18
    sharded = resolve(small_config(make_vocab_size_divisible_by=64, use_distributed_optimizer=True, **changes), 8)
    assert megatron_memory(sharded).state_bytes == 102_944 * (6 + 12 / 2)
    # 64 tokens: 64 x 64 x (10 + 12) = 90,112 bytes per layer; 8 layers, and 2 x 64 x 72; plus 5 %
    assert megatron_memory(plain).activation_bytes == pytest.approx(1.05 * (8 * 90_112 + 9_216))
    more = {"use_distributed_optimizer": True, "sequence_parallel": True, "recompute_granularity": "selective"}
    # 64 x 64 x 34 = 139,264 bytes per layer
    assert (
        megatron_memory(resolve(small_config(make_vocab_size_divisible_by=64, **more, **changes), 8)).activation_bytes
        == (8 * 139_264 + 9_216) / 2
    )
