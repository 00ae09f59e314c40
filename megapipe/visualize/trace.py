"""A timeline as Chrome trace JSON, to be opened in Perfetto (ui.perfetto.dev) or chrome://tracing beside a measured trace."""

from __future__ import annotations

import json
from typing import Any

from megapipe.schedule.action import COMPUTE_OPS, RECV_OPS, Op
from megapipe.schedule.simulate import Timeline

_THREADS = {"compute": 0, "messages": 1, "reductions": 2}


def chrome_trace(timeline: Timeline) -> str:
    """One process a pp_rank with a thread each for computation, messages sent and reductions; times in microseconds."""
    events: list[dict[str, Any]] = []
    for rank, row in enumerate(timeline.schedule.rows):
        events.append({"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"pp_rank {rank}"}})
        events += [{"ph": "M", "pid": rank, "tid": tid, "name": "thread_name", "args": {"name": n}} for n, tid in _THREADS.items()]
        for action, start, end in zip(row, timeline.starts[rank], timeline.ends[rank], strict=True):
            if action.op in RECV_OPS:  # the same message as its SEND, which is drawn at the sender
                continue
            thread = "compute" if action.op in COMPUTE_OPS else "reductions" if action.op is Op.REDUCE_GRAD else "messages"
            event = {"ph": "X", "pid": rank, "tid": _THREADS[thread], "name": str(action), "cat": action.op.value}
            args = {"stage": action.stage, "microbatch": action.microbatch}
            events.append(event | {"ts": start * 1e6, "dur": (end - start) * 1e6, "args": args})
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"schedule": str(timeline.schedule)}})
