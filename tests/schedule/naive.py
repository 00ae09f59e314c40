"""An executor that shares no code with the package's own: ranks take turns and messages travel in queues.

It is the oracle for `validate`.
"""

from __future__ import annotations

from collections import defaultdict

from megapipe.schedule.schedule import Schedule

Name = tuple[str, int, int]  # (kind of value, stage or boundary, microbatch or direction)


def runs(schedule: Schedule, send_depth: float = float("inf")) -> bool:
    """Return True if a lowered schedule finishes with the expected messages and all work done exactly once."""
    executor = _Executor(schedule, send_depth)
    progress = True
    while progress:
        unfinished = [rank for rank, row in enumerate(schedule.rows) if executor.position[rank] < len(row)]
        moved = [executor.try_one(rank) for rank in unfinished]
        progress = any(moved)
        if not executor.deliver():
            return False
    return executor.is_complete()


class _Executor:
    def __init__(self, schedule: Schedule, send_depth: float) -> None:
        self.schedule, self.send_depth = schedule, send_depth
        self.last, self.lanes = schedule.num_stages - 1, len(schedule.placement.directions)
        self.position = [0] * schedule.num_ranks
        self.have: list[set[Name]] = [set() for _ in schedule.rows]
        self.sent: dict[Name, list[int]] = defaultdict(list)
        self.posted: dict[Name, list[tuple[int, int]]] = defaultdict(list)  # (rank, microbatch)
        self.delivered: dict[Name, int] = defaultdict(int)
        self.done: dict[tuple[int, str, int | None], int] = defaultdict(int)

    def try_one(self, rank: int) -> bool:
        """Run the next action of a rank if it can run."""
        stage, op, mb = self.schedule.rows[rank][self.position[rank]]
        here, name = self.have[rank], op.value
        if name == "OVERLAP":
            return self.try_pair(rank)
        if name in ("SEND_F", "SEND_B", "RECV_F", "RECV_B"):
            ran = self.try_message(rank, name, stage, mb)
        elif name in ("UPDATE", "REDUCE_GRAD"):
            if name == "UPDATE":
                wanted = [k for k in range(mb + 1) if k % self.lanes == mb % self.lanes]
            else:
                count = self.schedule.num_microbatches
                wanted = [k for k in range(count) if self.schedule.placement.rank_of(stage, k) == rank]
            ran = all(("wgrad", stage, k) in here for k in wanted)
        else:
            ran = self.try_computation(here, name, stage, mb)
        if ran:
            self.done[stage, name, mb] += 1
            self.position[rank] += 1
        return ran and (name != "UPDATE" or self.done[stage, name, mb] == 1)

    def try_computation(self, here: set[Name], name: str, stage: int, mb: int) -> bool:
        needs = {
            "F": {("act", stage - 1, mb)} if stage else set(),
            "B": {("act", stage, mb)} | ({("grad", stage + 1, mb)} if stage < self.last else set()),
            "W": {("left", stage, mb)},
        }
        makes = {
            "F": {("act", stage, mb)},
            "B": {("grad", stage, mb), ("wgrad", stage, mb)},
            "I": {("grad", stage, mb), ("left", stage, mb)},
            "W": {("wgrad", stage, mb)},
        }
        if not needs["B" if name == "I" else name] <= here:
            return False
        here |= makes[name]
        return True

    def try_message(self, rank: int, name: str, stage: int, mb: int) -> bool:
        kind = "act" if name.endswith("F") else "grad"
        is_boundary_before = name in ("SEND_B", "RECV_F")
        channel = (kind, stage - is_boundary_before, mb % self.lanes)
        if name.startswith("RECV"):
            self.posted[channel].append((rank, mb))
            return True
        in_flight = len(self.sent[channel]) - len(self.posted[channel])
        if (kind, stage, mb) not in self.have[rank] or in_flight + 1 > self.send_depth:
            return False
        self.sent[channel].append(mb)
        return True

    def try_pair(self, rank: int) -> bool:
        """Run a forward and a backward that start together: neither may depend on the other."""
        slot = self.position[rank]
        marker, halves = self.schedule.rows[rank][slot], self.schedule.rows[rank][slot + 1 : slot + 3]
        if [a.op.value for a in halves] not in (["F", "B"], ["F", "I"]) or halves[0][::2] != marker[::2]:
            return False
        (f, _, fm), (b, _, bm) = halves
        here = self.have[rank]
        if (
            (f > 0 and ("act", f - 1, fm) not in here)
            or ("act", b, bm) not in here
            or (b < self.last and ("grad", b + 1, bm) not in here)
        ):
            return False
        self.position[rank] += 1
        return self.try_one(rank) and self.try_one(rank)

    def deliver(self) -> bool:
        """Deliver messages whose receives are posted; return False if one arrives out of order."""
        for channel, messages in self.sent.items():
            kind, boundary, _ = channel
            while self.delivered[channel] < min(len(messages), len(self.posted[channel])):
                rank, expected = self.posted[channel][self.delivered[channel]]
                if expected != messages[self.delivered[channel]]:
                    return False
                self.have[rank].add((kind, boundary if kind == "act" else boundary + 1, expected))
                self.delivered[channel] += 1
        return True

    def is_complete(self) -> bool:
        finished = all(self.position[rank] == len(row) for rank, row in enumerate(self.schedule.rows))
        matched = all(len(messages) == len(self.posted[channel]) for channel, messages in self.sent.items())
        done = self.done
        once = all(
            done[stage, "F", k] == 1
            and done[stage, "B", k] + done[stage, "I", k] == 1
            and done[stage, "W", k] == done[stage, "I", k]
            for stage in range(self.last + 1)
            for k in range(self.schedule.num_microbatches)
        )
        return finished and matched and once
