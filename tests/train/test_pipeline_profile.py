"""--profile-pipeline on real ranks.

The profile holds the actions that ran, on one clock, and plan and measurement do the same work.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from time import perf_counter_ns
from typing import Any

import pytest
import torch

from megapipe.comm.groups import build_process_groups
from megapipe.comm.round_trips import round_trips
from megapipe.comm.trace import Tracer
from megapipe.extras.report.comparison import comparison_svg
from megapipe.extras.report.profile import profiles_in, read_profile
from megapipe.extras.report.profile_summary import profile_text, summarize
from megapipe.gpu.device_clock import EventClock
from megapipe.optimizer.optimizer import Optimizer
from megapipe.profile.profile import RoundTrip, reading, trace_path
from megapipe.topology import Topology
from megapipe.train import pipeline_profile
from megapipe.train.journal import Journal
from megapipe.train.metrics import Observer
from megapipe.train.pipeline_profile import PipelineProfiler
from tests.harness import RankPool
from tests.pipeline.fake_device import FakeDevice
from tests.train.grids import runtime_of
from tests.train.jobs import job, job_on_rank
from tests.train.runs import tiny

Pools = Callable[[int], RankPool]
AHEAD_NS = 3_600_000_000_000


def a_clock_ahead(rank: int, *_: Any) -> None:
    """Set the clock of every rank but the first one hour ahead."""
    if rank:
        built = PipelineProfiler.__init__
        Tracer.now = lambda self, stream=None: perf_counter_ns() + AHEAD_NS  # type: ignore[method-assign]
        PipelineProfiler.__init__ = lambda *a, **k: built(  # type: ignore[method-assign]
            *a, **k, now=lambda: perf_counter_ns() + AHEAD_NS
        )
    pipeline_profile.boot_id = lambda: ""


def test_every_action_of_every_rank_is_recorded_on_one_clock(rank_pools: Pools, tmp_path: Path) -> None:
    flags = (
        "--pipeline-model-parallel-size 2 --num-virtual-stages-per-pipeline-rank 2 --tensor-model-parallel-size 2 "
        "--train-iters 4 "
        f"--profile-pipeline --profile-step-start 1 --profile-step-end 3 --metrics-file {tmp_path}/m.jsonl"
    )
    outcomes = rank_pools(4).run(job_on_rank, flags)
    assert [outcome[1:] for outcome in outcomes] == [("", None)] * 4, outcomes
    (path,) = profiles_in(tmp_path)
    profile = read_profile(path)
    assert [pipeline.global_ranks for pipeline in profile.pipelines] == [(0, 2), (1, 3)]
    assert [note.rank for note in profile.clocks] == [0, 1, 2, 3]
    assert all(note.is_shared for note in profile.clocks)  # one machine
    for pipeline in profile.pipelines:
        assert [step.step for step in pipeline.steps] == [2, 3]  # numbered as in the log
        for step in pipeline.steps:
            for row in step.rows:
                assert all(end >= start for start, end in zip(row.starts_ns, row.ends_ns, strict=True))
                assert all(after >= before for before, after in zip(row.ends_ns, row.starts_ns[1:], strict=False))
                names = [name for name, _, _ in row.phases]
                assert {"gradient-reduce", "optimizer", "step"} <= set(names)
    assert profile.message_bytes == 8 * 2 * 16 * 4  # [s, b, h], fp32
    (link,) = profile.links
    assert link.pp_ranks == (0, 1) and 0 < link.latency_seconds < 1
    summary = summarize(profile)
    assert profile_text(profile, summary) in outcomes[0][0] and "profile of steps 2 to 3: interleaved" in outcomes[0][0]
    events = json.loads(trace_path(path).read_text())["traceEvents"]
    threads = {(e["pid"], e["args"]["name"]) for e in events if e["name"] == "thread_name"}
    assert {(rank, name) for rank in range(4) for name in ("plan", "measured")} <= threads


@pytest.mark.parametrize(
    ("schedule", "pp"),
    [("zb-v", 2), ("dualpipe", 2), ("dualpipe-v", 2), ("zb-h1", 4)],
)
def test_every_kind_of_schedule_is_profiled(schedule: str, pp: int, rank_pools: Pools, tmp_path: Path) -> None:
    flags = (
        f"--pipeline-model-parallel-size {pp} --pipeline-schedule {schedule} --micro-batch-size 1 --train-iters "
        f"3 --profile-pipeline"
    )
    flags += " --clip-grad 0 --untie-embeddings-and-output-weights --profile-step-start 1 --profile-step-end 2"
    flags += f" --metrics-file {tmp_path}/m.jsonl"
    outcomes = rank_pools(pp).run(job_on_rank, flags)
    assert [outcome[1:] for outcome in outcomes] == [("", None)] * pp, outcomes
    profile = read_profile(profiles_in(tmp_path)[0])
    assert len(profile.links) == pp - 1
    (comparison,) = summarize(profile).comparisons
    # a DualPipe stage has one mean over the two ranks that hold it
    assert sum(comparison.plan.work_seconds) == pytest.approx(sum(comparison.measured.work_seconds), abs=1e-9)
    assert "plan ends" in comparison_svg(comparison, tuple(range(pp)))


def test_ranks_with_clocks_an_hour_apart_are_put_on_one(rank_pools: Pools, tmp_path: Path) -> None:
    flags = (
        f"--pipeline-model-parallel-size 2 --train-iters 2 --profile-pipeline --profile-step-start 0 "
        f"--metrics-file {tmp_path}/m.jsonl"
    )
    with RankPool(2) as pool:  # a separate pool, since its clocks stay wrong
        outcomes = pool.run(job_on_rank, flags, a_clock_ahead)
    assert [outcome[1:] for outcome in outcomes] == [("", None)] * 2, outcomes
    (path,) = profiles_in(tmp_path)
    profile = read_profile(path)
    note = profile.clocks[1]
    assert not note.is_shared and abs(note.offset_ns - AHEAD_NS) <= note.error_ns < AHEAD_NS / 1000
    assert "clocks of 1 of 2 ranks synchronized" in outcomes[0][0]
    error = note.error_ns
    for step in profile.pipelines[0].steps:
        sends, uses = step.rows
        schedule = profile.schedules[step.num_microbatches]
        for microbatch in range(step.num_microbatches):
            sent = next(i for i, a in enumerate(schedule.rows[0]) if str(a) == f"0SEND_F{microbatch}")
            used = next(i for i, a in enumerate(schedule.rows[1]) if str(a) == f"1F{microbatch}")
            assert uses.ends_ns[used] > sends.starts_ns[sent] - error  # no message is used before it is sent


def pinged(rank: int, world_size: int) -> tuple[list[tuple[int, int, int]], int]:
    groups = build_process_groups(Topology(pp=world_size), rank, "gloo", 30)
    ahead = 5_000_000_000 * rank
    return round_trips(groups.world, 0, 1, 8, torch.device("cpu"), 4096, lambda: perf_counter_ns() + ahead), ahead


def test_a_ping_pong_reads_the_other_clock_within_half_a_round_trip(rank_pools: Pools) -> None:
    (trips, _), (others, ahead) = rank_pools(2).run(pinged)
    assert len(trips) == 8 and others == []
    found = reading([RoundTrip(*trip) for trip in trips])
    assert abs(found.offset_ns - ahead) <= found.error_ns


def test_one_rank_is_profiled_too_and_a_run_that_ends_early_says_what_it_has(tmp_path: Path) -> None:
    code, said = job(f"--train-iters 2 --profile-pipeline --profile-step-start 1 --metrics-file {tmp_path}/m.jsonl")
    assert code == 0, said
    assert "profile of step 2:" in said
    (path,) = profiles_in(tmp_path)
    assert summarize(read_profile(path)).planned_idle.barrier == pytest.approx(0.0, abs=1e-9)
    code, said = job(f"--train-iters 1 --profile-pipeline --metrics-file {tmp_path}/n.jsonl")
    assert code == 0 and "--profile-pipeline: nothing was recorded" in said


def test_a_profiled_step_lasts_until_the_weights_are_updated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    update = Optimizer.step
    monkeypatch.setattr(Optimizer, "step", lambda self, *values: (time.sleep(0.2), update(self, *values))[1])
    code, said = job(f"--train-iters 2 --profile-pipeline --profile-step-start 1 --metrics-file {tmp_path}/m.jsonl")
    assert code == 0, said
    phases = summarize(read_profile(profiles_in(tmp_path)[0])).phases
    assert phases["step"] > phases["optimizer"] > 0.2


def test_on_a_gpu_a_step_has_the_times_of_events_and_costs_no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    device, written = FakeDevice(drift=1e-4), []
    monkeypatch.setattr(pipeline_profile, "EventClock", lambda real, now: EventClock(real, device, device.now))
    monkeypatch.setattr(PipelineProfiler, "_write", lambda self, recorded, links, after: written.append(recorded[0]))
    tracer = Tracer()
    runtime = runtime_of(tiny(profile_pipeline=True, profile_step_start=0, profile_step_end=2), 0, 1, tracer=tracer)
    runtime.device = torch.device("cuda")
    profiler = PipelineProfiler(runtime, Journal(None), Observer())
    profiler.before(0)
    profiler.before(0)  # a time-triggered save cancelled the profiled step
    truth = []
    for step in (0, 1):
        profiler.before(step)
        launched = device.host_ns
        for action in ("0F0", "0B0"):
            start = tracer.now()
            device.launch(50_000_000)
            tracer.event(action, "action", start, tracer.now())
            truth.append((start.event, tracer.events[-1].end_ns.event))  # type: ignore[attr-defined]
        assert device.host_ns - launched < 50_000_000, "the host was held up"
        profiler.after(step, 1)
        assert tracer.clock is None, "the next steps are not timed"
    (recorded,) = written
    actions = [event for step in recorded for event in step.events if event.kind == "action"]
    assert [step.num_microbatches for step in recorded] == [1, 1] and len(actions) == 4
    for event, ends, error in zip(actions, truth, [recorded[0].error_ns] * 2 + [recorded[1].error_ns] * 2, strict=True):
        assert 0 < error < 10_000
        for found, real in zip(event[2:], ends, strict=True):
            assert type(found) is int and abs(found - real.at) <= error + 100
    for step in recorded:
        (whole,) = [event for event in step.events if event.name == "step"]
        assert all(whole.start_ns <= event.start_ns <= event.end_ns <= whole.end_ns for event in step.events)
