"""A shorter step that covers every situation of the long one has the same peak and, extrapolated, the same messages."""

from __future__ import annotations

from typing import Any

import pytest

from megapipe.extras.dry_run.microbatches import microbatches_to_run, situations
from megapipe.extras.dry_run.rank import count_rank, random_reader
from megapipe.schedule.action import parse_action
from tests.extras.dry_run.grids import PP2, SP2, make_plan

ROW = [parse_action(text) for text in ["0F0", "0F1", "0B0", "0F2", "0B1", "0F3", "0B2", "0B3"]]
LONG: dict[str, dict[str, Any]] = {
    "1f1b_sp2": PP2 | SP2,
    "interleaved": PP2 | {"num_virtual_stages_per_pipeline_rank": 2},
    "zb_v": PP2 | {"pipeline_schedule": "zb-v"},
}


def test_a_steady_row_repeats_its_situations() -> None:
    assert situations(ROW) == situations([*ROW[:4], parse_action("0B1"), parse_action("0B2")])
    assert len(situations(ROW)) == 4


def test_a_row_that_accumulates_microbatches_never_repeats() -> None:
    plan = make_plan(2, PP2 | {"pipeline_schedule": "gpipe", "global_batch_size": 64})
    assert microbatches_to_run(plan, 0) == 32


def test_an_asynchronous_row_is_run_in_full() -> None:
    plan = make_plan(2, PP2 | {"pipeline_schedule": "pipedream", "clip_grad": 0.0, "global_batch_size": 64})
    assert microbatches_to_run(plan, 0) == 32


@pytest.mark.parametrize("name", LONG)
def test_a_short_step_has_the_peak_and_messages_of_the_full_one(name: str) -> None:
    changes = LONG[name] | {"global_batch_size": 48, "num_layers": 4}
    plan = make_plan(4 if "sequence_parallel" in changes else 2, changes)
    last = plan.topology.world_size - 1
    short, whole = (count_rank(plan, last, random_reader(plan), in_full=in_full) for in_full in (False, True))
    assert short.num_run < whole.num_run == 24
    tokens = 16 * plan.config.training.micro_batch_size * plan.config.model.seq_length
    # tokens and labels of the remaining microbatches
    assert 0 <= whole.peak - short.peak <= (whole.num_run - short.num_run) * (tokens + 64)
    assert short.traffic is not None and whole.traffic is not None
    assert short.traffic.counts == whole.traffic.counts
    assert short.traffic.bytes == whole.traffic.bytes
