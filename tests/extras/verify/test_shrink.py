"""The shrunk configuration is small and keeps all properties of the grid."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from megapipe.config.layers import layer_configs
from megapipe.extras.verify.report import plan_text
from megapipe.extras.verify.shrink import MAX_LAYERS, Shrunk, shrink
from megapipe.plan.resolve import resolve
from megapipe.plan.run_plan import RunPlan
from tests.tables import options, rows
from tests.tiny import LLAMA, tiny_config

TABLE = rows(Path(__file__).with_name("shrunk.tsv"))
SETS: dict[str, dict[str, Any]] = {"LLAMA": LLAMA}
for kind, _, words, name in TABLE:
    if kind == "set":
        SETS[name] = options(words, SETS)
GPT3, LLAMA405B, CHANGED = SETS["GPT3"], SETS["LLAMA405B"], SETS["CHANGED"]
# every sixth layer sees the whole sequence; some have fewer key/value heads or lack a part
UNLIKE: dict[str, Any] = LLAMA405B | {
    "num_layers": 62,
    "pp": 4,
    "rotary_percent": 0.5,
    "window_size": 1024,
    "window_attn_skip_freq": "6",
    "no_rope_freq": "31",
    "layer_pattern": (
        "14",
        "3 num_query_groups=16 ffn_hidden_size=26624",
        "13 rotary_percent=0.25",
        "1",  # without rotary positions
        "27 rotary_percent=0.25",
        "4 attention=none",
    ),
}

CASES = {"unlike layers": (64, UNLIKE)}
CASES |= {name: (int(ranks), options(words, SETS)) for kind, ranks, words, name in TABLE if kind == "case"}


def shrunk(case: str, mode: str = "fp64") -> Shrunk:
    world, options = CASES[case]
    return shrink(resolve(tiny_config(**options), world), mode, world)


@pytest.mark.parametrize("case", CASES)
def test_grid_stages_schedule_and_heads_are_kept(case: str) -> None:
    small = shrunk(case)
    was, now = small.original, small.plan
    assert (now.topology, now.placement, now.schedule_name) == (was.topology, was.placement, was.schedule_name)
    a, b = was.config.model, now.config.model
    assert b.num_attention_heads // b.query_groups() == a.num_attention_heads // a.query_groups()
    assert max(1, now.topology.tp // b.query_groups()) == max(1, was.topology.tp // a.query_groups())
    if a.num_layers <= MAX_LAYERS:
        assert now.partition == was.partition
    assert (b.padded_vocab_size > b.vocab_size) == (a.padded_vocab_size > a.vocab_size)
    full = was.batch.full // was.batch.samples_per_microbatch
    assert small.num_microbatches[-1] == min(full, 64)
    assert now.schedule(small.num_microbatches[-1]).num_microbatches == small.num_microbatches[-1]


@pytest.mark.parametrize("case", CASES)
def test_the_model_is_small(case: str) -> None:
    small = shrunk(case)
    assert sum(spec.num_elements for spec in small.plan.specs) < 4e6
    assert small.plan.config.model.seq_length <= 16 and small.plan.config.training.micro_batch_size <= 2
    assert plan_text(small).count("\n") > 4


SIZES = {
    "model": (
        "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels seq_length "
        "max_position_embeddings "
        "vocab_size padded_vocab_size window_size softmax_scale window_attn_skip_freq no_rope_freq layer_pattern"
    ),
    "parallel": "pipeline_model_parallel_layout pipeline_schedule ddp_bucket_size",
    "training": (
        "micro_batch_size global_batch_size train_iters train_samples exit_interval exit_duration_in_mins "
        "exit_signal_handler skip_train "
        "eval_interval eval_iters check_for_nan_in_loss_and_grad"
    ),
    "optimizer": "lr min_lr lr_decay_style lr_decay_iters lr_decay_samples decoupled_lr decoupled_min_lr adam_eps",
    "recompute": "",
    "offload": "min_offloaded_tensor_size",
}


def test_every_option_that_is_not_a_size_is_kept() -> None:
    """Set switches to values other than their defaults, so that a forgotten one is found."""
    small = shrink(resolve(tiny_config(**GPT3, **CHANGED), 8), "fp64", 8)
    for section, sizes in SIZES.items():
        was, now = (vars(getattr(plan.config, section)) for plan in (small.original, small.plan))
        for name in now.keys() - set(sizes.split()):
            if not name.startswith(("lr_w", "override", "use_checkpoint")):  # warm-up and checkpoints
                assert now[name] == was[name], name
    for name in ("reset_position_ids", "reset_attention_mask", "eod_mask_loss"):
        assert getattr(small.plan.config.data, name)


def test_the_report_names_each_kept_flag_and_each_smaller_size() -> None:
    """Nothing that the two configurations have in common but the defaults is left out, nor a size that differs."""
    text = plan_text(shrink(resolve(tiny_config(**GPT3, **CHANGED), 8), "fp64", 8))
    for flag in ("--rotary-percent 0.5", "--no-overlap-p2p-communication", "--muon-nesterov", "--eod-mask-loss"):
        assert flag in text
    assert "--lr " not in text and "--save" not in text
    text = plan_text(shrunk("latent attention"))
    assert all(f"--{name} " in text for name in ("q-lora-rank", "kv-lora-rank", "qk-head-dim", "v-head-dim"))


def test_deep_models_lose_layers_but_no_stage_and_no_end() -> None:
    small = shrunk("llama405b")
    assert small.original.partition.layer_counts == (7, *[8] * 14, 7)
    assert small.plan.partition.layer_counts == (1, *[2] * 14, 1)
    assert "layers 126 -> 30" in plan_text(small)


def kinds_of_stages(plan: RunPlan) -> list[list[tuple[Any, ...]]]:
    """Return the fields in which layers can differ, of each layer of each stage."""
    layers = [
        (x.has_attention, x.window is None, x.rotary is None, x.rotary_percent, x.num_query_groups, x.ffn_hidden_size)
        for x in layer_configs(plan.config.model)
    ]
    return [layers[stage.first_layer : stage.last_layer_exclusive] for stage in plan.partition.stages]


def test_stages_that_lose_layers_keep_unlike_ones() -> None:
    small = shrunk("unlike layers")
    was, now = kinds_of_stages(small.original), kinds_of_stages(small.plan)
    assert [len(layers) for layers in was] == [15, 16, 16, 15] and [len(layers) for layers in now] == [1, 2, 2, 1]
    for before, after in zip(was, now, strict=True):
        assert len(set(after)) == min(len(after), len(set(before)))
    kinds = {layer for layers in now for layer in layers}
    assert {kind[-2:] for kind in kinds} == {(8, 96), (16, 48)}  # key/value heads and width
    assert {kind[0] for kind in kinds} == {True, False}


def test_an_uneven_partition_stays_that_of_the_large_sizes() -> None:
    small = shrunk("uneven by cost")
    assert len(set(small.original.partition.layer_counts)) > 1
    assert small.plan.partition == small.original.partition


def test_units_of_stages_are_those_of_the_large_sizes() -> None:
    sharding = {"data_parallel_sharding_strategy": "optim_grads_params", "data_parallel_sharding_units": 2}
    small = shrink(resolve(tiny_config(**GPT3 | {"pp": 2, "chunks": 2} | sharding), 4), "fp64", 4)
    assert small.plan.num_units == small.original.num_units == (2, 2, 2, 2)
    assert small.plan.partition == small.original.partition


def test_a_window_that_hides_keys_still_hides_keys() -> None:
    model = shrunk("copies of key/value heads").plan.config.model
    assert model.window_size is not None and 1 < model.window_size < model.seq_length


def test_a_given_softmax_scale_stays_and_a_derived_one_is_derived_again() -> None:
    assert shrunk("copies of key/value heads").plan.config.model.softmax_scale == 0.5
    model = shrunk("gpt3").plan.config.model
    assert model.softmax_scale == pytest.approx(model.head_size() ** -0.5)


def test_rotary_pairs_are_not_split() -> None:
    model = shrunk("part of a head turned").plan.config.model
    assert model.kv_channels == 10 and int(10 * model.rotary_percent) == 4


@pytest.mark.parametrize("name", ["pipedream", "pipedream-2bw"])
def test_asynchronous_steps_keep_two_pipelines_of_microbatches(name: str) -> None:
    options = {"pp": 2, "pipeline_schedule": name, "untie_embeddings_and_output_weights": True}
    small = shrink(resolve(tiny_config(**options, global_batch_size=64), 2), "native", 2)
    assert small.num_microbatches[-1] == 4
    assert "NOT synchronous" in plan_text(small) and "microbatches 64 -> 4" in plan_text(small)


def test_many_microbatches_become_fewer_with_the_same_remainder() -> None:
    options = GPT3 | {"pp": 3, "chunks": 2, "global_batch_size": 4 * 200}
    small = shrink(resolve(tiny_config(**options), 3), "fp64", 3)
    assert small.num_microbatches[-1] == 65 and 65 % 3 == 200 % 3
    assert "microbatches 200 -> 65" in plan_text(small)


def test_a_ramp_up_begins_with_its_smallest_batch() -> None:
    options = GPT3 | {
        "pp": 2,
        "rampup_batch_size": (8, 8, 1000),
        "global_batch_size": 32,
        "train_iters": None,
        "train_samples": 9999,
    }
    small = shrink(resolve(tiny_config(**options), 2), "fp64", 2)
    assert small.num_microbatches == (2, 8, 8)
    assert small.plan.batch.size_at(0) == 2 * 2 and small.plan.batch.size_at(5) == 8 * 2


def buckets(plan: RunPlan) -> int:
    return max(len(layout.buckets) for stage in range(plan.placement.num_stages) for layout in plan.buffers(stage, 0))


def test_several_gradient_buckets_stay_several() -> None:
    options = GPT3 | {"zero": True, "overlap_grad_reduce": True, "ddp_bucket_size": 300_000_000}
    small = shrink(resolve(tiny_config(**options), 4), "fp64", 4)
    assert buckets(small.original) >= 4
    assert buckets(small.plan) >= 3


@pytest.mark.parametrize(
    ("dtype", "mode", "runs_in", "said"),
    [
        ("bf16", "fp64", "fp64", "bf16 by fp64 in every kernel"),
        ("bf16", "native", "bf16", "Adam's epsilon 1e-08 by 0.03"),
        ("fp16", "native", "fp16", "initial loss scale 4.29497e+09 by 4096"),
        ("fp32", "native", "fp32", "Adam's epsilon 1e-08 by 0.001"),
    ],
    ids=lambda value: value.split()[0],
)
def test_replaced_options_are_printed(dtype: str, mode: str, runs_in: str, said: str) -> None:
    small = shrink(resolve(tiny_config(dtype=dtype), 2), mode, 2)
    assert small.plan.config.precision.dtype == runs_in
    assert said in plan_text(small)


def test_a_reduction_in_bf16_is_replaced_in_fp64_and_kept_in_the_native_mode() -> None:
    plan = resolve(tiny_config(dtype="bf16", grad_reduce_in_bf16=True), 2)
    assert "gradients reduced in bf16 by" in plan_text(shrink(plan, "fp64", 2))
    assert shrink(plan, "native", 2).plan.config.parallel.grad_reduce_in_bf16


def test_narrow_state_is_replaced_in_fp64_and_kept_in_the_native_mode() -> None:
    plan = resolve(tiny_config(dtype="bf16", use_precision_aware_optimizer=True, exp_avg_sq_dtype="bf16"), 2)
    narrow = "main gradients fp32, master fp32, exp_avg fp32, exp_avg_sq bf16"
    replaced, kept = shrink(plan, "fp64", 2), shrink(plan, "native", 2)
    assert f"{narrow} by fp64 ones" in " ".join(plan_text(replaced).split())
    assert kept.plan.config.optimizer.exp_avg_sq_dtype == "bf16"
    assert "--exp-avg-sq-dtype bf16" in plan_text(kept) and "--exp-avg-sq-dtype" not in plan_text(replaced)
    assert "by fp64 ones" not in plan_text(kept)


def test_attention_is_kept_except_in_fp64_on_gpus() -> None:
    full = {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
        "recompute_keep_attention": True,
    }
    plan = resolve(tiny_config(dtype="bf16", **full), 2)
    for mode, on_gpus, is_kept in (("fp64", True, False), ("fp64", False, True), ("native", True, True)):
        small = shrink(plan, mode, 2, on_gpus=on_gpus)
        assert small.plan.config.recompute.recompute_keep_attention == is_kept
        assert ("attention kept through full recompute by" in plan_text(small)) != is_kept


def test_a_constant_loss_scale_is_kept() -> None:
    plan = resolve(tiny_config(dtype="fp16", loss_scale=512.0), 2)
    assert shrink(plan, "native", 2).plan.config.precision == dataclasses.replace(plan.config.precision)
