"""Cuts by measured layer times, for ranks of unequal speed and limited memory, and the file of layer times."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.config.config import Config
from megapipe.errors import ConfigError
from megapipe.plan.cut import RankBytes, step_of_costs
from megapipe.plan.hardware import hardware_named
from megapipe.plan.layer_costs import LayerTimes, PartCost, read_layer_times, setting_of, to_json
from megapipe.plan.memory import all_rank_memory
from megapipe.plan.resolve import resolve
from megapipe.plan.run_plan import RunPlan
from megapipe.plan.step_time import expected_bubble, predict_step
from megapipe.schedule.action import Op
from tests.schedule.strategies import every_cut
from tests.tiny import small_config

GIB = 1 << 30
ONE = PartCost(1.0, 2.0, 1.0, 1.0)


def times_file(folder: Path, config: Config, head: float = 0.0, layers: tuple[PartCost, ...] = (ONE,)) -> str:
    """Write a file of layer times measured for `config` and return its path.

    Each layer has one forward second and two backward seconds by default; the head takes as long as `head` layers.
    """
    plan = resolve(config, config.parallel.pipeline_model_parallel_size)
    path = folder / "times.json"
    path.write_text(
        to_json(LayerTimes(setting_of(plan.config), PartCost(), layers, ONE * 1 if head == 1 else scaled(head)))
    )
    return str(path)


def scaled(head: float) -> PartCost:
    return PartCost(head, 2 * head, head, head)


def test_measured_times_decide_the_cut_and_are_the_clock(tmp_path: Path) -> None:
    config = small_config(pipeline_model_parallel_size=2, global_batch_size=16)
    file = times_file(tmp_path, config, head=4.0)
    plan = resolve(small_config(pipeline_model_parallel_size=2, global_batch_size=16, pipeline_layer_times=file), 2)
    assert plan.partition.layer_counts == (6, 2)
    assert plan.stage_costs.seconds[1, Op.F] == 6.0
    assert expected_bubble(plan, 8).idle_seconds == pytest.approx(18.0)  # the fill of 1F1B: F + B of a rank
    by_flops = resolve(
        small_config(
            pipeline_model_parallel_size=2, global_batch_size=16, pipeline_layer_times=file, pipeline_balance="flops"
        ),
        2,
    )
    assert by_flops.partition == resolve(config, 2).partition
    assert by_flops.stage_costs.seconds[0, Op.F] == by_flops.partition.layer_counts[0]


def test_layers_that_differ_may_be_written_with_counts(tmp_path: Path) -> None:
    config = small_config(pipeline_model_parallel_size=4, global_batch_size=16)
    file = Path(times_file(tmp_path, config, layers=(ONE, ONE * 2)))
    text = json.loads(file.read_text())
    for entry in text["seconds"]["layers"]:
        entry["count"] = 4
    file.write_text(json.dumps(text))
    plan = resolve(
        small_config(pipeline_model_parallel_size=4, global_batch_size=16, pipeline_layer_times=str(file)), 4
    )
    assert (
        max(plan.stage_costs.seconds[stage, Op.F] for stage in range(4)) == 4.0
    )  # contiguous stages of layers that take 1, 1, 1, 1, 2, 2, 2, 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"micro_batch_size": 1}, r"micro_batch_size 2, the run has 1: measure again"),
        ({"hidden_size": 128}, r"measured for .*hidden_size 64, the run has 128"),
        ({"recompute_granularity": "selective"}, r"recompute_granularity None, the run has 'selective'"),
    ],
    ids=["microbatch", "hidden", "recompute"],
)
def test_times_measured_for_something_else_are_refused(
    tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    file = times_file(tmp_path, small_config(pipeline_model_parallel_size=2, global_batch_size=16))
    with pytest.raises(ConfigError, match=message):
        resolve(
            small_config(
                **{"pipeline_model_parallel_size": 2, "global_batch_size": 16, "pipeline_layer_times": file, **changes}
            ),
            2,
        )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "cannot be read"),
        ("[]", "not a file of layer times"),
        ('{"format": "megapipe layer times", "version": 2}', "version 2"),
        ('{"format": "megapipe layer times", "version": 1, "seconds": {}, "setting": {}}', "lacks or misstates"),
        (
            '{"format": "megapipe layer times", "version": 1, "setting": {}, "seconds": '
            '{"layers": [{"forward": -1}], "head": {}, "embedding": {}}}',
            "forward is not a valid time",
        ),
    ],
    ids=["json", "list", "version", "empty", "negative"],
)
def test_an_invalid_times_file_is_refused_with_the_reason(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "times.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_layer_times(path)


def test_a_written_file_of_layer_times_reads_back_equal(tmp_path: Path) -> None:
    times = LayerTimes(
        {"dtype": "bf16"}, PartCost(0.1), (ONE, ONE * 2), PartCost(0.25, 0.5, 0.3, 0.3, 0.125), {"device": "x"}
    )
    path = tmp_path / "times.json"
    path.write_text(to_json(times))
    assert read_layer_times(path) == times


FAST_AND_SLOW = {
    "pipeline_model_parallel_size": 2,
    "global_batch_size": 32,
    "num_layers": 12,
    "hidden_size": 512,
    "vocab_size": 8,
}


def test_a_slow_rank_gets_fewer_layers_and_the_step_is_as_the_speeds_say() -> None:
    equal = resolve(small_config(**FAST_AND_SLOW), 2)
    mixed = resolve(small_config(**FAST_AND_SLOW, pipeline_rank_speeds=(1.0, 0.5)), 2)
    assert (equal.partition.layer_counts, mixed.partition.layer_counts) == ((6, 6), (8, 4))
    layer = 3 * equal.layer_costs.layers[0].forward
    head = 3 * equal.layer_costs.head.forward
    # 16 microbatches on the busier rank, plus the fill by the other one
    busy, other = sorted([8 * layer, 2 * (4 * layer + head)], reverse=True)
    assert step_of_costs(mixed, mixed.layer_costs, mixed.partition) == pytest.approx(16 * busy + other, rel=1e-6)
    slowed = step_of_costs(mixed, mixed.layer_costs, equal.partition)
    assert slowed == pytest.approx(16 * 2 * (6 * layer + head) + 6 * layer, rel=1e-6)


def test_a_slow_rank_slows_the_predicted_step_by_what_its_work_takes_longer() -> None:
    h100 = hardware_named("h100")
    sizes = {**FAST_AND_SLOW, "dtype": "bf16", "pipeline_balance": "even"}
    equal, mixed = (
        predict_step(resolve(small_config(**sizes, **more), 2), h100)
        for more in ({}, {"pipeline_rank_speeds": (1.0, 0.5)})
    )
    assert mixed.timeline.work_seconds[0] == pytest.approx(equal.timeline.work_seconds[0])
    assert mixed.timeline.work_seconds[1] == pytest.approx(2 * equal.timeline.work_seconds[1])
    assert sum(mixed.parts.values()) == pytest.approx(mixed.seconds)
    assert min(mixed.parts.values()) >= 0


@pytest.mark.parametrize("schedule", ["dualpipe", "zb-v", "zb-h1", "zb-auto", "interleaved"])
def test_speeds_of_ranks_reach_every_kind_of_schedule(schedule: str) -> None:
    changes = {
        "pipeline_schedule": schedule,
        "pipeline_model_parallel_size": 2,
        "global_batch_size": 32,
        "num_layers": 12,
    }
    if schedule == "interleaved":
        changes["num_virtual_stages_per_pipeline_rank"] = 2
    equal, mixed = (resolve(small_config(**changes, pipeline_rank_speeds=speeds), 2) for speeds in (None, (1.0, 0.5)))
    count = equal.batch.full // equal.batch.samples_per_microbatch
    steps = [sum(expected_bubble(plan, count)) for plan in (equal, mixed)]
    assert steps[1] > 1.1 * steps[0]
    if schedule != "dualpipe":  # with dualpipe both ranks hold everything
        held = [
            sum(mixed.partition.layer_counts[stage] for stage in mixed.placement.stages_of(rank)) for rank in (0, 1)
        ]
        assert held[0] > held[1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pipeline_rank_speeds": (1.0,)}, "names 1 ranks, --pipeline-model-parallel-size is 2"),
        ({"pipeline_rank_memory": (1.0, 1.0, 1.0)}, "names 3 ranks"),
        ({"pipeline_balance": "measured"}, "needs --pipeline-layer-times"),
        ({"pipeline_rank_memory": (1e-4,)}, r"pp_rank \d needs .* GiB, --pipeline-rank-memory gives it 0.0001"),
        ({"pipeline_rank_memory": (1e-4,), "pipeline_balance": "even"}, r"no cut of 8 layers was found that fits"),
    ],
    ids=["speeds", "memory", "measured", "too_little", "even_too_little"],
)
def test_impossible_speeds_and_memory_of_ranks_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(small_config(pipeline_model_parallel_size=2, global_batch_size=16, **changes), 2)


GRIDS: list[dict[str, object]] = [
    {"pipeline_model_parallel_size": 4},
    {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2, "activation": "swiglu"},
    {
        "pipeline_model_parallel_size": 2,
        "pipeline_schedule": "zb-v",
        "dtype": "bf16",
        "use_distributed_optimizer": True,
    },
    {"pipeline_model_parallel_size": 2, "pipeline_schedule": "dualpipe", "recompute_granularity": "selective"},
    {
        "pipeline_model_parallel_size": 2,
        "recompute_granularity": "full",
        "recompute_method": "block",
        "recompute_num_layers": 2,
    },
]
BIG = {"num_layers": 12, "hidden_size": 256, "seq_length": 128, "global_batch_size": 16, "vocab_size": 1000}


@pytest.mark.parametrize("grid", GRIDS, ids=["1f1b", "interleaved", "zb_v", "dualpipe", "block"])
def test_bytes_by_the_number_of_layers_are_those_of_the_plan(grid: dict[str, object]) -> None:
    plan = resolve(small_config(**BIG, **grid), int(str(grid["pipeline_model_parallel_size"])))
    estimate, stages = RankBytes(plan), plan.partition.stages
    for rank in all_rank_memory(plan):
        held = [stages[stage][:2] for stage in plan.placement.stages_of(rank.pp_rank)]
        assert estimate.of(rank.pp_rank, held) == pytest.approx(rank.total, rel=0.02)


@pytest.mark.parametrize("count", [2, 12])
@pytest.mark.parametrize("grid", GRIDS[:3], ids=["1f1b", "interleaved", "zb_v"])
def test_bytes_of_offloaded_layers_are_about_those_of_the_plan(grid: dict[str, object], count: int) -> None:
    offloaded = grid | {"cpu_offloading_num_layers": count, "min_offloaded_tensor_size": 1}
    pp = int(str(grid["pipeline_model_parallel_size"]))
    bare, plan = resolve(small_config(**BIG, **grid), pp), resolve(small_config(**BIG, **offloaded), pp)
    for without, rank in zip(all_rank_memory(bare), all_rank_memory(plan), strict=True):
        whole = plan.whole_stages()
        held = [whole.partition.stages[stage][:2] for stage in whole.placement.stages_of(rank.pp_rank)]
        estimate = RankBytes(whole).of(rank.pp_rank, held)
        assert estimate == pytest.approx(rank.total, rel=0.13)
        assert rank.total < without.total


@pytest.mark.parametrize("grid", GRIDS[:3], ids=["1f1b", "interleaved", "zb_v"])
def test_a_rank_with_little_memory_gives_layers_away_and_then_fits(grid: dict[str, object]) -> None:
    pp = int(str(grid["pipeline_model_parallel_size"]))
    free = resolve(small_config(**BIG, **grid), pp)
    need = [rank.total / GIB for rank in all_rank_memory(free)]
    limits = (0.8 * need[0], *(2 * gib for gib in need[1:]))
    tight = resolve(small_config(**BIG, **grid, pipeline_rank_memory=limits), pp)
    assert all(rank.total / GIB <= limit for rank, limit in zip(all_rank_memory(tight), limits, strict=True))
    assert tight.partition != free.partition
    assert (
        resolve(small_config(**BIG, **grid, pipeline_rank_memory=tuple(2 * gib for gib in need)), pp).partition
        == free.partition
    )


UNLIKE: dict[str, object] = {
    "position_embedding_type": "rope",
    "layer_pattern": (
        "2 window_size=16",
        "1 ffn_hidden_size=256 attn_logit_softcapping=5",
        "1 attention=none ffn_hidden_size=2048",
        "1 mlp=none",
        "...",
    ),
}
KINDS_OF_GRIDS = [grid | recompute for grid in GRIDS[:4] for recompute in ({}, {"recompute_granularity": "selective"})]


@pytest.mark.parametrize("grid", KINDS_OF_GRIDS, ids=lambda grid: " ".join(map(str, grid.values())))
@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_bytes_of_unlike_layers_are_those_of_the_plan(grid: dict[str, object], data: st.DataObject) -> None:
    """The estimate of a plan with one cut is within 1 % of the bytes of another cut."""
    plan = resolve(small_config(**BIG | UNLIKE | grid), int(str(grid["pipeline_model_parallel_size"])))
    cut = data.draw(st.sampled_from(list(every_cut(12, plan.placement.num_stages))))
    estimate = RankBytes(plan)
    for rank in all_rank_memory(dataclasses.replace(plan, partition=cut)):
        held = [cut.stages[stage][:2] for stage in plan.placement.stages_of(rank.pp_rank)]
        assert estimate.of(rank.pp_rank, held) == pytest.approx(rank.total, rel=0.01)


@pytest.mark.parametrize("limited", [False, True], ids=["free", "limited"])
@pytest.mark.parametrize("measured", [False, True], ids=["flops", "measured"])
@pytest.mark.parametrize("grid", GRIDS[:4], ids=["1f1b", "interleaved", "zb_v", "dualpipe"])
def test_the_cut_of_unlike_layers_is_the_best_of_all(
    grid: dict[str, object], measured: bool, limited: bool, tmp_path: Path
) -> None:
    """No cut that fits has a less busy busiest rank, unless the plan's steps are shorter."""
    pp = int(str(grid["pipeline_model_parallel_size"]))
    changes = BIG | UNLIKE | grid | {"num_layers": 9, "pipeline_rank_speeds": (1.0, 0.8, 0.9, 1.0)[:pp]}
    if measured:
        times = tuple(scaled(time) for time in (3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0, 5.0))
        changes["pipeline_layer_times"] = times_file(tmp_path, small_config(**changes), 3.0, times)
    plan = resolve(small_config(**changes), pp)
    cuts = [dataclasses.replace(plan, partition=cut) for cut in every_cut(9, plan.placement.num_stages)]
    if limited:
        most = {cut.partition: max(rank.total for rank in all_rank_memory(cut)) for cut in cuts}
        limit = 1.05 * min(most.values())
        cuts = [cut for cut in cuts if most[cut.partition] <= limit]
        plan = resolve(small_config(**changes, pipeline_rank_memory=(limit / GIB,)), pp)
        assert most[plan.partition] <= limit
    least = min(map(busiest, cuts))
    rivals = [cut for cut in cuts if busiest(cut) <= least * (1 + 1e-9)]
    steps = [step_of_costs(plan, plan.layer_costs, cut.partition) for cut in (plan, *rivals)]
    assert busiest(plan) == pytest.approx(least) or steps[0] <= max(steps[1:])


