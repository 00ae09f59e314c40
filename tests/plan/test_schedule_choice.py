"""Schedules, chunks, groups and memory limits from the flags."""

from __future__ import annotations

import dataclasses

import pytest

from megapipe.config.load import load_config
from megapipe.config.parallel import ParallelConfig
from megapipe.plan.resolve import resolve
from megapipe.plan.schedule_choice import asked_chunks, group_size, memory_limit, schedule_and_chunks
from megapipe.schedule.families import SCHEDULES
from megapipe.schedule.simulate import simulate
from tests.config.examples import job
from tests.tiny import small_config

CHUNK_FLAGS = {
    "count": {"num_virtual_stages_per_pipeline_rank": 2},
    "layers": {"num_layers_per_virtual_pipeline_stage": 2},
    "layout": {"pipeline_model_parallel_layout": "Ett|tt|tt|ttL"},
}


def parallel(**fields: object) -> ParallelConfig:
    return ParallelConfig(pipeline_model_parallel_size=2, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("ways", [("count",), ("layers",), ("layout",), ("count", "layers", "layout")], ids="-".join)
def test_the_number_of_chunks_has_three_spellings(ways: tuple[str, ...]) -> None:
    fields = {name: value for way in ways for name, value in CHUNK_FLAGS[way].items()}
    assert asked_chunks(parallel(**fields), num_layers=8) == 2


def test_no_constraint_is_needed_without_any_of_them() -> None:
    assert asked_chunks(parallel(), num_layers=8) is None


V_SCHEDULES = [name for name, family in SCHEDULES.items() if family.chunks == 2 and family.is_synchronous]


@pytest.mark.parametrize("name", V_SCHEDULES)
def test_a_schedule_that_needs_two_chunks_takes_them_by_itself(name: str) -> None:
    assert schedule_and_chunks(parallel(pipeline_schedule=name), 8) == (name, 2)
    assert schedule_and_chunks(parallel(pipeline_schedule=name, **CHUNK_FLAGS["layers"]), 8) == (name, 2)


def test_only_schedules_with_groups_take_a_group_size() -> None:
    assert group_size(parallel(), "interleaved") == 2
    assert group_size(parallel(), "breadth-first") is None
    chosen = parallel(microbatch_group_size_per_virtual_pipeline_stage=3)
    assert group_size(chosen, "interleaved") == 3


def test_only_the_automatic_scheduler_takes_a_memory_limit() -> None:
    assert memory_limit(parallel(), "zb-auto") == 2
    assert memory_limit(parallel(pipeline_memory_limit=5), "zb-auto") == 5
    assert memory_limit(parallel(), "zb-h1") is None


def test_the_automatic_scheduler_stays_within_the_limit_and_uses_uneven_stages() -> None:
    """The head costs more than a layer; a larger memory limit gives a shorter step."""
    sizes = {
        "num_layers": 9,
        "pipeline_model_parallel_size": 4,
        "global_batch_size": 24,
        "pipeline_schedule": "zb-auto",
        "vocab_size": 512,
    }
    plans = {limit: resolve(small_config(**sizes, pipeline_memory_limit=limit), 4) for limit in (2, 4, 8)}
    spans = []
    for limit, plan in plans.items():
        timeline = simulate(plan.schedule(12), plan.stage_costs)
        assert max(timeline.peak_live_chunks) <= limit
        spans.append(timeline.makespan_seconds)
    assert spans[0] > spans[1] >= spans[2]


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_resolved_plan_resolves_again_to_the_same(name: str) -> None:
    needed = {"num_virtual_stages_per_pipeline_rank": 2} if name in ("interleaved", "breadth-first", "hanayo") else {}
    if not SCHEDULES[name].is_synchronous:
        needed = {"untie_embeddings_and_output_weights": True}
    asked = small_config(pipeline_model_parallel_size=2, pipeline_schedule=name, global_batch_size=8, **needed)
    plan = resolve(asked, 2)
    again = resolve(dataclasses.replace(asked, parallel=plan.config.parallel), 2)
    assert again.config == plan.config
    assert again.schedule_name == plan.schedule_name


PIPEDREAM = "--pipeline-model-parallel-size 2 --pipeline-schedule pipedream"
UNTIED = "--untie-embeddings-and-output-weights"


def test_an_asynchronous_schedule_without_such_options_is_accepted() -> None:
    flags = f"{PIPEDREAM} {UNTIED} --fp16 --loss-scale 1024 --global-batch-size 4"
    assert resolve(load_config(job(flags)).config, 2).schedule_name == "pipedream"
    of_all_ranks = "--fp16 --calculate-per-token-loss --num-experts 4 --mtp-num-layers 1 --position-embedding-type rope"
    assert resolve(
        load_config(job(f"{PIPEDREAM}-2bw {of_all_ranks} --global-batch-size 4")).config, 2
    ).accumulates_apart
