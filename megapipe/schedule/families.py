"""The table of schedule families, the only list of their names, and the functions that build a schedule from a name.

`build_schedule` returns computation only, `build_lowered` the schedule that the engine runs.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from megapipe.errors import ConfigError
from megapipe.registry import EXTENSIONS, Registry
from megapipe.schedule.action import Action, Op
from megapipe.schedule.costs import AutoGoal, Shape
from megapipe.schedule.generate import split_backward as split
from megapipe.schedule.generate import v_shape as on_v
from megapipe.schedule.generate import whole_backward as whole
from megapipe.schedule.generate.automatic import automatic
from megapipe.schedule.lower import lower
from megapipe.schedule.placement import Placement, loop, two_directions, v_shape
from megapipe.schedule.schedule import Row, Schedule, gc_paused
from megapipe.schedule.stream import STRETCH, Stream, Versions, common_depth, newest, newest_at_entry, one_step_old
from megapipe.schedule.validate import validate


@dataclass(frozen=True)
class ScheduleFamily:
    """One row of the table: a name, the generator of the rows, the placement of the stages, and their properties."""

    name: str
    generate: Callable[[Shape], tuple[Row, ...]]
    summary: str
    # from the numbers of ranks and of chunks per rank
    placement: Callable[[int, int], Placement] = loop
    takes_chunks: bool = False  # several chunks per rank, that is stages in each direction
    chunks: int | None = None  # the number of chunks, if the family works with only one number
    has_waves: bool = False  # chunks come in pairs, one for each way of a wave
    in_turns: bool = False  # microbatches run in groups of as many as there are ranks
    without_chunks: str = ""  # the family that this one equals with one chunk
    group_rule: str = ""  # why groups must be at least as large as the ranks; empty: no groups
    splits_backward: bool = False  # has I and W (some of its backwards may be whole)
    is_automatic: bool = False  # searched for given times and a memory limit (AutoGoal)
    is_candidate: bool = False  # the layout search tries it: no other family is as fast with less memory
    # (ranks, microbatches) -> (why it cannot run so many microbatches, '' if it can; the nearest numbers that it can
    # run). Raises ConfigError for other limits.
    counts: Callable[[int, int], tuple[str, tuple[int, ...]]] | None = None
    takes_slices: bool = False  # microbatches may be cut into slices along the sequence
    versions: Versions | None = None  # the weights that a microbatch uses where they change within the schedule

    @property
    def takes_group_size(self) -> bool:
        """True if microbatches run in groups."""
        return bool(self.group_rule)

    @property
    def is_synchronous(self) -> bool:
        """True if the schedule computes what a single process would."""
        return self.versions is None

    @property
    def is_delayed(self) -> bool:
        """True if an update comes a step after its gradients, once their norm is known over the whole model."""
        return self.versions is not None and self.versions.is_delayed

    def num_chunks(self, asked: int) -> int:
        """Return the chunks per rank if `asked` are wanted of families that take any number."""
        return self.chunks or (asked + asked % 2 if self.has_waves else asked if self.takes_chunks else 1)

    def place(self, num_ranks: int, num_chunks: int) -> Placement:
        """Return which rank holds which stage."""
        return self.placement(num_ranks, self.num_chunks(num_chunks))

    def is_mirrored(self, num_ranks: int) -> bool:
        """Return True if opposite pp_ranks hold the same stages."""
        return self.place(num_ranks, 2).is_mirrored


def _fills_pipeline(num_ranks: int, num_microbatches: int) -> tuple[str, tuple[int, ...]]:
    """Return why a step is too short for a stream: a rank would run ahead by more than a step."""
    problem = "needs a microbatch in a step for each pipeline rank" if num_microbatches < num_ranks else ""
    return problem, (num_ranks,) if problem else ()


def even_near(odd: int) -> str:
    """Return the even numbers next to an odd one, as text."""
    return " or ".join(str(even) for even in (odd - 1, odd + 1) if even)


def _from_both_ends(least: int, num_ranks: int, num_microbatches: int) -> tuple[str, tuple[int, ...]]:
    """Return why a schedule in two directions cannot run so many microbatches. least: microbatches that it needs for
    each rank. Raises ConfigError for an odd number of ranks.
    """
    if num_ranks % 2:
        raise ConfigError(
            f"a pipeline in two directions pairs every rank with the one opposite; {num_ranks} pipeline ranks are odd: "
            f"use {even_near(num_ranks)}"
        )
    enough = least * num_ranks
    if num_microbatches < enough:
        return (
            f"fills the pipeline from both ends and needs at least {least} x {num_ranks} ranks = {enough} microbatches",
            (enough,),
        )
    if num_microbatches % 2:
        near = (num_microbatches - 1, num_microbatches + 1)
        return "sends as many microbatches from either end", near[num_microbatches == 1 :]
    return "", ()


_Split = partial(ScheduleFamily, splits_backward=True)
_OnV = partial(_Split, placement=v_shape, takes_chunks=True, chunks=2)
_ZeroBubbleV = partial(_OnV, is_candidate=True)
_Stream = partial(ScheduleFamily, counts=_fills_pipeline)
_FAMILIES = (
    ScheduleFamily("naive", whole.naive, "one microbatch at a time through all stages: the baseline"),
    ScheduleFamily("gpipe", whole.breadth_first, "all forwards, then all backwards; keeps every microbatch"),
    ScheduleFamily(
        "1f1b",
        whole.one_f_one_b,
        "one forward, one backward in turn; keeps at most pp microbatches",
        is_candidate=True,
        takes_slices=True,
    ),
    ScheduleFamily(
        "interleaved",
        whole.interleaved,
        "1F1B over several chunks per rank; the bubble divided by their number",
        takes_chunks=True,
        without_chunks="1f1b",
        group_rule="a chunk would run dry before its next microbatches arrive",
        is_candidate=True,
        takes_slices=True,
    ),
    ScheduleFamily(
        "breadth-first",
        whole.breadth_first,
        "chunk by chunk over all microbatches; keeps all, gathers and reduces each chunk once",
        takes_chunks=True,
        without_chunks="gpipe",
    ),
    ScheduleFamily(
        "hanayo",
        whole.hanayo,
        "1F1B in waves over an even number of chunks per rank; the bubble divided by their number where F = B",
        placement=v_shape,
        takes_chunks=True,
        has_waves=True,
        in_turns=True,
    ),
    ScheduleFamily(
        "chimera",
        whole.chimera,
        "1F1B from both ends at once, half of the bubble where F = B; parameters held twice",
        placement=two_directions,
        counts=partial(_from_both_ends, 0),
        in_turns=True,
    ),
    _Split(
        "zb-h1",
        split.zb_h1,
        "backward split, W in a third of the bubble; the memory of 1F1B",
        is_candidate=True,
        takes_slices=True,
    ),
    _Split("zb-h2", split.zb_h2, "backward split; faster than zb-h1 where W is shorter than F; about twice the memory"),
    _ZeroBubbleV(
        "zb-v",
        on_v.zb_v,
        "backward split on a V: almost no bubble where F = I = W, the memory of 1F1B",
        takes_slices=True,
    ),
    _ZeroBubbleV("v-half", on_v.v_half, "backward split on a V: half the bubble and half the memory of 1F1B"),
    _ZeroBubbleV("v-min", on_v.v_min, "backward split on a V: two thirds of 1F1B's bubble, a third of its memory"),
    _Split("zb-auto", automatic, "backward split, searched for measured times and a memory limit", is_automatic=True),
    _Split(
        "dualpipe",
        split.dualpipe,
        "from both ends at once, forwards overlapped with backwards; parameters held twice",
        placement=two_directions,
        counts=partial(_from_both_ends, 2),
    ),
    _OnV(
        "dualpipe-v", split.dualpipe_v, "DualPipe folded to a V: parameters held once", counts=split.dualpipe_v_counts
    ),
    _Stream(
        "pipedream",
        whole.pipedream,
        "NOT synchronous: 1F1B that never drains and updates after every microbatch, with stashed weights",
        versions=Versions(newest),
    ),
    _Stream(
        "pipedream-vertical-sync",
        whole.pipedream,
        "NOT synchronous: pipedream whose microbatches use one version of the weights on all stages",
        versions=Versions(newest_at_entry),
    ),
    _Stream(
        "pipedream-2bw",
        whole.pipedream_2bw,
        "NOT synchronous: 1F1B that never drains, with two versions of the weights, gradients one step old",
        versions=Versions(one_step_old, is_delayed=True),
    ),
    _Stream(
        "paci",
        whole.paci,
        "NOT synchronous: 1F1B that never drains, with one version; a backward may meet weights one update newer",
        versions=Versions(newest, is_stashed=False),
    ),
)
SCHEDULES = Registry("schedule", "--pipeline-schedule", {family.name: family for family in _FAMILIES})


def schedule_family(name: str) -> ScheduleFamily:
    """Return the row of the table. Raises ConfigError for an unknown name, with the nearest one."""
    if name not in SCHEDULES:
        near = difflib.get_close_matches(name, SCHEDULES, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(
            f"unknown pipeline schedule {name!r}; {hint}choose one of {', '.join(SCHEDULES)}{EXTENSIONS.hint}"
        )
    return SCHEDULES[name]


def default_schedule(num_chunks: int) -> str:
    """Return the schedule that 'auto' means."""
    return "interleaved" if num_chunks > 1 else "1f1b"


@gc_paused()
def build_schedule(
    name: str,
    num_ranks: int,
    num_chunks: int,
    num_microbatches: int,
    group_size: int | None = None,
    goal: AutoGoal | None = None,
    num_slices: int = 1,
    num_steps: int = 1,
) -> Schedule:
    """Return the compute-only schedule `name`, validated.

    group_size: microbatches that run through one chunk before the next (default and least: num_ranks). num_microbatches
    or more gives breadth-first with pipelined chunk changes, values between give Llama 3's mix (arXiv:2407.21783).
    goal: times and memory limit for the automatic scheduler. num_slices: of each microbatch, along its sequence; groups
    are then of slices. num_steps: of num_microbatches each, in a stretch of a stream. Raises ConfigError if the family
    cannot run this shape, with the nearest one that works.
    """
    family = schedule_family(name)
    group = num_ranks if group_size is None else group_size
    shape = Shape(num_ranks, num_chunks, num_microbatches, group, goal, num_slices)
    _check_shape(family, shape, has_groups=group_size is not None)
    placement, total = family.place(num_ranks, num_chunks), num_microbatches * num_steps
    rows = family.generate(shape._replace(num_microbatches=total, num_steps=num_steps))
    schedule = Schedule(name, placement, total, rows, num_slices, num_steps=num_steps)
    validate(schedule)
    return schedule


def build_lowered(
    name: str,
    num_ranks: int,
    num_chunks: int,
    num_microbatches: int,
    group_size: int | None = None,
    receive_depth: int = 2,
    goal: AutoGoal | None = None,
    num_slices: int = 1,
) -> Schedule:
    """Return the schedule that the engine runs: `build_schedule`, `lower`, `validate`; see there for the arguments."""
    planned = build_schedule(name, num_ranks, num_chunks, num_microbatches, group_size, goal, num_slices)
    schedule = lower(planned, receive_depth)
    validate(schedule)
    return schedule


def build_stream(name: str, num_ranks: int, num_microbatches: int, receive_depth: int = 2) -> Stream:
    """Return the stream of an asynchronous schedule with this many microbatches in each step, proven.

    Raises ConfigError if the family cannot run them, ScheduleError if it is no stream.
    """
    alone, stretch = (build_schedule(name, num_ranks, 1, num_microbatches, num_steps=steps) for steps in (1, STRETCH))
    depth = min(receive_depth, common_depth(stretch))
    alone = lower(alone, depth)
    validate(alone)
    return Stream(lower(stretch, depth), alone)


def build_forward_only(
    placement: Placement, num_microbatches: int, receive_depth: int = 2, num_slices: int = 1
) -> Schedule:
    """Return the lowered, validated schedule of evaluation and generation: forwards only, for any placement.

    Groups of num_ranks microbatches, or slices of these, pass chunk by chunk through every rank. All rows are sorted by
    one key (group, stage, microbatch) that also orders the dependencies, so no placement can deadlock.
    """
    if num_microbatches < 1:
        raise ConfigError(f"a forward-only schedule of {num_microbatches} microbatches; use 1 or more")
    rows: list[list[Action]] = [[] for _ in range(placement.num_ranks)]
    count = num_microbatches * num_slices
    for start in range(0, count, placement.num_ranks):
        for stage in range(placement.num_stages):
            for microbatch in range(start, min(start + placement.num_ranks, count)):
                rows[placement.rank_of(stage, microbatch)].append(Action(stage, Op.F, microbatch))
    planned = Schedule("forward_only", placement, num_microbatches, tuple(map(tuple, rows)), num_slices)
    schedule = lower(planned, receive_depth)
    validate(schedule)
    return schedule


def _check_shape(family: ScheduleFamily, shape: Shape, has_groups: bool) -> None:
    name, group_rule = f"schedule {family.name}", family.group_rule
    num_ranks, num_chunks, num_microbatches, group_size, _, num_slices, _ = shape
    units = ("pipeline ranks", "chunks per rank", "microbatches", "slices")
    for what, count in zip(units, (num_ranks, num_chunks, num_microbatches, num_slices), strict=True):
        if count < 1:
            raise ConfigError(f"{name} with {count} {what}; use 1 or more")
    if family.chunks not in (None, num_chunks):
        raise ConfigError(
            f"{name} holds {family.chunks} stages per rank, but {num_chunks} were given; use {family.chunks}"
        )
    if num_chunks > 1 and not family.takes_chunks:
        several = ", ".join(other.name for other in SCHEDULES.values() if other.takes_chunks)
        raise ConfigError(
            f"{name} holds one chunk per rank{' in each direction' if family.is_mirrored(num_ranks) else ''}, but "
            f"{num_chunks} were given; use 1 chunk, or a schedule with chunks: {several}"
        )
    if family.has_waves and num_chunks % 2:
        raise ConfigError(
            f"{name} passes the ranks down and up again and needs an even number of chunks per rank; {num_chunks} were "
            f"given: use {even_near(num_chunks)}"
        )
    if has_groups and not group_rule:
        raise ConfigError(f"{name} has no microbatch groups, but a group size of {group_size} was given; omit it")
    if group_size < num_ranks:
        raise ConfigError(
            f"a microbatch group of {group_size} is smaller than the {num_ranks} pipeline ranks: {group_rule}; "
            f"use {num_ranks} or more"
        )
    if num_slices > 1 and not family.takes_slices:
        several = ", ".join(other.name for other in SCHEDULES.values() if other.takes_slices)
        raise ConfigError(f"{name} has no order for {num_slices} slices of a microbatch; use 1, or one of {several}")
    problem, near = family.counts(num_ranks, num_microbatches) if family.counts else ("", ())
    if problem:
        more = " or more" if near[0] > num_microbatches else ""
        raise ConfigError(f"{name} {problem}; {num_microbatches} were given: use {' or '.join(map(str, near))}{more}")
