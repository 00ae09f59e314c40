"""A simulated timeline as Chrome trace JSON, to be opened in Perfetto (ui.perfetto.dev) or chrome://tracing."""

from __future__ import annotations

from megapipe.profile.trace import Event, action_event, thread_names, trace_text
from megapipe.schedule.action import BUSY_OPS, RECV_OPS, SHARDING_OPS, Op
from megapipe.schedule.simulate import Timeline

THREADS = ("compute", "messages", "reductions")  # of a rank


def chrome_trace(timeline: Timeline) -> str:
    """Return a trace with one process per pp_rank and a thread each for computation, messages sent and reductions."""
    events: list[Event] = []
    for rank, row in enumerate(timeline.schedule.rows):
        events += thread_names(rank, f"pp_rank {rank}", THREADS)
        for action, start, end in zip(row, timeline.starts[rank], timeline.ends[rank], strict=True):
            if action.op in RECV_OPS:  # drawn as its SEND, on the sender
                continue
            thread = "compute" if action.op in BUSY_OPS else "messages"
            if action.op in {Op.REDUCE_GRAD, *SHARDING_OPS}:
                thread = "reductions"
            events.append(action_event(timeline.schedule, rank, THREADS.index(thread), action, start, end))
    return trace_text(events, {"schedule": str(timeline.schedule)})
