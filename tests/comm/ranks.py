"""Process groups with a short timeout for the communication tests, and a record of the collectives of a rank."""

from __future__ import annotations

from time import perf_counter_ns

from megapipe.comm.groups import ProcessGroups, build_process_groups
from megapipe.comm.trace import Event
from megapipe.monitor.heartbeat import Heartbeat
from megapipe.topology import GROUP_NAMES, Topology


def groups_of(rank: int, topology: Topology, timeout_seconds: float = 30.0) -> ProcessGroups:
    return build_process_groups(topology, rank, "gloo", timeout_seconds)


class Collectives(Heartbeat):
    """A heartbeat that records every collective from its launch to the first wait for it: '<group> <operation>'."""

    def __init__(self) -> None:
        super().__init__(GROUP_NAMES)
        self.events: list[Event] = []
        self._launched: dict[tuple[str, int], int] = {}

    def count_launch(self, group: str) -> int:
        number = super().count_launch(group)
        self._launched[group, number] = perf_counter_ns()
        return number

    def wait_for_all(self, group: str, operation: str, number: int) -> None:
        super().wait_for_all(group, operation, number)
        launched = self._launched.pop((group, number))
        self.events.append(Event(f"{group} {operation}", "collective", launched, perf_counter_ns()))
