"""The table of schedules by name, and the two ways to get one: compute-only, or lowered and ready for the engine."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass

from megapipe.errors import ConfigError
from megapipe.schedule.collector import without_collector
from megapipe.schedule.forward_only import forward_only
from megapipe.schedule.generate.automatic import automatic
from megapipe.schedule.generate.breadth_first import breadth_first
from megapipe.schedule.generate.controllable_memory import v_half, v_min
from megapipe.schedule.generate.dualpipe import check_dualpipe, dualpipe, dualpipe_counts, dualpipe_v, dualpipe_v_counts
from megapipe.schedule.generate.gpipe import gpipe
from megapipe.schedule.generate.interleaved import interleaved
from megapipe.schedule.generate.naive import naive
from megapipe.schedule.generate.one_f_one_b import one_f_one_b
from megapipe.schedule.generate.pipedream import pipedream, pipedream_2bw
from megapipe.schedule.generate.shape import Shape, Wish
from megapipe.schedule.generate.zb_v import zb_v
from megapipe.schedule.generate.zero_bubble import zb_h1, zb_h2
from megapipe.schedule.lower import lower
from megapipe.schedule.placement import Placement, linear, loop, two_directions, v_shape
from megapipe.schedule.schedule import Row, Schedule
from megapipe.schedule.validate import validate
from megapipe.schedule.weight_versions import VersionRule, one_group_stale, stashed


@dataclass(frozen=True)
class Family:
    """One row of the table: how the stages lie, who writes the rows, and what may be asked of it.

    takes_chunks: several chunks a rank, that is stages in each direction. chunks: the one number that it works with, if there is only one.
    group_rule: why a microbatch group may not be smaller than the ranks; empty if the family has no groups.
    splits_backward: it has I and W (some of its backwards may be whole).
    check: raises ConfigError for other limits of its own. counts: (ranks, microbatches) -> why it cannot run so many microbatches, '' if it
    can, and the nearest numbers that it can.
    versions: which weights a microbatch uses where they change while microbatches are under way; None: there is one version only.
    """

    generate: Callable[[Shape], tuple[Row, ...]]
    place: Callable[[int, int], Placement]  # (num_ranks, num_chunks)
    summary: str
    takes_chunks: bool = False
    chunks: int | None = None
    group_rule: str = ""
    splits_backward: bool = False
    check: Callable[[Shape], None] | None = None
    counts: Callable[[int, int], tuple[str, tuple[int, ...]]] | None = None
    versions: VersionRule | None = None

    @property
    def takes_group_size(self) -> bool:
        """True if microbatches go in groups."""
        return bool(self.group_rule)

    @property
    def is_synchronous(self) -> bool:
        """Computes what one process would."""
        return self.versions is None


def _linear(num_ranks: int, num_chunks: int) -> Placement:
    return linear(num_ranks)


def _v(num_ranks: int, num_chunks: int) -> Placement:
    return v_shape(num_ranks)


def _two_directions(num_ranks: int, num_chunks: int) -> Placement:
    return two_directions(num_ranks)


_CHUNK_RUNS_DRY = "a chunk would run dry before its microbatches come round"
_VERSION_IS_LATE = "the weights of the group before would not be there yet"

SCHEDULES: dict[str, Family] = {
    "naive": Family(naive, _linear, "one microbatch at a time through all stages: what every schedule is an answer to"),
    "gpipe": Family(gpipe, _linear, "all forwards, then all backwards; keeps every microbatch"),
    "1f1b": Family(one_f_one_b, _linear, "one forward, one backward in turn; keeps at most pp microbatches"),
    "interleaved": Family(
        interleaved,
        loop,
        "1F1B over several chunks a rank; the bubble divided by their number",
        takes_chunks=True,
        group_rule=_CHUNK_RUNS_DRY,
    ),
    "breadth-first": Family(
        breadth_first,
        loop,
        "chunk by chunk over all microbatches; keeps all, gathers and reduces each chunk once",
        takes_chunks=True,
    ),
    "zb-h1": Family(
        zb_h1, _linear, "backward split, W in a third of the bubble; the memory of 1F1B", splits_backward=True
    ),
    "zb-h2": Family(
        zb_h2,
        _linear,
        "backward split, no bubble between steps where F = I = W; about twice the memory",
        splits_backward=True,
    ),
    "zb-v": Family(
        zb_v,
        _v,
        "backward split on a V: almost no bubble where F = I = W, the memory of 1F1B",
        takes_chunks=True,
        chunks=2,
        splits_backward=True,
    ),
    "v-half": Family(
        v_half,
        _v,
        "backward split on a V: half the bubble and half the memory of 1F1B",
        takes_chunks=True,
        chunks=2,
        splits_backward=True,
    ),
    "v-min": Family(
        v_min,
        _v,
        "backward split on a V: two thirds of 1F1B's bubble, a third of its memory",
        takes_chunks=True,
        chunks=2,
        splits_backward=True,
    ),
    "zb-auto": Family(
        automatic, _linear, "backward split, searched for measured times and a memory limit", splits_backward=True
    ),
    "dualpipe": Family(
        dualpipe,
        _two_directions,
        "from both ends at once, forwards overlapped with backwards; parameters held twice",
        splits_backward=True,
        check=check_dualpipe,
        counts=dualpipe_counts,
    ),
    "dualpipe-v": Family(
        dualpipe_v,
        _v,
        "DualPipe folded to a V: parameters held once",
        takes_chunks=True,
        chunks=2,
        splits_backward=True,
        counts=dualpipe_v_counts,
    ),
    "pipedream": Family(
        pipedream,
        _linear,
        "NOT synchronous: 1F1B that updates after every microbatch, with stashed weights",
        versions=stashed,
    ),
    "pipedream-2bw": Family(
        pipedream_2bw,
        _linear,
        "NOT synchronous: 1F1B that updates after every group, with two weight versions, one step stale",
        group_rule=_VERSION_IS_LATE,
        versions=one_group_stale,
    ),
}


@without_collector
def build_schedule(
    name: str,
    num_ranks: int,
    num_chunks: int,
    num_microbatches: int,
    group_size: int | None = None,
    wish: Wish | None = None,
) -> Schedule:
    """The compute-only schedule `name`, validated.

    group_size: microbatches that run through one chunk before the next (default num_ranks; at least that; num_microbatches and more is
    breadth-first with a pipelined turn, between the two lies Llama 3's mix, arXiv:2407.21783). wish: times and memory limit for zb-auto.
    ConfigError if the family cannot do what is asked, with the nearest value that works.
    """
    family = _family(name)
    shape = _checked_shape(name, family, num_ranks, num_chunks, num_microbatches, group_size)
    schedule = Schedule(
        name, family.place(num_ranks, num_chunks), num_microbatches, family.generate(shape._replace(wish=wish))
    )
    validate(schedule)
    return schedule


def build_lowered(
    name: str,
    num_ranks: int,
    num_chunks: int,
    num_microbatches: int,
    group_size: int | None = None,
    receive_depth: int = 2,
    wish: Wish | None = None,
) -> Schedule:
    """The schedule the engine runs: generate -> validate -> lower -> validate. receive_depth as in `lower`, wish as in `build_schedule`."""
    schedule = lower(build_schedule(name, num_ranks, num_chunks, num_microbatches, group_size, wish), receive_depth)
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


def _checked_shape(
    name: str, family: Family, num_ranks: int, num_chunks: int, num_microbatches: int, group_size: int | None
) -> Shape:
    for what, count in (
        ("pipeline ranks", num_ranks),
        ("chunks a rank", num_chunks),
        ("microbatches", num_microbatches),
    ):
        if count < 1:
            raise ConfigError(f"schedule {name} with {count} {what}; use 1 or more")
    if family.chunks is not None and num_chunks != family.chunks:
        raise ConfigError(
            f"schedule {name} holds {family.chunks} stages a rank, {num_chunks} were asked for; use {family.chunks}"
        )
    if num_chunks > 1 and not family.takes_chunks:
        several = ", ".join(other for other, row in SCHEDULES.items() if row.takes_chunks)
        raise ConfigError(
            f"schedule {name} holds one chunk a rank{' in each direction' if family.place is _two_directions else ''}, {num_chunks} were "
            f"asked for; use 1 chunk, or a schedule with chunks: {several}"
        )
    if group_size is not None and not family.takes_group_size:
        raise ConfigError(
            f"schedule {name} has no microbatch groups, but a group size of {group_size} was asked for; leave it out"
        )
    if group_size is not None and group_size < num_ranks:
        raise ConfigError(
            f"a microbatch group of {group_size} is smaller than the {num_ranks} pipeline ranks: {family.group_rule}; "
            f"use {num_ranks} or more"
        )
    shape = Shape(num_ranks, num_chunks, num_microbatches, num_ranks if group_size is None else group_size)
    if family.check is not None:
        family.check(shape)
    trouble, near = family.counts(num_ranks, num_microbatches) if family.counts else ("", ())
    if trouble:
        ways = " or ".join(map(str, near))
        raise ConfigError(f"schedule {name} {trouble}; {num_microbatches} were asked for: use {ways}")
    return shape
