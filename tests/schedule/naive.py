"""An executor that shares no code with the package's own: ranks take turns and messages travel in queues.

It is the oracle for `validate`.
"""

from __future__ import annotations

from collections import defaultdict

from megapipe.schedule.schedule import Schedule


def runs(schedule: Schedule, send_depth: float = float("inf")) -> bool:
    """Return True if a lowered schedule finishes with the expected messages and all work done exactly once."""
    last, m = schedule.num_stages - 1, schedule.num_microbatches
    have: list[set[tuple[str, int, int]]] = [set() for _ in schedule.rows]
    sent: dict[tuple[str, int, int], list[int]] = defaultdict(list)
    posted: dict[tuple[str, int, int], list[tuple[int, int]]] = defaultdict(list)
    position, lanes = [0] * schedule.num_ranks, len(schedule.placement.directions)
    done: dict[tuple[int, str, int | None], int] = defaultdict(int)

    def try_one(rank: int) -> bool:
        stage, op, mb = schedule.rows[rank][position[rank]]
        here, name = have[rank], op.value
        if name == "OVERLAP":
            return try_pair(rank)
        if name == "UPDATE":
            if any(("wgrad", stage, k) not in here for k in range(mb + 1) if k % lanes == mb % lanes):
                return False
            done[stage, name, mb] += 1
            position[rank] += 1
            return done[stage, name, mb] == 1
        if name == "F":
            if stage > 0 and ("act", stage - 1, mb) not in here:
                return False
            here.add(("act", stage, mb))
        elif name in "BI":
            if ("act", stage, mb) not in here or (stage < last and ("grad", stage + 1, mb) not in here):
                return False
            here |= {("grad", stage, mb), ("wgrad" if name == "B" else "left", stage, mb)}
        elif name == "W":
            if ("left", stage, mb) not in here:
                return False
            here.add(("wgrad", stage, mb))
        elif name in ("SEND_F", "SEND_B"):
            kind, boundary = ("act", stage) if name == "SEND_F" else ("grad", stage - 1)
            channel = (kind, boundary, mb % lanes)
            if (kind, stage, mb) not in here or len(sent[channel]) + 1 - len(posted[channel]) > send_depth:
                return False
            sent[channel].append(mb)
        elif name in ("RECV_F", "RECV_B"):
            channel = ("act", stage - 1, mb % lanes) if name == "RECV_F" else ("grad", stage, mb % lanes)
            posted[channel].append((rank, mb))
        else:
            wanted = [k for k in range(m) if schedule.placement.rank_of(stage, k) == rank]
            if any(("wgrad", stage, k) not in here for k in wanted):
                return False
        done[stage, name, mb] += 1
        position[rank] += 1
        return True

    def try_pair(rank: int) -> bool:
        """Run a forward and a backward that start together: neither may depend on the other."""
        slot = position[rank]
        marker, halves = schedule.rows[rank][slot], schedule.rows[rank][slot + 1 : slot + 3]
        if [a.op.value for a in halves] not in (["F", "B"], ["F", "I"]) or halves[0][::2] != marker[::2]:
            return False
        (f, _, fm), (b, _, bm) = halves
        here = have[rank]
        if (
            (f > 0 and ("act", f - 1, fm) not in here)
            or ("act", b, bm) not in here
            or (b < last and ("grad", b + 1, bm) not in here)
        ):
            return False
        position[rank] += 1
        return try_one(rank) and try_one(rank)

    delivered: dict[tuple[str, int, int], int] = defaultdict(int)
    progress = True
    while progress:
        moved = [try_one(rank) for rank in range(schedule.num_ranks) if position[rank] < len(schedule.rows[rank])]
        progress = any(moved)
        for channel, messages in sent.items():
            while delivered[channel] < min(len(messages), len(posted[channel])):
                rank, expected = posted[channel][delivered[channel]]
                if expected != messages[delivered[channel]]:
                    return False
                kind, boundary, _ = channel
                have[rank].add((kind, boundary if kind == "act" else boundary + 1, expected))
                delivered[channel] += 1
    finished = all(position[rank] == len(row) for rank, row in enumerate(schedule.rows))
    matched = all(len(messages) == len(posted[channel]) for channel, messages in sent.items())
    once = all(
        done[stage, "F", k] == 1
        and done[stage, "B", k] + done[stage, "I", k] == 1
        and done[stage, "W", k] == done[stage, "I", k]
        for stage in range(last + 1)
        for k in range(m)
    )
    return finished and matched and once
