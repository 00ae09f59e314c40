"""The plan as text: it agrees with the plan, and it stays short for large worlds."""

from __future__ import annotations

import re
import time

import pytest

from megapipe.formatting import bytes_text
from megapipe.plan.memory import all_rank_memory, stage_activation_bytes
from megapipe.plan.report import plan_text
from megapipe.plan.resolve import resolve
from megapipe.plan.run_plan import RunPlan
from tests.tiny import small_config

LLAMA_405B = {
    "num_layers": 126, "hidden_size": 16384, "ffn_hidden_size": 53248, "num_attention_heads": 128,
    "num_query_groups": 8, "seq_length": 8192, "vocab_size": 128256, "position_embedding_type": "rope",
    "normalization": "RMSNorm", "activation": "swiglu", "add_bias_linear": False,
    "untie_embeddings_and_output_weights": True, "hidden_dropout": 0.0, "attention_dropout": 0.0, "dtype": "bf16",
    "sequence_parallel": True, "use_distributed_optimizer": True, "micro_batch_size": 1, "global_batch_size": 2048,
}  # fmt: skip


def interleaved(**changes: object) -> RunPlan:
    wanted: dict[str, object] = {
        "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 2,
        "use_distributed_optimizer": True, "global_batch_size": 32,
    }  # fmt: skip
    return resolve(small_config(**(wanted | changes)), 8)


def stage_rows(text: str) -> list[tuple[list[str], int, str]]:
    """Return the rows of the stage table, including the sum.

    Each row is (words before the parameter count, parameter count, rest).
    """
    lines = text[text.index(" parameters  holds\n") :].splitlines()[1:]
    rows = [
        re.fullmatch(r"\s+(\S.*?)\s\s+([\d,]+)  ([a-z].*)", line)
        for line in lines[: next(i for i, x in enumerate(lines) if "batch" in x)]
    ]
    return [(row[1].split(), int(row[2].replace(",", "")), row[3]) for row in rows if row]


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_the_printed_parameters_of_the_stages_sum_to_the_model(tied: bool) -> None:
    plan = interleaved(untie_embeddings_and_output_weights=not tied)
    *stages, (_, total, note) = stage_rows(plan_text(plan))
    model = sum(spec.num_elements for spec in plan.specs)
    assert sum(count for _, count, _ in stages) == total
    assert [int(words[1]) for words, _, _ in stages] == list(plan.placement.rank_of_stage)
    if tied:
        copy = plan.config.model.padded_vocab_size * plan.config.model.hidden_size  # type: ignore[operator]
        assert total - copy == model
        assert f"less {copy:,} of the tied embedding's copy = {model:,}" in note
    else:
        assert total == model


def test_a_pipeline_in_two_directions_reports_doubled_parameters() -> None:
    plan = resolve(small_config(pipeline_model_parallel_size=4, pipeline_schedule="dualpipe", global_batch_size=16), 4)
    text = plan_text(plan)
    assert "schedule dualpipe, every parameter on two" in text
    *stages, (_, total, note) = stage_rows(text)
    assert [" ".join(words[1:]) for words, _, _ in stages] == ["0, 3", "1 to 2", "1 to 2", "0, 3"]
    assert (total, note) == (
        sum(spec.num_elements for spec in plan.specs),
        "every element of the model, on two pipeline ranks",
    )


def test_an_uneven_cut_shows_its_layers() -> None:
    text = plan_text(
        resolve(small_config(pipeline_model_parallel_size=2, pipeline_model_parallel_layout="Ettttttt|tL"), 2)
    )
    assert [holds for _, _, holds in stage_rows(text)][:2] == ["embedding, layers 0 to 6", "layer 7, head"]


def test_a_stage_without_layers_is_reported() -> None:
    text = plan_text(
        resolve(small_config(pipeline_model_parallel_size=4, pipeline_model_parallel_layout="E|t*8||L"), 4)
    )
    assert [holds for _, _, holds in stage_rows(text)][:4] == ["embedding", "layers 0 to 7", "nothing", "head"]


