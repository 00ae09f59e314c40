"""From a configuration and a world size to a plan: derived values, and errors that name the rule and the remedy."""

from __future__ import annotations

import pytest

from megapipe.plan.report import plan_text
from megapipe.plan.resolve import resolve
from tests.tiny import small_config


def test_sizes_that_follow_from_others_are_filled_in() -> None:
    plan = resolve(small_config(tensor_model_parallel_size=2, pipeline_model_parallel_size=2), 8)
    model = plan.config.model
    assert (model.ffn_hidden_size, model.num_query_groups, model.kv_channels, model.padded_vocab_size) == (
        256,
        8,
        8,
        256,
    )
    assert (plan.topology.dp, plan.config.training.global_batch_size, plan.schedule_name) == (2, 4, "1f1b")
    assert plan.config.training.train_samples == 40


@pytest.mark.parametrize(("steps", "interval"), [(None, 100), (7, 1), (60, 3), (2000, 100), (500_000, 100)])
def test_a_short_run_is_logged_twenty_times(steps: int | None, interval: int) -> None:
    assert resolve(small_config(train_iters=steps), 1).config.logging.log_interval == interval
    assert resolve(small_config(train_iters=steps, log_interval=50), 1).config.logging.log_interval == 50


def test_swiglu_gets_megatrons_width() -> None:
    assert resolve(small_config(activation="swiglu", hidden_size=512), 1).config.model.ffn_hidden_size == 1344


def test_the_parameters_of_the_stages_sum_to_the_model() -> None:
    plan = resolve(small_config(pipeline_model_parallel_size=2, num_virtual_stages_per_pipeline_rank=2), 2)
    names = [spec.name for stage in plan.stage_specs for spec in stage]
    assert len(names) == len(plan.specs) + 1  # the tied embedding has a copy
    assert set(names) == {spec.name for spec in plan.specs}


def test_layers_are_cut_by_cost_with_the_head_counted() -> None:
    sizes = {"num_layers": 4, "hidden_size": 256, "num_attention_heads": 4, "seq_length": 256, "vocab_size": 8192}
    assert resolve(small_config(pipeline_model_parallel_size=2, **sizes), 2).partition.layer_counts == (3, 1)
    assert resolve(
        small_config(pipeline_model_parallel_size=2, pipeline_balance="even", **sizes), 2
    ).partition.layer_counts == (2, 2)


@pytest.mark.parametrize("pp", [2, 4, 6, 8])
def test_both_holders_of_a_stage_gather_its_parameters_in_one_order(pp: int) -> None:
    plan = resolve(
        small_config(
            pipeline_schedule="dualpipe", pipeline_model_parallel_size=pp, num_layers=8, global_batch_size=4 * pp
        ),
        pp,
    )
    for pp_rank in range(pp):
        assert plan.order_of_first_use(pp_rank) == plan.order_of_first_use(pp - 1 - pp_rank)


def test_every_microbatch_count_of_a_ramp_has_a_schedule() -> None:
    plan = resolve(
        small_config(
            pipeline_model_parallel_size=2,
            global_batch_size=16,
            rampup_batch_size=(4, 4, 40),
            train_iters=None,
            train_samples=200,
        ),
        4,
    )
    assert [plan.schedule(size // 4).num_microbatches for size in plan.batch.sizes] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    ("tp", "groups", "replicas"),
    [(4, (2, 4), 2), (4, (1, 2), 2), (4, (1, 4), 4), (4, (8, 4), 1), (2, (1, 8), 2)],
    ids=lambda value: str(value),
)
def test_layers_with_other_key_value_heads_share_them_in_one_kind_of_group(
    tp: int, groups: tuple[int, int], replicas: int
) -> None:
    words = tuple(f"1 num_query_groups={count}" for count in groups)
    plan = resolve(small_config(num_layers=2, tensor_model_parallel_size=tp, layer_pattern=words), tp)
    assert plan.topology.kv_replicas == replicas
    kv = plan.topology.group_of("kv", 0)
    for spec in plan.specs:  # the reducer sums shared rows over tp or over the kv group
        shared = {interval.replicas for interval in spec.intervals(0, tp) if len(interval.replicas) > 1}
        assert shared <= {tuple(range(tp)), kv}


def test_patterns_are_of_whole_names_and_told() -> None:
    plan = resolve(small_config(freeze=("decoder.layers.1.*", "*.linear_fc1.bias")), 1)
    frozen = {spec.name for spec in plan.specs if not spec.trainable}
    assert {name.split(".")[2] for name in frozen if "fc1.bias" not in name} == {"1"}  # layer 10 would not be
    assert sum(name.endswith("fc1.bias") for name in frozen) == plan.config.model.num_layers
    (line,) = [line for line in plan_text(plan).splitlines() if "frozen" in line]
    assert f"{sum(spec.num_elements for spec in plan.specs if not spec.trainable):,}" in line
