"""The table of schedules by name, and the two ways to get one: compute-only, or lowered and ready for the engine."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass

from megapipe.errors import ConfigError
from megapipe.schedule.forward_only import forward_only
from megapipe.schedule.generate.gpipe import gpipe
from megapipe.schedule.generate.interleaved import interleaved
from megapipe.schedule.generate.one_f_one_b import one_f_one_b
from megapipe.schedule.generate.shape import Shape
from megapipe.schedule.lower import lower
from megapipe.schedule.placement import Placement, linear, loop
from megapipe.schedule.schedule import Row, Schedule
from megapipe.schedule.validate import validate


@dataclass(frozen=True)
class Family:
    """One row of the table: how the stages lie, who writes the rows, and what may be asked of it."""

    generate: Callable[[Shape], tuple[Row, ...]]
    place: Callable[[int, int], Placement]  # (num_ranks, num_chunks)
    takes_chunks: bool
    takes_group_size: bool
    summary: str


SCHEDULES: dict[str, Family] = {
    "gpipe": Family(gpipe, lambda p, v: linear(p), False, False, "all forwards, then all backwards; keeps every microbatch"),
    "1f1b": Family(one_f_one_b, lambda p, v: linear(p), False, False, "one forward, one backward in turn; keeps at most pp microbatches"),
    "interleaved": Family(interleaved, loop, True, True, "1F1B over several chunks a rank; the bubble divided by their number"),
}


def build_schedule(name: str, num_ranks: int, num_chunks: int, num_microbatches: int, group_size: int | None = None) -> Schedule:
    """The compute-only schedule `name`, validated.

    group_size: microbatches that run through one chunk before the next (default num_ranks; at least that). ConfigError if the family
    cannot do what is asked, with the nearest value that works.
    """
    family = _family(name)
    shape = _checked_shape(name, family, num_ranks, num_chunks, num_microbatches, group_size)
    schedule = Schedule(name, family.place(num_ranks, num_chunks), num_microbatches, family.generate(shape))
    validate(schedule)
    return schedule


def build_lowered(
    name: str, num_ranks: int, num_chunks: int, num_microbatches: int, group_size: int | None = None, receive_depth: int = 2
) -> Schedule:
    """The schedule the engine runs: generate -> validate -> lower -> validate. receive_depth as in `lower`."""
    schedule = lower(build_schedule(name, num_ranks, num_chunks, num_microbatches, group_size), receive_depth)
    validate(schedule)
    return schedule


def build_forward_only(placement: Placement, num_microbatches: int, receive_depth: int = 2) -> Schedule:
    """The lowered, validated rows of evaluation and generation."""
    if num_microbatches < 1:
        raise ConfigError(f"{num_microbatches} microbatches asked of a forward-only schedule; use 1 or more")
    schedule = lower(forward_only(placement, num_microbatches), receive_depth)
    validate(schedule)
    return schedule


def _family(name: str) -> Family:
    if name not in SCHEDULES:
        near = difflib.get_close_matches(name, SCHEDULES, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(f"unknown pipeline schedule {name!r}; {hint}there are {', '.join(SCHEDULES)}")
    return SCHEDULES[name]


def _checked_shape(name: str, family: Family, num_ranks: int, num_chunks: int, num_microbatches: int, group_size: int | None) -> Shape:
    for what, count in (("pipeline ranks", num_ranks), ("chunks a rank", num_chunks), ("microbatches", num_microbatches)):
        if count < 1:
            raise ConfigError(f"schedule {name} with {count} {what}; use 1 or more")
    if num_chunks > 1 and not family.takes_chunks:
        several = ", ".join(other for other, row in SCHEDULES.items() if row.takes_chunks)
        raise ConfigError(
            f"schedule {name} holds one chunk a rank, {num_chunks} were asked for; use 1 chunk, or a schedule with chunks: {several}"
        )
    if group_size is not None and not family.takes_group_size:
        raise ConfigError(f"schedule {name} has no microbatch groups, but a group size of {group_size} was asked for; leave it out")
    if group_size is not None and group_size < num_ranks:
        raise ConfigError(
            f"a microbatch group of {group_size} is smaller than the {num_ranks} pipeline ranks: a chunk would run dry before its "
            f"microbatches come round; use {num_ranks} or more"
        )
    return Shape(num_ranks, num_chunks, num_microbatches, num_ranks if group_size is None else group_size)