def busiest(plan: RunPlan) -> float:
    """Return the load of the busiest rank for one microbatch."""
    speeds, stages = plan.config.parallel.pipeline_rank_speeds, plan.partition.stages
    assert speeds is not None
    costs = [plan.layer_costs.of_stage(stage).step(plan.splits_backward) for stage in stages]
    loads = [sum(costs[stage] for stage in plan.placement.stages_of(rank)) for rank in range(plan.topology.pp)]
    return max(load / speed for load, speed in zip(loads, speeds, strict=True))


@pytest.mark.parametrize("grid", GRIDS[:4], ids=["1f1b", "interleaved", "zb_v", "dualpipe"])
@settings(max_examples=5, deadline=None)
@given(
    words=st.lists(
        st.sampled_from(["1 attention=none", "1 mlp=none", "1 ffn_hidden_size=256", "1 ffn_hidden_size=2048", "1"]),
        min_size=8,
        max_size=8,
    ),
    vocab_size=st.sampled_from([100, 4000]),
)
def test_a_step_of_unlike_layers_is_nearly_the_shortest_of_all_cuts(
    grid: dict[str, object], words: list[str], vocab_size: int
) -> None:
    changes = BIG | grid | {"num_layers": 8, "layer_pattern": tuple(words), "vocab_size": vocab_size}
    plan = resolve(small_config(**changes), int(str(grid["pipeline_model_parallel_size"])))
    cuts = every_cut(8, plan.placement.num_stages)
    shortest = min(step_of_costs(plan, plan.layer_costs, cut) for cut in cuts)
    assert step_of_costs(plan, plan.layer_costs, plan.partition) <= 1.05 * shortest
