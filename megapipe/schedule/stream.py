"""Asynchronous schedules as streams that do not drain between steps, and the versions of the weights in them.

A stream is a prologue that fills the pipeline, a period for each step, and an epilogue that drains it. In the period of
step t a rank runs all backwards of step t and as many forwards, of which the last are those of step t + 1 that the
pipeline holds. Version t of a stage's weights is the result of its t-th update, version 0 the one that the stream
starts with. When it has drained, all ranks have made the same number of updates and need only the newest version.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import NamedTuple, NoReturn

from megapipe.errors import ScheduleError
from megapipe.schedule.action import COMPLETES_OPS, COMPUTE_OPS, RECV_OPS, SEND_OPS, Action, Op
from megapipe.schedule.costs import Costs
from megapipe.schedule.dependencies import TRAVELS, ChannelPath, channel_of
from megapipe.schedule.schedule import Row, Schedule, rows_text
from megapipe.schedule.simulate import Bubble, simulate
from megapipe.schedule.validate import validate


class Place(NamedTuple):
    """The place of a forward in a stream: what decides on the weights that it uses."""

    microbatch: int  # counted from the start of the stream
    newest: int  # version on its rank
    step_size: int  # microbatches of a step
    num_ranks: int


@dataclass(frozen=True)
class Versions:
    """The weights that the microbatches of an asynchronous schedule use.

    of_forward: returns the version of a forward; later microbatches use no older ones. is_stashed: the backward uses
    the version of its forward; otherwise the newest one. is_delayed: an update comes a step after its gradients, once
    their norm is known over the whole model; otherwise at once, so that only the norm of its stage is.
    """

    of_forward: Callable[[Place], int]
    is_stashed: bool = True
    is_delayed: bool = False


def newest(place: Place) -> int:
    """Return the newest version; in 1F1B with an update after each microbatch max(0, microbatch - (p - 1 - rank))."""
    return place.newest


def newest_at_entry(place: Place) -> int:
    """Return the newest version on the first stage when the microbatch enters it (PipeDream's vertical sync)."""
    return max(0, place.microbatch - (place.num_ranks - 1))


def one_step_old(place: Place) -> int:
    """Return the version before the update of the step before, the same on every rank (PipeDream-2BW)."""
    return max(0, place.microbatch // place.step_size - 1)


@dataclass(frozen=True)
class WeightVersions:
    """The weight versions of one rank's stage in a stretch of a stream."""

    of_forward: tuple[int, ...]  # by microbatch
    num_held: int  # the most versions from the oldest that is still needed to the newest
    num_crossed: int  # the most updates between the forward and the backward of a microbatch


def weight_versions(schedule: Schedule, pp_rank: int, versions: Versions) -> WeightVersions:
    """Return the versions on a rank that holds one stage.

    Raises ScheduleError if a forward runs before the version that it uses.
    """
    row, count, of_forward = schedule.rows[pp_rank], 0, [0] * schedule.num_microbatches
    for stage, op, microbatch in row:
        count += op is Op.UPDATE
        if op is Op.F:
            assert microbatch is not None
            version = versions.of_forward(Place(microbatch, count, schedule.step_size, schedule.num_ranks))
            of_forward[microbatch] = version
            if version > count:
                raise ScheduleError(
                    f"schedule {schedule}: {stage}F{microbatch} on rank {pp_rank} uses weight version {version}, the "
                    f"newest is {count}"
                )
    live: dict[int, int] = {}  # microbatch in flight -> newest version at its forward
    to_come = [*of_forward, count]  # a version is needed by later forwards, too
    count, most, crossed, next_forward = 0, 1, 0, 0
    for _, op, microbatch in row:
        if op is Op.UPDATE:
            count += 1
            needed = [of_forward[each] for each in live] if versions.is_stashed else []
            most = max(most, count - min([*needed, to_come[next_forward], count]) + 1)
        elif op is Op.F:
            assert microbatch is not None
            live[microbatch], next_forward = count, microbatch + 1
        elif op in COMPLETES_OPS:
            assert microbatch is not None
            crossed = max(crossed, count - live.pop(microbatch))
    return WeightVersions(tuple(of_forward), most, crossed)


STRETCH = 4  # steps of a stream that are written out: the first, two equal ones, the last


class Steady(NamedTuple):
    """The period of a stream in its steady state."""

    seconds: float
    work_seconds: tuple[float, ...]  # of each rank

    @property
    def bubble(self) -> Bubble:
        """The mean over ranks of the seconds without work; uneven stages count as idle time."""
        mean = sum(self.work_seconds) / len(self.work_seconds)
        return Bubble(self.seconds - mean, mean)


@dataclass(frozen=True)
class Stream:
    """A lowered schedule without an end, proven for any number of steps.

    stretch: the schedule of the first STRETCH steps. alone: that of a single one, which fills and drains the pipeline.

    Each rank's row is cut into the parts of the steps: that of step t begins with the first computation after the last
    backward of step t - 1, or the receives posted right before it. Raises ScheduleError, with the grid, if the middle
    of a row does not repeat, or an action waits for a part of another rank that comes later: then the proof of the
    stretch is none of the stream. So it does where updates of a step take unequal numbers of microbatches.
    """

    stretch: Schedule
    alone: Schedule

    def __post_init__(self) -> None:
        size = self.stretch.step_size
        for rank, row in enumerate(self.stretch.rows):
            _, first, second, third = self.cuts[rank]
            repeated, again = _shifted(row[first:second], size), row[second:third]
            if repeated != again:
                pairs = zip(repeated, again, strict=False)
                slot = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
                self._fail("the actions of a step are not those of the step before, a step later", rank, second + slot)
        _ = self.send_depth, self.update_size  # which prove that no step can deadlock, and that updates are alike

    @cached_property
    def update_size(self) -> int:
        """Microbatches whose gradients an update takes, the same for all of them."""
        count, size = sum(action.op is Op.UPDATE for action in self.alone.rows[0]), self.stretch.step_size
        wanted = [size * number // count - 1 for number in range(1, count + 1)] if count and size % count == 0 else []
        for rank, row in enumerate(self.alone.rows):
            found = [action.microbatch for action in row if action.op is Op.UPDATE]
            if not found or found != wanted:
                numbers = " ".join(map(str, found)) or "none"
                self._fail(f"updates follow microbatches {numbers} of a step; each must take equally many", rank, 0)
        return size // count

    def row(self, pp_rank: int, step: int, drains: bool) -> Row:
        """Return the actions of a rank from the beginning of a step's part to that of the next one.

        step: its number in the stream. drains: the stream ends with it. Microbatches have their numbers in the stream,
        modulo those of two steps.
        """
        size = self.stretch.step_size
        row, (_, first, second, last) = self.stretch.rows[pp_rank], self.cuts[pp_rank]
        if step == 0:
            part, shown = (self.alone.rows[pp_rank], 0) if drains else (row[:first], 0)
        else:
            part, shown = (row[last:], STRETCH - 1) if drains else (row[first:second], 1)
        return _shifted(part, (step - shown) * size, 2 * size)

    @cached_property
    def cuts(self) -> tuple[tuple[int, ...], ...]:
        """The slot of each rank's row at which the part of each step begins."""
        return _cuts(self.stretch)

    @cached_property
    def send_depth(self) -> Mapping[ChannelPath, int]:
        """The sends of each channel in flight with which no number of steps can deadlock.

        The stretch cannot deadlock, and in it every wait is for something of the same or an earlier part on another
        rank. Parts repeat, so a ring of ranks that wait for one another would lie within one part: in the stretch.
        """
        depths = dict(validate(self.stretch).least_send_depth)
        sent: dict[Action, int] = {}  # the SEND of each message -> its part
        sends: defaultdict[ChannelPath, list[int]] = defaultdict(list)  # the parts of messages in order
        posts: defaultdict[ChannelPath, list[int]] = defaultdict(list)
        for rank, row in enumerate(self.stretch.rows):
            for slot, action in enumerate(row):
                if action.op in SEND_OPS:
                    sent[action] = part = self._part(rank, slot)
                    sends[channel_of(action)].append(part)
                elif action.op in RECV_OPS:
                    posts[channel_of(action)].append(self._part(rank, slot))
        for rank, row in enumerate(self.stretch.rows):
            for message, slot in _used_at(row).items():
                send, step = _SENDS[message.op]
                if sent[Action(message.stage + step, send, message.microbatch)] > self._part(rank, slot):
                    self._fail(f"{row[slot]} waits for a message that is sent in the part of a later step", rank, slot)
        for channel, parts in sends.items():
            # the n-th send is blocked until the receive of the message `depth` sends before it is posted
            while any(post > send for post, send in zip(posts[channel], parts[depths[channel] :], strict=False)):
                depths[channel] += 1
        return depths

    def _part(self, pp_rank: int, slot: int) -> int:
        """Return the step in whose part a slot lies."""
        return bisect_right(self.cuts[pp_rank], slot) - 1

    def _fail(self, message: str, rank: int, slot: int) -> NoReturn:
        rows = rows_text(self.stretch.rows, [(rank, slot)])
        raise ScheduleError(f"schedule {self.stretch}: rank {rank}, slot {slot}: {message}\n{rows}")


def steady(stretch: Schedule, costs: Costs) -> Steady:
    """Return the time of a step in the middle of a stretch of several, simulated."""
    timeline, spans, size = simulate(stretch, costs), [], stretch.step_size
    last = (stretch.num_steps - 1) * size
    for row, times in zip(stretch.rows, timeline.starts, strict=True):
        starts = {action.microbatch: start for action, start in zip(row, times, strict=True) if action.op is Op.F}
        spans.append(starts[last] - starts[last - size])
    return Steady(max(spans), tuple(work / stretch.num_steps for work in timeline.work_seconds))


# RECV -> the SEND of its message, and the step from its stage to the one that sends
_SENDS = {receive: (send, -step) for send, receive, step in TRAVELS.values()}
# a computation -> the RECV of what it may wait for
_RECEIVES = {Op.F: Op.RECV_F, Op.B: Op.RECV_B, Op.I: Op.RECV_B}


def _used_at(row: Row) -> dict[Action, int]:
    """Return the slot of the computation that waits for each RECV of a row."""
    received, found = {action for action in row if action.op in RECV_OPS}, {}
    for slot, action in enumerate(row):
        if action.op in _RECEIVES and (receive := action._replace(op=_RECEIVES[action.op])) in received:
            found[receive] = slot
    return found


def _cuts(stretch: Schedule) -> tuple[tuple[int, ...], ...]:
    """Return the slot of each rank's row at which the part of each step begins."""
    found = []
    for row in stretch.rows:
        ends = {action.microbatch: slot for slot, action in enumerate(row) if action.op in COMPLETES_OPS}
        computations = [slot for slot, action in enumerate(row) if action.op in COMPUTE_OPS]
        cuts = [0]
        for step in range(1, stretch.num_steps):
            cut = next(slot for slot in computations if slot > ends[step * stretch.step_size - 1])
            while row[cut - 1].op in RECV_OPS:
                cut -= 1
            cuts.append(cut)
        found.append(tuple(cuts))
    return tuple(found)


def common_depth(stretch: Schedule) -> int:
    """Return how many actions ahead receives may be posted so that they do not depend on whether a stream goes on.

    stretch: compute-only. The part of a step that drains the pipeline begins as that of a step that does not.
    """
    size, least = stretch.step_size, max(map(len, stretch.rows))
    for row, (*_, before, last) in zip(stretch.rows, _cuts(stretch), strict=True):
        pairs = zip(_shifted(row[before:last], size), row[last:], strict=False)
        least = min(least, sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)))
    return least


def _shifted(row: Row, by: int, modulus: int | None = None) -> Row:
    """Return a row whose microbatches have numbers that are greater by `by`."""
    numbers = ((action.microbatch or 0) + by for action in row)
    return tuple(
        action._replace(microbatch=number if modulus is None else number % modulus)
        for action, number in zip(row, numbers, strict=True)
    )
