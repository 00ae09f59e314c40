"""A short step can replace a long one in a prediction, and every overlap is an advantage, as the search assumes."""

from __future__ import annotations

import dataclasses

import pytest

from megapipe.config.config import Config
from megapipe.extras.search.layout import RECOMPUTES, Layout
from megapipe.extras.search.search import ShortSteps, predict
from megapipe.plan.hardware import hardware_named
from megapipe.plan.memory import all_rank_memory
from megapipe.plan.resolve import resolve
from megapipe.plan.step_time import predict_step
from tests.tiny import small_config

A100 = dataclasses.replace(hardware_named("a100-80"), ranks_per_node=4)
SLICED = {"seq_length": 16384, "pipe_sp_splits": 4, "hidden_dropout": 0.0, "attention_dropout": 0.0}


def config_of(**changes: object) -> Config:
    sizes = {"num_layers": 9, "hidden_size": 256, "num_attention_heads": 4, "seq_length": 128, "vocab_size": 5000}
    return small_config(**{**sizes, "global_batch_size": 61, "dtype": "bf16", **changes})


@pytest.mark.parametrize(
    ("schedule", "chunks"), [("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("zb-v", 2), ("v-half", 2), ("v-min", 2)]
)
def test_a_short_step_predicts_the_time_and_memory_of_a_long_one(schedule: str, chunks: int) -> None:
    config = config_of()
    layout = Layout(1, 3, chunks, schedule, 1, RECOMPUTES[0])
    whole = predict(config, layout, 3, A100)
    steps = ShortSteps(config, 3, A100)
    # with slow messages, as here, some schedules become periodic only after several times pp microbatches
    assert steps.seconds(layout) == pytest.approx(whole.time.seconds, rel=0.012)
    assert steps.need(layout) == whole.peak_bytes


@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("interleaved", 3), ("zb-h1", 1), ("zb-v", 2)])
@pytest.mark.parametrize("slices", [2, 4])
def test_a_short_step_with_slices_predicts_the_time_and_memory_of_a_long_one(
    schedule: str, chunks: int, slices: int
) -> None:
    config = config_of(**SLICED)
    layout = Layout(1, 3, chunks, schedule, 1, RECOMPUTES[0], slices=slices)
    whole = predict(config, layout, 3, A100)
    steps = ShortSteps(config, 3, A100)
    assert steps.seconds(layout) == pytest.approx(whole.time.seconds, rel=0.003)
    assert steps.need(layout) == whole.peak_bytes


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(("schedule", "chunks"), [("1f1b", 1), ("interleaved", 3), ("zb-v", 2), ("dualpipe", 1)])
def test_overlaps_never_slow_a_step_nor_fill_memory(schedule: str, chunks: int, tp: int) -> None:
    """The search therefore enables all overlaps."""
    layout = Layout(tp, 2, chunks, schedule, 1, RECOMPUTES[0], distributed_optimizer=True)
    overlapped = layout.applied_to(config_of(num_layers=12, global_batch_size=48))
    off = dataclasses.replace(
        overlapped.parallel, overlap_grad_reduce=False, overlap_param_gather=False, overlap_p2p_comm=False
    )
    plans = [resolve(each, 4 * tp, 4) for each in (overlapped, dataclasses.replace(overlapped, parallel=off))]
    times = [predict_step(plan, A100).seconds for plan in plans]
    assert times[0] < times[1]
    assert [rank.total for rank in all_rank_memory(plans[0])] <= [rank.total for rank in all_rank_memory(plans[1])]


def test_logits_in_chunks_are_computed_once_more() -> None:
    layout = Layout(1, 2, 1, "1f1b", 1, RECOMPUTES[0])
    whole, in_chunks = (
        predict(config_of(vocab_size=60000, global_batch_size=8, cross_entropy_chunk_size=chunk), layout, 2, A100)
        for chunk in (None, 32)
    )
    assert whole.time.seconds < in_chunks.time.seconds
