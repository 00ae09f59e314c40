"""Process groups with a short timeout for the communication tests."""

from __future__ import annotations

from megapipe.comm.groups import ProcessGroups, build_process_groups
from megapipe.comm.trace import Tracer
from megapipe.topology import Topology


def groups_of(
    rank: int, topology: Topology, timeout_seconds: float = 30.0, tracer: Tracer | None = None
) -> ProcessGroups:
    return build_process_groups(topology, rank, "gloo", timeout_seconds, tracer)
