"""Plans of sharded gradients and weights: rows, units, memory, traffic and times."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path

import pytest

from megapipe.assembly.datasets import with_vocabulary
from megapipe.config.load import load_config
from megapipe.config.parallel import RecomputeConfig
from megapipe.plan.memory import BUFFER_ALIGNMENT_BYTES, rank_memory
from megapipe.plan.resolve import resolve, vary
from megapipe.plan.run_plan import RunPlan
from megapipe.plan.sharded import row_bytes
from megapipe.plan.traffic import step_bytes
from megapipe.schedule.action import Op
from megapipe.schedule.families import SCHEDULES, build_schedule
from megapipe.schedule.lower import lower
from megapipe.schedule.sharding import GRANULARITIES, ShardingPolicy, shard
from megapipe.schedule.validate import validate
from tests.tiny import plan_for

FLAGS = (
    "--num-layers 8 --hidden-size 64 --num-attention-heads 8 --seq-length 32 --vocab-size 128 --bf16 "
    "--micro-batch-size 1 --train-iters 10 --make-vocab-size-divisible-by 1 --untie-embeddings-and-output-weights "
)
COLLECTIVES = (Op.UNSHARD, Op.REDUCE_GRAD)
ZERO_2 = "--data-parallel-sharding-strategy optim_grads "
ZERO_3 = "--data-parallel-sharding-strategy optim_grads_params "


def planned(flags: str, world_size: int = 4) -> RunPlan:
    return plan_for((FLAGS + flags).split(), world_size, None)


def ops(plan: RunPlan, pp_rank: int = 0) -> Counter[Op]:
    return Counter(op for _, op, _ in plan.schedule(plan.batch.num_microbatches).rows[pp_rank])


@pytest.mark.parametrize("units", [1, 2, 3])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "breadth-first", "zb-h1", "zb-v", "dualpipe", "dualpipe-v"])
def test_every_schedule_gathers_its_units_and_holds_every_layer_once(schedule: str, units: int) -> None:
    chunks = "--num-virtual-stages-per-pipeline-rank 2 " if schedule == "breadth-first" else ""
    grid = f"--pipeline-model-parallel-size 2 --pipeline-schedule {schedule} --global-batch-size 16 {chunks}"
    plan = planned(f"{ZERO_3} --data-parallel-sharding-units {units} {grid}")
    whole = planned(grid)
    stages = [min(units, count) for count in whole.partition.layer_counts]
    assert plan.placement.num_stages == sum(stages)
    assert plan.partition.num_layers == 8
    assert plan.whole_stages().partition == whole.partition
    assert plan.num_chunks == whole.num_chunks
    for count in (plan.batch.num_microbatches, 4):
        validate(plan.schedule(count))
        validate(plan.forward_schedule(count))
        assert Op.UNSHARD in plan.forward_schedule(count).ops
    assert ops(plan)[Op.UNSHARD] >= len(plan.placement.stages_of(0))


def test_one_rank_of_a_pipeline_is_split_into_units() -> None:
    plan = planned(f"{ZERO_3} --data-parallel-sharding-units 4 --global-batch-size 16")
    assert plan.partition.layer_counts == (2, 2, 2, 2)
    # each of 4 microbatches gathers 4 units twice; the last turns to the backward, the first to the next microbatch
    assert ops(plan)[Op.UNSHARD] == 4 * 2 * 4 - 4 - 3
    assert ops(plan)[Op.REDUCE_GRAD] == 4 * 4


def test_gradients_alone_are_not_gathered() -> None:
    plan = planned(f"{ZERO_2} --data-parallel-sharding-granularity microbatch --global-batch-size 16")
    assert ops(plan)[Op.UNSHARD] == 0 and ops(plan)[Op.REDUCE_GRAD] == 4


@pytest.mark.parametrize(
    ("flags", "reading"),
    [
        pytest.param("", set(), id="nothing"),
        pytest.param("--cross-entropy-chunk-size 8", {3}, id="chunked loss"),
        pytest.param(
            "--recompute-granularity selective --recompute-modules layernorm", {0, 1, 2, 3}, id="recomputed norms"
        ),
        pytest.param(
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", set(), id="full"
        ),
    ],
)
def test_weights_are_gathered_for_each_w_that_reads_them(flags: str, reading: set[int]) -> None:
    grid = "--pipeline-model-parallel-size 2 --pipeline-schedule zb-v --global-batch-size 16 "
    sharding = f"{ZERO_3} --data-parallel-sharding-granularity microbatch "
    plan = planned(f"{sharding} {grid} {flags}")
    schedule = plan.schedule(plan.batch.num_microbatches)
    assert schedule.reading_in_w == reading
    without = dataclasses.replace(
        schedule, reading_in_w=frozenset(), rows=planned(f"{sharding} {grid}").schedule(8).rows
    )
    for stage in range(4):
        found, before = (
            sum((s, op) == (stage, Op.UNSHARD) for row in each.rows for s, op, _ in row) for each in (schedule, without)
        )
        assert (found > before) is (stage in reading)


def test_a_varied_plan_keeps_its_units() -> None:
    flags = f"{ZERO_3} --data-parallel-sharding-units 2 --pipeline-model-parallel-size 2 --global-batch-size 16"
    config = with_vocabulary(load_config((FLAGS + flags).split(), is_job=False).config)
    other = dataclasses.replace(config, recompute=RecomputeConfig("full", "uniform", 1))
    assert vary(resolve(config, 4), other) == resolve(other, 4)


def state(plan: RunPlan) -> dict[str, int]:
    items = rank_memory(plan, 0).items
    slack = BUFFER_ALIGNMENT_BYTES * len([each for s in plan.placement.stages_of(0) for each in plan.buffers(s, 0)])
    less = {"weights": slack, "gradients": slack}
    wanted = ("weights", "gradients", "gathered weights", "whole gradients", "optimizer")
    return {name: items.get(name, 0) - less.get(name, 0) for name in wanted}


def test_memory_of_the_strategies_is_that_of_the_formulas() -> None:
    """bf16 weights, fp32 gradients, AdamW with master weights, d ranks: ZeRO-1 6 + 12/d bytes a parameter, ZeRO-2
    2 + 16/d, ZeRO-3 18/d, and what is whole at the peak: weights and gradients of one unit or two.
    """
    d, batch = 4, "--global-batch-size 16 --pipeline-schedule gpipe "
    p = sum(spec.num_elements for spec in planned(batch).specs)
    assert p % d == 0
    assert sum(state(planned(f"{batch} --use-distributed-optimizer")).values()) == 6 * p + 12 * p // d
    found = state(planned(f"{ZERO_2} {batch} --data-parallel-sharding-granularity microbatch"))
    assert found == dict(zip(found, (2 * p, 4 * p // d, 0, 4 * p, 12 * p // d), strict=True))
    whole = planned(f"{ZERO_3} {batch}")
    found = state(whole)
    assert found == dict(zip(found, (2 * p // d, 4 * p // d, 2 * p, 4 * p, 12 * p // d), strict=True))
    units = planned(f"{ZERO_3} {batch} --data-parallel-sharding-units 8")
    largest = sorted((units.num_elements((stage,)) for stage in units.placement.stages_of(0)), reverse=True)
    found = state(units)
    assert 0 < found["gathered weights"] <= 2 * sum(largest[:2])
    assert 0 < found["whole gradients"] <= 4 * sum(largest[:2])
    held = units.num_elements(units.placement.stages_of(0))  # more padding
    assert sum(found[name] for name in ("weights", "gradients", "optimizer")) == 18 * held // d


@pytest.mark.parametrize("chunks", [2, 4])
def test_breadth_first_sends_the_bytes_of_its_gathers_and_reductions(chunks: int) -> None:
    """2 gathers of 2 bytes a parameter, but one of the last chunk, and one reduction of 4: times (d - 1) / d."""
    flags = f"{ZERO_3} --pipeline-schedule breadth-first --global-batch-size 16 --pipeline-model-parallel-size 2 "
    plan, d = planned(f"{flags} --num-virtual-stages-per-pipeline-rank {chunks}", 8), 4
    for pp_rank in range(2):
        stages = plan.placement.stages_of(pp_rank)
        held, last = plan.num_elements(stages), plan.num_elements(stages[-1:])
        assert step_bytes(plan, pp_rank)["replicas"] == ((2 * held - last) * 2 + held * 4) * (d - 1) / d
        assert (ops(plan, pp_rank)[Op.UNSHARD], ops(plan, pp_rank)[Op.REDUCE_GRAD]) == (2 * chunks - 1, chunks)


def test_hybrid_sharding_sums_the_shards_over_its_instances() -> None:
    """r = 2 instances of 4 ranks: the ring is over 4, and an all-reduce of 2 P/4 x 4 bytes x 1/2 comes on top."""
    flags = "--global-batch-size 16 --num-distributed-optimizer-instances 2"
    p = planned(flags + " --use-distributed-optimizer", 8).num_elements((0,))
    for strategy, gathers in ((ZERO_3, 1), (ZERO_2, 1), ("--use-distributed-optimizer ", 1)):
        sent = step_bytes(planned(strategy + flags, 8), 0)
        assert sent["shards"] == (gathers * 2 * p + 4 * p) * 3 / 4
        assert sent["instances"] == 2 * p / 4 * 4 / 2
    assert state(planned(ZERO_3 + flags, 8))["weights"] == 2 * p // 4


def test_a_tied_embedding_is_gathered_by_both_of_its_users_and_reduced_with_the_first() -> None:
    flags = FLAGS.replace("--untie-embeddings-and-output-weights", "")
    more = f"{ZERO_3} --data-parallel-sharding-units 2 --global-batch-size 16"
    plan = plan_for((flags + more).split(), 4, None)
    (shared,) = (layout.numel for layout in plan.buffers(0, 0) if layout.kind == "shared")
    found = row_bytes(plan, 0, plan.schedule(4).rows[0])
    first, last = plan.num_elements((0,)), plan.num_elements((1,))
    # 4 microbatches: the first unit is gathered twice each, the last once; while both are there the table is gathered
    # once. Gradients of both are summed in one buffer, reduced with the first unit
    assert found.gathered < 4 * (2 * first + last + shared)
    assert found.reduced == 4 * (first + last)
    assert found.peak.weights == 2 * (first + last)


PAGE = (Path(__file__).resolve().parents[2] / "docs" / "memory.md").read_text(encoding="utf-8")


def table(name: str) -> list[list[str]]:
    """Return the cells of a table of the page, without its heading."""
    lines = PAGE.split(f"<!-- {name} -->")[1].split("<!-- end -->")[0].strip().splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.mark.parametrize("cells", table("counts"), ids=lambda cells: str(cells[0]))
def test_the_counts_of_the_page_are_those_of_the_rows(cells: list[str]) -> None:
    name, stages, *counts = cells
    family = SCHEDULES[name.strip("`")]
    chunks = family.chunks or (int(stages) if family.takes_chunks else 1)
    lowered = lower(build_schedule(family.name, 4, chunks, 8))
    assert lowered.placement.num_chunks == int(stages)
    for granularity, shown in zip(GRANULARITIES, counts, strict=True):
        sharded = shard(lowered, ShardingPolicy(True, granularity))
        gathers, reductions = (max(sum(a.op is op for a in row) for row in sharded.rows) for op in COLLECTIVES)
        assert shown == f"{gathers} / {reductions} / {max(validate(sharded).most_gathered)}"


LLAMA = "--config configs/llama3_8b.yaml --tensor-model-parallel-size 1 --pipeline-model-parallel-size 2 "
LLAMA += "--global-batch-size 64 --micro-batch-size 1 --pipeline-schedule "
CHUNKS = "--num-virtual-stages-per-pipeline-rank 4 "
LLAMA_PLANS = (
    f"interleaved {CHUNKS} --use-distributed-optimizer",
    f"1f1b {ZERO_2} --data-parallel-sharding-granularity microbatch",
    f"breadth-first {CHUNKS} {ZERO_3}",
    f"1f1b {ZERO_3} --data-parallel-sharding-units 16",
)


@pytest.mark.parametrize(("flags", "cells"), list(zip(LLAMA_PLANS, table("plan"), strict=True)))
def test_the_bytes_of_the_page_are_those_of_the_plan(
    flags: str, cells: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(__file__).resolve().parents[2])
    plan, gb = plan_for((LLAMA + flags).split(), 16, 8), 1e9
    held, items = plan.num_elements(plan.placement.stages_of(1)), rank_memory(plan, 1).items
    kept = (items["weights"] + items["gradients"] + items["optimizer"]) / held
    sent = step_bytes(plan, 1)["replicas"] / held / (7 / 8)
    assert f"{held / gb:.2f}" == "3.80"
    assert (cells[1].split()[0], cells[6].split()[0]) == (f"{kept:.2f}", f"{sent:.2f}")
    formula, value = cells[1].split(" = ")[1].split(" + "), 0.0
    for term in formula:
        number, *shards = map(float, term.split(" / "))
        value += number / (shards[0] if shards else 1)
    assert value == pytest.approx(kept, rel=1e-6)
    counts = ops(plan, 1)
    shown = [str(counts[op] or "") for op in COLLECTIVES]
    if plan.sharding is not None:
        peak = row_bytes(plan, 1, plan.schedule(plan.batch.num_microbatches).rows[1]).peak
        shown += [f"{size / gb:.2f} GB" if size else "" for size in peak]
    assert cells[2 : 2 + len(shown)] == shown
