"""From a configuration and a world size to a plan: derived values, and errors that name the rule and the remedy."""

from __future__ import annotations

import pytest

from megapipe.errors import ConfigError
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


DUAL = {"pipeline_schedule": "dualpipe", "pipeline_model_parallel_size": 2}


@pytest.mark.parametrize(
    ("changes", "world", "message"),
    [
        ({"tensor_model_parallel_size": 3}, 3,
         r"--tensor-model-parallel-size 3 .*--num-attention-heads 8.* use .*1, 2, 4"),
        ({"pipeline_schedule": "dualpipe"}, 1, r"--pipeline-model-parallel-size 1 is odd.*dualpipe.*use 2$"),
        ({"pipeline_schedule": "dualpipe", "pipeline_model_parallel_size": 3}, 3,
         r"--pipeline-model-parallel-size 3 is odd.*use 2 or 4$"),
        (DUAL | {"global_batch_size": 12}, 4,
         r"at least 2 x 2 ranks = 4 microbatches; --global-batch-size 12, 3 .*use 16 instead"),
        (DUAL | {"global_batch_size": 20}, 4,
         r"as many microbatches from either end; --global-batch-size 20, 5 .*use 16 or 24 instead"),
        (
            DUAL | {"global_batch_size": 32, "rampup_batch_size": (16, 4, 64), "train_iters": None,
            "train_samples": 200},
            4,
            r"from either end; --rampup-batch-size 16 4 reaches 20, 5 microbatch.es. of 2 x dp 2: use 16 or 24 instead",
        ),
        ({"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}, 6,
         r"a world of 6 ranks .* multiple of 4"),
        ({"num_query_groups": 4, "tensor_model_parallel_size": 8, "global_batch_size": 3}, 8, r"--global-batch-size 3"),
        ({"pipeline_model_parallel_size": 3, "pipeline_balance": "even"}, 3, r"8 layers .* do not divide over 3"),
        ({"pipeline_model_parallel_size": 16}, 16, r"--num-layers 8 is fewer than 16 pipeline ranks"),
        ({"sequence_parallel": True, "tensor_model_parallel_size": 4, "seq_length": 34}, 4,
         r"--seq-length 34.*use 32 or 36"),
        ({"pipeline_model_parallel_layout": "Ett|tttttL", "pipeline_model_parallel_size": 2}, 2, r"holds 7 layers"),
        ({"pipeline_model_parallel_layout": "Ett|tt|ttttL", "pipeline_model_parallel_size": 2}, 2,
         r"3 stages, not a multiple"),
        ({"vocab_size": None}, 1, r"size of the vocabulary is unknown"),
        ({"context_parallel_size": 2}, 3, r"tensor 1 x context 2 x pipeline 1"),
        (
            {"pipeline_schedule": "gpipe", "pipeline_model_parallel_size": 2,
            "num_virtual_stages_per_pipeline_rank": 2},
            2,
            r"gpipe runs one chunk",
        ),
    ],
    ids=[
        "heads", "no_pair", "odd_pairs", "few_microbatches", "odd_microbatches", "odd_ramp",
        "world", "batch", "even_layers", "few_layers", "sequence", "layout_layers", "layout_stages", "vocabulary",
        "cp", "chunks",
    ],
)  # fmt: skip
def test_what_cannot_run_is_refused_before_anything_starts(
    changes: dict[str, object], world: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(small_config(**changes), world)


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


def test_key_value_heads_that_no_group_of_ranks_shares_are_refused() -> None:
    changes: dict[str, object] = {"num_layers": 2, "tensor_model_parallel_size": 8, "num_attention_heads": 8}
    with pytest.raises(ConfigError, match=r"2 and of 4 key/value heads.* use at most 4"):
        resolve(small_config(**changes, layer_pattern=("1 num_query_groups=2", "1 num_query_groups=4")), 8)
    heads = {**changes, "num_attention_heads": 12, "tensor_model_parallel_size": 4, "kv_channels": 8}
    with pytest.raises(ConfigError, match=r"^layer 1: --num-query-groups 3 and --tensor-model-parallel-size 4: one"):
        resolve(small_config(**heads, layer_pattern=("1", "1 num_query_groups=3")), 4)


@pytest.mark.parametrize(
    ("freeze", "words"),
    [
        (("embedding.*", "decoder.layers.8.*"), ["--freeze decoder.layers.8.* matches no", "decoder.layers."]),
        (("*",), ["--freeze *", "--skip-train"]),
        (("decoder.*", "embedding.*"), ["--freeze decoder.* embedding.*", "every parameter"]),
    ],
    ids=["a pattern without a match", "all", "all in parts"],
)
def test_patterns_that_freeze_nothing_or_everything_are_refused(freeze: tuple[str, ...], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        resolve(small_config(freeze=freeze), 1)
    assert all(word in str(error.value) for word in words)


def test_patterns_are_of_whole_names_and_told() -> None:
    plan = resolve(small_config(freeze=("decoder.layers.1.*", "*.linear_fc1.bias")), 1)
    frozen = {spec.name for spec in plan.specs if not spec.trainable}
    assert {name.split(".")[2] for name in frozen if "fc1.bias" not in name} == {"1"}  # layer 10 would not be
    assert sum(name.endswith("fc1.bias") for name in frozen) == plan.config.model.num_layers
    (line,) = [line for line in plan_text(plan).splitlines() if "frozen" in line]
    assert f"{sum(spec.num_elements for spec in plan.specs if not spec.trainable):,}" in line
