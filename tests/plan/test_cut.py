"""Cuts from the flags, and a property of every resolved plan: it has each layer and each parameter exactly once."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.errors import ConfigError
from megapipe.plan.resolve import resolve
from megapipe.schedule.validate import validate
from megapipe.sharding.audit import audit_buffers, audit_slices, audit_stages
from tests.tables import options, rows, value
from tests.tiny import small_config

SETS = {
    "BOTH_ENDS": {"account_for_embedding_in_pipeline_split": True, "account_for_loss_in_pipeline_split": True},
    "LAYOUT": {"pipeline_model_parallel_layout": "E|t*3|(tt|)*2,tL"},
}
CUTS = rows(Path(__file__).with_name("cuts.tsv"))


@pytest.mark.parametrize(("words", "counts"), [row[1:] for row in CUTS], ids=[row[0] for row in CUTS])
def test_layers_are_cut_as_the_flags_say(words: str, counts: str) -> None:
    fields = options(words, SETS)
    wanted = small_config(pipeline_model_parallel_size=2, vocab_size=8, make_vocab_size_divisible_by=8, **fields)
    if not counts:
        with pytest.raises(ConfigError, match=r"5 stages, not a multiple"):
            resolve(wanted, 2)
    else:
        assert resolve(wanted, 2).partition.layer_counts == value(counts)


@st.composite
def layer_fields(draw: st.DrawFn) -> dict[str, object]:
    """Draw a small model, a grid, and one way to cut; about half of the draws are valid."""
    fields = {
        "num_layers": draw(st.integers(1, 13)),
        "tensor_model_parallel_size": draw(st.sampled_from([1, 2, 4])),
        "pipeline_model_parallel_size": draw(st.integers(1, 4)),
        "num_query_groups": draw(st.sampled_from([None, 1, 2, 8])),
        "untie_embeddings_and_output_weights": draw(st.booleans()),
        "qk_layernorm": draw(st.booleans()),
        "activation": draw(st.sampled_from(["gelu_tanh", "swiglu"])),
        "sequence_parallel": draw(st.booleans()),
        "use_distributed_optimizer": draw(st.booleans()),
        "ddp_bucket_size": draw(st.sampled_from([None, 1, 20_000])),
        "micro_batch_size": draw(st.integers(1, 2)),
        "global_batch_size": draw(st.sampled_from([None, 24])),
        "pipeline_balance": draw(st.sampled_from(["cost", "cost", "even"])),
    }
    layout = {"pipeline_model_parallel_size": 2, "num_layers": 4}
    ways: list[dict[str, object]] = [
        {},
        {"pipeline_schedule": draw(st.sampled_from(["gpipe", "1f1b"]))},
        {"num_virtual_stages_per_pipeline_rank": draw(st.integers(1, 3))},
        {"num_layers_per_virtual_pipeline_stage": draw(st.integers(1, 2))},
        {"decoder_first_pipeline_num_layers": draw(st.integers(0, 4))},
        {
            "decoder_first_pipeline_num_layers": draw(st.integers(0, 2)),
            "decoder_last_pipeline_num_layers": draw(st.integers(0, 2)),
        },
        {
            "account_for_embedding_in_pipeline_split": draw(st.booleans()),
            "account_for_loss_in_pipeline_split": draw(st.booleans()),
        },
        layout
        | {"pipeline_model_parallel_layout": draw(st.sampled_from(["Ettt|tL", "E|tt||ttL", "E|(t|)*4L", "t|Ettt"]))},
    ]
    return fields | draw(st.sampled_from(ways))


resolved: list[int] = []  # stages of each valid plan: the property must not pass for lack of plans


@settings(max_examples=90)
@given(layer_fields(), st.integers(1, 3))
def check_a_plan(fields: dict[str, object], dp: int) -> None:
    tp, pp = fields["tensor_model_parallel_size"], fields["pipeline_model_parallel_size"]
    try:
        plan = resolve(small_config(**fields), tp * pp * dp)  # type: ignore[operator]
    except ConfigError:
        return
    resolved.append(len(plan.partition.stages))
    stages = plan.partition.stages
    assert [layer for s in stages for layer in range(s.first_layer, s.last_layer_exclusive)] == list(
        range(plan.config.model.num_layers)
    )
    assert [s.has_embedding for s in stages] == [True] + [False] * (len(stages) - 1)
    assert [s.has_head for s in stages] == [False] * (len(stages) - 1) + [True]
    assert len(stages) == plan.placement.num_stages == plan.topology.pp * plan.num_chunks
    audit_slices(plan.specs, plan.topology.tp)
    audit_stages(plan.specs, dict(enumerate(plan.stage_specs)))
    for stage, specs in enumerate(plan.stage_specs):
        for tp_rank in range(plan.topology.tp):
            audit_buffers(specs, plan.buffers(stage, tp_rank), tp_rank, plan.topology.tp)
    schedule = plan.schedule(plan.batch.num_microbatches)
    validate(schedule)
    assert schedule.placement == plan.placement


def test_every_plan_that_resolves_covers_the_model_and_passes_the_audits() -> None:
    resolved.clear()
    check_a_plan()
    assert len(resolved) >= 30, "too few of the drawn fields can be planned for the property to mean something"
    assert max(resolved) >= 6