@pytest.mark.parametrize(
    "changes", [{}, {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}]
)
def test_each_pipeline_rank_has_its_memory_in_a_line(changes: dict[str, object]) -> None:
    plan = interleaved(**changes)
    text = plan_text(plan)
    ranks = all_rank_memory(plan)
    for rank in ranks:
        (line,) = (line for line in text.splitlines() if re.match(rf" +{rank.pp_rank}  .*iB", line))
        for item in ("weights", "gradients", "optimizer", "activations"):
            assert bytes_text(rank.items[item]) in line
        assert bytes_text(rank.total) in line
        assert line.endswith(f" {rank.live_microbatches:.3g}")
    assert ("recompute" in text) == bool(changes)
    most = max(ranks, key=lambda rank: rank.total)
    assert f"the most: pp_rank {most.pp_rank}, {bytes_text(most.total)}" in text
    kept = max(sum(stage_activation_bytes(plan, stage).values()) for stage in plan.placement.stages_of(most.pp_rank))
    assert f"kept     {bytes_text(kept)} by stage" in text


def test_equal_pipeline_ranks_share_a_line() -> None:
    plan = resolve(
        small_config(
            pipeline_model_parallel_size=8, pipeline_schedule="gpipe", pipeline_balance="even", global_batch_size=8
        ),
        8,
    )
    assert re.search(r"^ +1 to 6  .*iB", plan_text(plan), re.MULTILINE)


def test_a_plan_for_16384_ranks_is_short_and_takes_seconds() -> None:
    start = time.process_time()
    grid = {
        "tensor_model_parallel_size": 8,
        "pipeline_model_parallel_size": 16,
        "num_virtual_stages_per_pipeline_rank": 7,
    }
    plan = resolve(small_config(**LLAMA_405B, **grid), 16384, 8)
    text = plan_text(plan)
    assert time.process_time() - start < 5
    assert len(text.splitlines()) < 45
    assert max(map(len, text.splitlines())) < 190
    rows = stage_rows(text)
    assert rows[-1][1] == sum(spec.num_elements for spec in plan.specs)
    assert rows[1][0] == ["1", "to", "95", "all"]
    assert rows[1][2] == "layers 1 to 95, 1 each"


def test_the_largest_of_many_pipeline_ranks_are_shown() -> None:
    plan = resolve(small_config(num_layers=64, pipeline_model_parallel_size=32, global_batch_size=64), 32)
    text = plan_text(plan)
    assert "16 smaller ones are not shown" in text
    ranks = sorted(all_rank_memory(plan), key=lambda rank: -rank.total)
    lines = text[text.index("live microbatches") :].splitlines()
    shown = {int(line.split()[0]) for line in lines if re.match(r" +\d+  .*iB", line)}
    assert shown == {rank.pp_rank for rank in ranks[:16]}


def test_each_kind_of_layer_is_shown_once_with_what_is_its_own() -> None:
    pattern = ("2 window_size=16 rotary_base=500", "1 attention=none ffn_hidden_size=64")
    changes: dict[str, object] = {"num_layers": 9, "position_embedding_type": "rope"}
    text = plan_text(resolve(small_config(**changes, layer_pattern=(*pattern, "...")), 1)).splitlines()
    start = next(number for number, line in enumerate(text) if line.startswith("  layers   of 2 kinds; of one layer: "))
    rows = [re.split(r"\s\s+", line.strip()) for line in text[start + 1 : start + 4]]
    assert rows[0] == ["layers", "number", "parameters", "FLOPs", "kept", "with"]
    h, ffn = 64, 256
    norm = 2 * h
    attention = norm + 4 * h * h + 4 * h
    kinds = [attention + norm + 2 * h * ffn + ffn + h, norm + 2 * h * 64 + 64 + h]
    assert [(row[0], row[1], row[2], row[-1]) for row in rows[1:]] == [
        ("0 to 1 of every 3", "6", f"{kinds[0]:,}", "window_size 16, rotary_base 500, ffn_hidden_size 256"),
        ("2 of every 3", "3", f"{kinds[1]:,}", "no attention, ffn_hidden_size 64"),
    ]
    other = resolve(small_config(**changes, layer_pattern=("8 window_size=16", "1")), 1)
    assert re.search(r"\n +0 to 7 +8 .* window_size 16\n +8 +1 .* window_size none\n", plan_text(other))


def test_alike_layers_add_nothing_to_the_plan() -> None:
    plain, alike = (resolve(small_config(layer_pattern=words), 1) for words in ((), ("8 window_size=none",)))
    assert plan_text(plain) == plan_text(alike)
    assert "kinds" not in plan_text(plain)
