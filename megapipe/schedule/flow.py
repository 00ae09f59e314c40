"""How many messages a channel has under way when no sender waits for room."""

from __future__ import annotations

from collections import defaultdict

from megapipe.schedule.action import SEND_OPS
from megapipe.schedule.dependencies import Channel, channel_of
from megapipe.schedule.schedule import Schedule
from megapipe.schedule.simulate import Costs, simulate


def unhindered_send_depth(schedule: Schedule) -> int:
    """The most messages of one channel that are sent and not yet received, in a lowered schedule where F, I and W take equally long.

    With room for as many, the schedule runs to its end (any bound that lets one order of events through lets all through) and a sender
    does not stand still. Breadth-first needs nearly all of them: a rank runs ahead of the one that uses its last chunk but one.
    """
    timeline = simulate(schedule, Costs.equal(schedule.num_stages, 1.0, 1.0, 1.0))
    directions = len(schedule.placement.directions)
    changes: dict[Channel, list[tuple[float, int]]] = defaultdict(list)  # (time, +1 or -1)
    for row, starts, ends in zip(schedule.rows, timeline.starts, timeline.ends, strict=True):
        for action, start, end in zip(row, starts, ends, strict=True):
            if action[1] in SEND_OPS:
                changes[channel_of(action, directions)] += [(start, 1), (end, -1)]
    return max(map(_most_at_once, changes.values()), default=0)


def _most_at_once(changes: list[tuple[float, int]]) -> int:
    """What begins when another ends counts as beside it."""
    now = most = 0
    for _, change in sorted(changes, key=lambda entry: (entry[0], -entry[1])):
        now += change
        most = max(most, now)
    return most
