"""The explanations of a search: why the winner wins, and the warnings about a layout as configured."""

from __future__ import annotations

import dataclasses

import pytest

from megapipe.config.config import Config
from megapipe.config.parallel import SHARDED_PARAMS
from megapipe.extras.search.search import Candidate, as_configured, search
from megapipe.extras.search.search_report import fill_the_pipeline, oddities, reasons
from megapipe.plan.hardware import GIB, hardware_named
from tests.tiny import small_config

H100 = dataclasses.replace(hardware_named("h100"), ranks_per_node=4)


def large(**changes: object) -> Config:
    sizes = {
        "num_layers": 16,
        "hidden_size": 2048,
        "num_attention_heads": 16,
        "seq_length": 2048,
        "vocab_size": 32000,
        "dtype": "bf16",
    }
    return small_config(**{**sizes, "micro_batch_size": 1, "global_batch_size": 16, **changes})


def configured(world_size: int, **changes: object) -> Candidate:
    found = as_configured(large(**changes), world_size, H100)
    assert isinstance(found, Candidate), found
    return found


def remarks_on(candidate: Candidate) -> str:
    return "\n".join(oddities(candidate, None, H100))


def test_a_model_that_fits_a_node_has_no_pipeline_and_its_cost_is_given() -> None:
    found = search(
        large(), 4, H100, lambda layout: layout.recompute.recompute_granularity is None and layout.micro_batch_size == 1
    )
    assert found.best[0].layout.pp == 1
    (words,) = (line for line in reasons(found, H100) if "alone" in line)
    assert "with a pipeline" in words and "has a bubble of " in words


def test_a_pipeline_and_recompute_are_explained_by_what_would_not_fit() -> None:
    small_memory = dataclasses.replace(H100, memory_bytes=int(2.2 * GIB), nccl_bytes=0)
    found = search(large(global_batch_size=32), 16, small_memory, lambda layout: not layout.sharding)
    words = "\n".join(reasons(found, small_memory))
    winner = found.best[0].layout
    assert winner.pp > 1 and f"pp {winner.pp}" in words
    if winner.recompute.recompute_granularity:
        assert "without it a step would take" in words and "GiB of 2.02 GiB" in words


def test_a_large_bubble_is_reported_with_the_microbatches_that_lower_it() -> None:
    candidate = configured(4, pipeline_model_parallel_size=4, global_batch_size=8)
    (words,) = fill_the_pipeline(candidate)
    raised = int(words.split("raise the microbatches to ")[1].split()[0])
    assert (
        "8 microbatches feed 4 pipeline ranks" in words
        and raised > 8
        and raised % 4 == 0
        and "or use 2 chunks" in words
    )
    better = configured(4, pipeline_model_parallel_size=4, global_batch_size=raised)
    assert better.time.bubble_share == pytest.approx(0.05, abs=0.02)


@pytest.mark.parametrize(
    ("world_size", "changes", "words"),
    [
        (
            8,
            {"tensor_model_parallel_size": 8, "allow_tp_across_nodes": True, "sequence_parallel": True},
            "tp 8 crosses nodes of 4",
        ),
        (
            16,
            {
                "tensor_model_parallel_size": 4,
                "pipeline_model_parallel_size": 4,
                "rank_order": "pp-tp-cp-dp",
                "allow_tp_across_nodes": True,
                "sequence_parallel": True,
            },
            "while pp stay",
        ),
        (
            8,
            {"pipeline_model_parallel_size": 4, "rank_order": "tp-cp-pp-dp"},
            "pp 4 stays inside a node while gradients cross nodes",
        ),
        (
            8,
            {"pipeline_model_parallel_size": 8, "global_batch_size": 4},
            "4 microbatches cannot fill a pipeline of 8 ranks",
        ),
        (4, {"tensor_model_parallel_size": 4}, "--sequence-parallel is off"),
        (4, {"overlap_grad_reduce": False}, "--overlap-grad-reduce is off"),
    ],
    ids=[
        "tp across nodes",
        "axes inverted",
        "pp inside",
        "starved",
        "no sequence parallelism",
        "no overlap",
    ],
)
def test_doubtful_options_are_reported(world_size: int, changes: dict[str, object], words: str) -> None:
    assert words in remarks_on(configured(world_size, **changes))


def test_a_sound_layout_gets_no_warning() -> None:
    good = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "use_distributed_optimizer": True}
    assert remarks_on(configured(4, overlap_grad_reduce=True, overlap_param_gather=True, **good)) == ""


def test_more_model_parallel_ranks_than_needed_are_reported() -> None:
    wide = configured(4, tensor_model_parallel_size=4, sequence_parallel=True)
    narrow = configured(4, use_distributed_optimizer=True, overlap_grad_reduce=True)
    assert "dp could be 4 instead of 1" in "\n".join(oddities(wide, narrow, H100))


def test_sharded_weights_are_explained_by_what_they_save_and_expose() -> None:
    small_memory = dataclasses.replace(H100, memory_bytes=int(6 * GIB))
    found = search(
        large(global_batch_size=32), 8, small_memory, lambda each: each.pp == 1 and each.sharding == SHARDED_PARAMS
    )
    assert found.best and found.best[0].layout.units == 16
    (words,) = (line for line in reasons(found, small_memory) if line.startswith("weights sharded: a rank gathers "))
    assert "with the optimizer sharded alone a step would take" in words and "but pp_rank 0 needs" in words
    assert "with sharded weights a copy of the model fits" in "\n".join(reasons(found, small_memory))
