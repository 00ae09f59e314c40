"""Schedules, chunks, groups and memory limits from the flags.

Combinations that do not fit together are rejected with a remedy.
"""

from __future__ import annotations

import dataclasses

import pytest

from megapipe.config.load import load_config
from megapipe.config.parallel import ParallelConfig
from megapipe.errors import ConfigError
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


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            CHUNK_FLAGS["count"] | {"num_layers_per_virtual_pipeline_stage": 4},
            r"rank gives 2, .*stage gives 1; keep one",
        ),
        (
            CHUNK_FLAGS["layout"] | {"num_virtual_stages_per_pipeline_rank": 4},
            r"rank gives 4, .*layout gives 2; keep one",
        ),
        (
            CHUNK_FLAGS["layout"] | {"num_layers_per_virtual_pipeline_stage": 1},
            r"stage gives 4, .*layout gives 2; keep one",
        ),
        ({"num_layers_per_virtual_pipeline_stage": 3}, r"8 layers are not a multiple of 3 x 2"),
        (
            {"pipeline_model_parallel_layout": "Ett|tt|ttttL"},
            r"3 stages, not a multiple of --pipeline-model-parallel-size 2",
        ),
        ({"pipeline_model_parallel_layout": "Ett|(tt|ttttL"}, r"opens '\('"),
    ],
    ids=["count_and_layers", "count_and_layout", "layers_and_layout", "indivisible", "odd_layout", "unreadable_layout"],
)
def test_spellings_that_disagree_or_do_not_divide_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        asked_chunks(parallel(**fields), num_layers=8)


V_SCHEDULES = [name for name, family in SCHEDULES.items() if family.chunks == 2 and family.is_synchronous]


@pytest.mark.parametrize("name", V_SCHEDULES)
def test_a_schedule_that_needs_two_chunks_takes_them_by_itself(name: str) -> None:
    assert schedule_and_chunks(parallel(pipeline_schedule=name), 8) == (name, 2)
    assert schedule_and_chunks(parallel(pipeline_schedule=name, **CHUNK_FLAGS["layers"]), 8) == (name, 2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"pipeline_schedule": "interleaved"},
            r"interleaved needs chunks; give --num-virtual-stages-per-pipeline-rank 2 or more, or choose 1f1b",
        ),
        ({"pipeline_schedule": "breadth-first"}, r"breadth-first needs chunks; .*choose gpipe"),
        (
            {"pipeline_schedule": "zb-h1", **CHUNK_FLAGS["count"]},
            r"zb-h1 runs one chunk per rank, but 2 .* choose interleaved or breadth-first",
        ),
        ({"pipeline_schedule": "1f1b", **CHUNK_FLAGS["layout"]}, r"1f1b runs one chunk per rank, but 2"),
        (
            {"pipeline_schedule": "zb-v", "num_virtual_stages_per_pipeline_rank": 3},
            r"zb-v always has 2 chunks .* but 3 were asked for; leave",
        ),
        (
            {"pipeline_schedule": "v-min", "num_virtual_stages_per_pipeline_rank": 1},
            r"v-min always has 2 chunks .* but 1 were asked for; leave",
        ),
        (
            {"pipeline_schedule": "v-half", "pipeline_model_parallel_size": 1},
            r"v-half .* needs --pipeline-model-parallel-size of at least 2",
        ),
    ],
    ids=["interleaved", "breadth-first", "zb-h1", "1f1b", "three", "one", "one_rank"],
)
def test_a_schedule_and_chunks_that_do_not_fit_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        schedule_and_chunks(
            ParallelConfig(**{"pipeline_model_parallel_size": 2} | fields),  # type: ignore[arg-type]
            num_layers=8,
        )


def test_only_schedules_with_groups_take_a_group_size() -> None:
    assert group_size(parallel(), "interleaved") == 2
    assert group_size(parallel(), "breadth-first") is None
    chosen = parallel(microbatch_group_size_per_virtual_pipeline_stage=3)
    assert group_size(chosen, "interleaved") == 3
    with pytest.raises(ConfigError, match=r"stage 3 .*zb-v"):
        group_size(chosen, "zb-v")
    with pytest.raises(ConfigError, match=r"stage 1 .*--pipeline-model-parallel-size 2; use at least 2"):
        group_size(parallel(microbatch_group_size_per_virtual_pipeline_stage=1), "interleaved")


def test_only_the_automatic_scheduler_takes_a_memory_limit() -> None:
    assert memory_limit(parallel(), "zb-auto") == 2
    assert memory_limit(parallel(pipeline_memory_limit=5), "zb-auto") == 5
    assert memory_limit(parallel(), "zb-h1") is None
    with pytest.raises(ConfigError, match=r"--pipeline-memory-limit 5 .*zb-auto"):
        memory_limit(parallel(pipeline_memory_limit=5), "zb-h1")


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
    needed = {"num_virtual_stages_per_pipeline_rank": 2} if name in ("interleaved", "breadth-first") else {}
    if not SCHEDULES[name].is_synchronous:
        needed = {"clip_grad": 0.0, "untie_embeddings_and_output_weights": True}
    asked = small_config(pipeline_model_parallel_size=2, pipeline_schedule=name, global_batch_size=8, **needed)
    plan = resolve(asked, 2)
    again = resolve(dataclasses.replace(asked, parallel=plan.config.parallel), 2)
    assert again.config == plan.config
    assert again.schedule_name == plan.schedule_name


# (flags that break a rule of an asynchronous schedule or of CUDA graphs, regex of the message)
PIPEDREAM = "--pipeline-model-parallel-size 2 --pipeline-schedule pipedream"
UNTIED = "--untie-embeddings-and-output-weights"
GRAPHS = "--cuda-graph-impl local --hidden-dropout 0 --attention-dropout 0"
REFUSED = [
    (f"{PIPEDREAM} {UNTIED}", ["pipedream updates each stage at its own time", "--clip-grad 1", "give --clip-grad 0"]),
    (f"{PIPEDREAM} {UNTIED} --clip-grad 0 --fp16", ["use --bf16, or a fixed --loss-scale"]),
    (f"{PIPEDREAM}-2bw {UNTIED} --clip-grad 0 --calculate-per-token-loss", ["pipedream-2bw", "leave that out"]),
    (f"{PIPEDREAM} --clip-grad 0", ["the tied embedding", f"give {UNTIED}"]),
    (f"{PIPEDREAM} {UNTIED} --clip-grad 0 --fp8-format e4m3", ["pipedream updates them within the step"]),
    (f"{PIPEDREAM} {UNTIED} --clip-grad 0 {GRAPHS}", ["pipedream computes with several versions", "use 1f1b"]),
    ("--pipeline-schedule zb-h3", ["--pipeline-schedule zb-h3: choose auto, naive", "did you mean zb-h"]),
]


@pytest.mark.parametrize(("flags", "words"), REFUSED, ids=[flags for flags, _ in REFUSED])
def test_what_a_schedule_cannot_do_is_refused(flags: str, words: list[str]) -> None:
    config = load_config(job(flags)).config
    with pytest.raises(ConfigError) as error:
        resolve(config, config.parallel.pipeline_model_parallel_size)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_an_asynchronous_schedule_without_such_options_is_accepted() -> None:
    flags = f"{PIPEDREAM} {UNTIED} --clip-grad 0 --fp16 --loss-scale 1024"
    assert resolve(load_config(job(flags)).config, 2).schedule_name == "pipedream"
