"""Exposed time of chunked collectives, predicted for a machine whose GEMM times are proportional to their FLOPs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megapipe.config.config import resolve_model
from megapipe.config.model import ModelConfig, PrecisionConfig
from megapipe.config.parallel import RecomputeConfig
from megapipe.layers.model import model_spec
from megapipe.layers.table import WHOLE, CommChunks, RankShape
from megapipe.plan.hardware import Link, hardware_named
from megapipe.plan.layer_time import OpSeconds, head_seconds, layer_seconds
from megapipe.schedule.action import Op

TP, LATENCY = 8, 1e-6
FULL = RecomputeConfig("full", "uniform", 1)
SMOOTH = replace(hardware_named("h100"), gemm_shares=((1, 0.5), (8192, 0.5)), memory_bytes_per_second=1e18)
GPT_22B = ModelConfig(num_layers=48, hidden_size=6144, num_attention_heads=64, seq_length=2048, vocab_size=51200)
MODEL = model_spec(resolve_model(GPT_22B, TP), PrecisionConfig())


def of(
    chunks: CommChunks, rate: float, sequence_parallel: bool = True, recompute: RecomputeConfig | None = None
) -> tuple[OpSeconds, OpSeconds, float]:
    """Return (seconds of a layer, seconds of the head, transfer seconds of one collective of hidden states)."""
    shape = RankShape(1, 2048, "bf16", TP, sequence_parallel, recompute or RecomputeConfig(), chunks=chunks)
    wire, link = shape.tokens * 6144 * 2 * (TP - 1) / TP / rate, Link(rate, LATENCY)
    return layer_seconds(MODEL.layers[0], shape, SMOOTH, link), head_seconds(MODEL, shape, SMOOTH, link), wire


@pytest.mark.parametrize("count", [2, 4, 8])
def test_on_a_fast_link_one_chunk_of_each_remains(count: int) -> None:
    layer, head, wire = of(CommChunks(count, count), 1e13)
    chunk = wire / count + LATENCY
    assert layer.forward["tp"] == pytest.approx(4 * chunk)
    assert head.forward["tp"] == pytest.approx(chunk)
    assert layer.inputs["tp"] == pytest.approx(
        4 * chunk
    )  # two gathers of output gradients; two reductions, where W is split off
    plain, _, wire = of(CommChunks(count, count), 1e13, sequence_parallel=False)
    assert plain.forward["tp"] == pytest.approx(2 * 2 * (wire / count + LATENCY))


def test_on_a_slow_link_no_more_is_hidden_than_its_gemms_take() -> None:
    whole, cut = (of(chunks, 1e9)[0] for chunks in (WHOLE, CommChunks(4, 4)))
    saved = whole.of(Op.F) - cut.of(Op.F)
    assert saved == pytest.approx(0.75 * whole.forward["gemm"] - 4 * 3 * LATENCY)


def test_each_collective_is_chunked_separately_and_a_full_backward_gains_only_by_gathers() -> None:
    whole, gathers, sums, both = (
        of(chunks, 1e12)[0] for chunks in (WHOLE, CommChunks(4, 1), CommChunks(1, 4), CommChunks(4, 4))
    )
    gained = [whole.of(Op.F) - each.of(Op.F) for each in (gathers, sums, both)]
    assert gained[0] > 0 and gained[1] > 0 and gained[2] == pytest.approx(sum(gained[:2]))
    assert sums.of(Op.B) == pytest.approx(whole.of(Op.B))
    assert gathers.of(Op.B) == pytest.approx(both.of(Op.B)) and both.of(Op.B) < whole.of(Op.B)
    assert both.of(Op.I) < gathers.of(Op.I) < whole.of(Op.I)
    assert both.of(Op.W) == whole.of(Op.W)


def test_a_recomputed_forward_gains_again() -> None:
    layer, _, _ = of(CommChunks(4, 4), 1e13, recompute=FULL)
    assert layer.inputs["tp"] == pytest.approx(2 * layer.forward["tp"])


def test_many_chunks_cost_what_small_gemms_and_latencies_do() -> None:
    """With the efficiency curve of a real GPU, a chunk of a few tokens costs more than it hides."""
    hardware = hardware_named("h100")
    shapes = [RankShape(1, 2048, "bf16", TP, True, chunks=CommChunks(count, count)) for count in (4, 256)]
    few, many = (layer_seconds(MODEL.layers[0], shape, hardware, hardware.node) for shape in shapes)
    assert few.of(Op.F) < many.of(Op.F)
