"""CSV files exchanged with torch.distributed.pipelining.

torch reads them with _load_csv, lowers them, and writes them back with _dump_csv.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from megapipe.extras.report.schedule_csv import from_csv
from megapipe.schedule.families import SCHEDULES, build_lowered, build_schedule
from megapipe.schedule.schedule import Schedule, to_csv
from megapipe.schedule.validate import validate

RANKS, MICROBATCHES = 2, 8
# unsupported by torch: stages on two ranks; UPDATE
ONLY_HERE = {name for name, family in SCHEDULES.items() if family.is_mirrored(RANKS) or not family.is_synchronous}


def made(name: str, lowered: bool = False) -> Schedule:
    family = SCHEDULES[name]
    chunks = family.chunks or (2 if family.takes_chunks else 1)
    return (build_lowered if lowered else build_schedule)(name, RANKS, chunks, MICROBATCHES)


def torch_runtime(schedule: Schedule) -> torch_schedules._PipelineScheduleRuntime:
    """Build torch's runtime without stages and process groups: only the parts that read, lower and write."""
    runtime = object.__new__(torch_schedules._PipelineScheduleRuntime)
    runtime.pp_group_size, runtime._num_stages, runtime._n_microbatches = (
        RANKS,
        schedule.num_stages,
        schedule.num_microbatches,
    )
    runtime.stage_index_to_group_rank = dict(enumerate(schedule.placement.rank_of_stage))
    runtime._stages, runtime.pipeline_order, runtime._defer_pp_recv = [], {}, False
    return runtime


@pytest.mark.parametrize("name", sorted(set(SCHEDULES) - ONLY_HERE))
def test_torch_loads_ours_and_what_it_lowers_and_dumps_loads_here(name: str, tmp_path: Path) -> None:
    schedule, ours, theirs = made(name), tmp_path / "ours.csv", tmp_path / "theirs.csv"
    ours.write_text(to_csv(schedule))
    runtime = torch_runtime(schedule)
    runtime._load_csv(str(ours), "compute_only")
    runtime._dump_csv(str(theirs), "compute_only")
    assert from_csv(theirs.read_text(), name, schedule.placement) == schedule
    runtime._dump_csv(str(theirs), "compute_comms")
    text = theirs.read_text()
    assert "0UNSHARD" in text and "0RECV_B0" in text and "0REDUCE_GRAD" in text
    back = from_csv(text, name, schedule.placement)
    validate(back)
    assert back.compute_only() == schedule


@pytest.mark.parametrize("name", sorted(set(SCHEDULES) - ONLY_HERE))
def test_torch_loads_our_messages_and_reductions(name: str, tmp_path: Path) -> None:
    lowered, ours, theirs = made(name, lowered=True), tmp_path / "ours.csv", tmp_path / "theirs.csv"
    ours.write_text(to_csv(lowered))
    runtime = torch_runtime(lowered)
    runtime._load_csv(str(ours), "compute_comms")
    runtime._dump_csv(str(theirs), "compute_comms")
    assert from_csv(theirs.read_text(), name, lowered.placement).rows == lowered.rows


def test_torch_rejects_update_actions(tmp_path: Path) -> None:
    file = tmp_path / "ours.csv"
    file.write_text(to_csv(made("pipedream")))
    with pytest.raises(RuntimeError, match="0UPDATE0"):
        torch_runtime(made("pipedream"))._load_csv(str(file), "compute_comms")
