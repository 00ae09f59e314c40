"""Timelines as Chrome trace JSON, to be opened in Perfetto (ui.perfetto.dev) or chrome://tracing."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from megapipe.extras.report.profile_summary import Comparison, compare
from megapipe.profile.profile import Profile
from megapipe.schedule.action import BUSY_OPS, COMPUTE_OPS, RECV_OPS, SEND_OPS, SHARDING_OPS, Action, Op
from megapipe.schedule.schedule import Schedule
from megapipe.schedule.simulate import Timeline

Event = dict[str, Any]

# threads of a rank, in the trace of a simulated timeline and in that of a profile
TIMELINE_THREADS = ("compute", "messages", "reductions")
PROFILE_THREADS = ("plan", "measured", "waits", "posting messages, reductions", "phases")
PLAN, MEASURED, WAITS, MESSAGES, PHASES = range(len(PROFILE_THREADS))


def chrome_trace(timeline: Timeline) -> str:
    """Return a trace with one process per pp_rank and a thread each for computation, messages sent and reductions."""
    events: list[Event] = []
    for rank, row in enumerate(timeline.schedule.rows):
        events += _names(rank, f"pp_rank {rank}", TIMELINE_THREADS)
        for action, start, end in zip(row, timeline.starts[rank], timeline.ends[rank], strict=True):
            if action.op in RECV_OPS:  # drawn as its SEND, on the sender
                continue
            thread = "compute" if action.op in BUSY_OPS else "messages"
            if action.op in {Op.REDUCE_GRAD, *SHARDING_OPS}:
                thread = "reductions"
            events.append(_event(timeline.schedule, rank, TIMELINE_THREADS.index(thread), action, start, end))
    return _trace(events, {"schedule": str(timeline.schedule)})


def profile_trace(profile: Profile) -> str:
    """Return a trace with one process per global rank, whose first two threads are plan and measurement of each step.

    The plan of a step begins where the first action of any rank began.
    """
    events: list[Event] = []
    for pipeline in profile.pipelines:
        for pp_rank, rank in enumerate(pipeline.global_ranks):
            name = f"rank {rank}: pp {pp_rank}, tp {pipeline.tp_rank}, dp {pipeline.dp_rank}"
            events += _names(rank, name, PROFILE_THREADS)
        for step in pipeline.steps:
            comparison = compare(profile, step)
            for pp_rank, rank in enumerate(pipeline.global_ranks):
                events += _rank_events(comparison, pp_rank, rank)
    return _trace(events, {"about": profile.about})


def _rank_events(comparison: Comparison, pp_rank: int, rank: int) -> Iterator[Event]:
    """Yield the plan and the measurement of one rank in one step."""
    measured, plan = comparison.measured, comparison.plan
    origin, schedule = measured.origin_ns / 1e9, measured.schedule
    for slot, action in enumerate(schedule.rows[pp_rank]):
        start, end = origin + measured.starts[pp_rank][slot], origin + measured.ends[pp_rank][slot]
        compute_start = origin + measured.compute_starts[pp_rank][slot]
        if action.op in COMPUTE_OPS:
            yield _event(
                schedule, rank, PLAN, action, origin + plan.starts[pp_rank][slot], origin + plan.ends[pp_rank][slot]
            )
            yield _event(schedule, rank, MEASURED, action, compute_start, end)
        elif action.op in SEND_OPS | RECV_OPS | {Op.REDUCE_GRAD, Op.UNSHARD, Op.UPDATE}:
            yield _event(schedule, rank, MESSAGES, action, start, end)
        if measured.message_waits[pp_rank][slot]:
            yield _event(schedule, rank, WAITS, action, start, compute_start, "wait for the message of ")
    for name, start_ns, end_ns in measured.step.rows[pp_rank].phases:
        label = f"step {measured.step.step}" if name == "step" else name
        times = {"ts": start_ns / 1e3, "dur": (end_ns - start_ns) / 1e3}
        yield {"ph": "X", "pid": rank, "tid": PHASES, "name": label, "cat": "phase", **times}


def _trace(events: list[Event], other: dict[str, Any]) -> str:
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": other})


def _names(pid: int, name: str, threads: Sequence[str]) -> list[Event]:
    events: list[Event] = [
        {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}},
        {"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": pid}},
    ]
    for tid, thread in enumerate(threads):
        events.append({"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": thread}})
        events.append({"ph": "M", "pid": pid, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}})
    return events


def _event(schedule: Schedule, pid: int, tid: int, action: Action, start: float, end: float, prefix: str = "") -> Event:
    """Return a complete event. start, end: seconds; a trace has microseconds."""
    numbers = {"stage": action.stage, "microbatch": action.microbatch}
    if schedule.num_slices > 1 and action.microbatch is not None:
        numbers["microbatch"], numbers["slice"] = divmod(action.microbatch, schedule.num_slices)
    return {
        "ph": "X",
        "pid": pid,
        "tid": tid,
        "name": f"{prefix}{schedule.text(action)}",
        "cat": action.op.value,
        "args": numbers,
        "ts": start * 1e6,
        "dur": (end - start) * 1e6,
    }
