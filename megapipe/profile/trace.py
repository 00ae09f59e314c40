"""Timelines as Chrome trace JSON, to be opened in Perfetto (ui.perfetto.dev) or chrome://tracing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from megapipe.profile.difference import Comparison, compare
from megapipe.profile.profile import PipelineSteps, Profile
from megapipe.schedule.action import BUSY_OPS, COMPUTE_OPS, RECV_OPS, SEND_OPS, Action, Op
from megapipe.schedule.simulate import Timeline

Event = dict[str, Any]
_THREADS = {"compute": 0, "messages": 1, "reductions": 2}
PLAN, MEASURED, WAITS, MESSAGES, PHASES = range(5)  # threads of a rank in the trace of a profile
_PROFILE_THREADS = {
    PLAN: "plan",
    MEASURED: "measured",
    WAITS: "waits",
    MESSAGES: "posting messages, reductions",
    PHASES: "phases",
}


def chrome_trace(timeline: Timeline) -> str:
    """One process a pp_rank with a thread each for computation, messages sent and reductions; times in microseconds."""
    events: list[Event] = []
    for rank, row in enumerate(timeline.schedule.rows):
        events += _named(rank, f"pp_rank {rank}", {tid: name for name, tid in _THREADS.items()})
        for action, start, end in zip(row, timeline.starts[rank], timeline.ends[rank], strict=True):
            if action.op in RECV_OPS:  # the same message as its SEND, which is drawn at the sender
                continue
            thread = "compute" if action.op in BUSY_OPS else "reductions" if action.op is Op.REDUCE_GRAD else "messages"
            events.append(_event(rank, _THREADS[thread], action, start, end))
    return json.dumps(
        {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"schedule": str(timeline.schedule)}}
    )


def profile_trace(profile: Profile) -> str:
    """One process a global rank, whose first two threads are the plan and the measurement of each step on one axis; microseconds.

    A step's plan begins where its first action of any rank began.
    """
    events: list[Event] = []
    for pipeline in profile.pipelines:
        for pp_rank, rank in enumerate(pipeline.global_ranks):
            place = f"rank {rank}: pp {pp_rank}, tp {pipeline.tp_rank}, dp {pipeline.dp_rank}"
            events += _named(rank, place, _PROFILE_THREADS)
        for step in pipeline.steps:
            events += _step_events(pipeline, compare(profile, pipeline, step))
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"about": profile.about}})


def _step_events(pipeline: PipelineSteps, comparison: Comparison) -> Iterator[Event]:
    measured, plan = comparison.measured, comparison.plan
    origin = measured.origin_ns / 1e9
    for pp_rank, rank in enumerate(pipeline.global_ranks):
        for slot, action in enumerate(measured.schedule.rows[pp_rank]):
            start, end = measured.starts[pp_rank][slot], measured.ends[pp_rank][slot]
            if action.op in COMPUTE_OPS:
                yield _event(rank, PLAN, action, origin + plan.starts[pp_rank][slot], origin + plan.ends[pp_rank][slot])
                yield _event(rank, MEASURED, action, origin + measured.begins[pp_rank][slot], origin + end)
            elif action.op in SEND_OPS | RECV_OPS | {Op.REDUCE_GRAD, Op.UPDATE}:
                yield _event(rank, MESSAGES, action, origin + start, origin + end)
            if measured.message_waits[pp_rank][slot]:
                yield _event(
                    rank,
                    WAITS,
                    action,
                    origin + start,
                    origin + measured.begins[pp_rank][slot],
                    "wait for the message of ",
                )
        for name, begin, stop in measured.step.rows[pp_rank].phases:
            label = f"step {measured.step.step}" if name == "step" else name
            yield {
                "ph": "X",
                "pid": rank,
                "tid": PHASES,
                "name": label,
                "cat": "phase",
                "ts": begin / 1e3,
                "dur": (stop - begin) / 1e3,
            }


def _named(pid: int, name: str, threads: dict[int, str]) -> list[Event]:
    events: list[Event] = [{"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}}]
    events.append({"ph": "M", "pid": pid, "name": "process_sort_index", "args": {"sort_index": pid}})
    for tid, thread in threads.items():
        events.append({"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": thread}})
        events.append({"ph": "M", "pid": pid, "tid": tid, "name": "thread_sort_index", "args": {"sort_index": tid}})
    return events


def _event(pid: int, tid: int, action: Action, start: float, end: float, prefix: str = "") -> Event:
    args = {"stage": action.stage, "microbatch": action.microbatch}
    name = f"{prefix}{action}"
    return {
        "ph": "X",
        "pid": pid,
        "tid": tid,
        "name": name,
        "cat": action.op.value,
        "args": args,
        "ts": start * 1e6,
        "dur": (end - start) * 1e6,
    }
