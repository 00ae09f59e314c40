"""Schedule: the whole pipeline step as one immutable table of actions, its CSV form and its rank x slot grid."""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property

from megapipe.errors import ScheduleError
from megapipe.formatting import count_text
from megapipe.schedule.action import (
    BACKWARD_OPS,
    PLANNED_OPS,
    SHARDING_OPS,
    WEIGHTS_OPS,
    Action,
    Op,
    action_text,
    with_slices,
)
from megapipe.schedule.placement import Placement

Row = tuple[Action, ...]
SLOTS_AROUND, RANKS_AROUND = 5, 8  # of a mark in a message


@dataclass(frozen=True)
class Schedule:
    """The actions of every pp_rank in order.

    Bubbles are not stored: an action starts as soon as its inputs are available.

    num_slices: slices along the sequence of every microbatch (Seq1F1B, Sun et al. 2024, arXiv:2406.03488). A slice is
    scheduled like a microbatch: on a stage, its forward follows those of the slices before it, whose keys and values
    it reads, and its backward those of the slices after it, which add to the gradients of its keys and values.
    reading_in_w: stages whose W reads weights too, to compute again what was not kept: a chunked loss, a norm.
    num_steps: training steps that the microbatches make up, in their order and of equal sizes: a stretch of a stream
    (schedule.stream).
    """

    name: str
    placement: Placement
    num_microbatches: int
    rows: tuple[Row, ...]
    num_slices: int = 1
    reading_in_w: frozenset[int] = frozenset()
    num_steps: int = 1

    def __post_init__(self) -> None:
        if len(self.rows) != self.placement.num_ranks:
            raise ScheduleError(
                f"schedule {self.name} has {len(self.rows)} rows for {self.placement.num_ranks} pipeline ranks"
            )

    @property
    def num_ranks(self) -> int:
        return self.placement.num_ranks

    @property
    def num_stages(self) -> int:
        return self.placement.num_stages

    @property
    def step_size(self) -> int:
        """Microbatches of a step."""
        return self.num_microbatches // self.num_steps

    @property
    def num_units(self) -> int:
        """Microbatches, or where these have slices, the slices of all: the numbers that actions carry."""
        return self.num_microbatches * self.num_slices

    def text(self, action: Action) -> str:
        """Return an action of this schedule as text."""
        return action_text(action, self.num_slices)

    @cached_property
    def ops(self) -> frozenset[Op]:
        """The ops that occur."""
        return frozenset(op for row in self.rows for op in {action[1] for action in row})

    def reads_weights(self, action: Action) -> bool:
        """Return True if an action is a computation that reads weights of its stage."""
        stage, op, _ = action
        return op in WEIGHTS_OPS or (op is Op.W and stage in self.reading_in_w)

    @property
    def is_lowered(self) -> bool:
        """True once the schedule holds messages, reductions or gathers, not only computation."""
        return not self.ops <= PLANNED_OPS

    @property
    def is_synchronous(self) -> bool:
        """False if weights change within the schedule (PipeDream): results then differ from a single process."""
        return Op.UPDATE not in self.ops

    @property
    def has_backward(self) -> bool:
        """False for the forward-only rows of evaluation and generation."""
        return bool(self.ops & BACKWARD_OPS)

    def compute_only(self) -> Schedule:
        """Return the same schedule without messages, reductions and gathers."""
        rows = tuple(tuple(action for action in row if action[1] in PLANNED_OPS) for row in self.rows)
        return replace(self, rows=rows)

    def without_messages(self) -> Schedule:
        """Return the same schedule with the gathers and reductions in parts that `schedule.sharding` has added."""
        kept, reduction = PLANNED_OPS | SHARDING_OPS, Op.REDUCE_GRAD
        rows = (tuple(a for a in row if a[1] in kept or (a[1] is reduction and a[2] is not None)) for row in self.rows)
        return replace(self, rows=tuple(rows))

    def __str__(self) -> str:
        slices = f" of {self.num_slices} slices" if self.num_slices > 1 else ""
        counts = {"rank": self.num_ranks, "stage": self.num_stages, "microbatch": self.num_microbatches}
        size = ", ".join(count_text(count, noun) for noun, count in counts.items())
        size += f" of {self.num_steps} steps" if self.num_steps > 1 else ""
        return f"{self.name} ({size}{slices})"


@contextmanager
def gc_paused() -> Iterator[None]:
    """Keep Python's cycle collector off; also a decorator.

    A schedule is a million new tuples without a cycle: searching them for cycles would take as long as making them.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def to_csv(schedule: Schedule) -> str:
    """Write one line per pp_rank, one action per cell: the format of torch.distributed.pipelining.

    An overlapped pair is one cell: "(2F0;1B3)OVERLAP_F_B". That package does not have slices, with which a cell is
    "2F0.3", nor RECOMPUTE, OFFLOAD and RELOAD.
    """
    lines, text = [], schedule.text if schedule.num_slices > 1 else str
    for row in schedule.rows:
        actions = iter(row)
        cells = [
            f"({next(actions, '')};{next(actions, '')})OVERLAP_F_B" if action.op is Op.OVERLAP else text(action)
            for action in actions
        ]
        lines.append(",".join(cells) + "\n")
    return "".join(lines)


def rows_text(rows: Sequence[Row], marks: Collection[tuple[int, int]] = (), num_slices: int = 1) -> str:
    """Return the rows as text, one line per rank; `marks` are (rank, slot) pairs to set in >angle brackets<.

    With marks, each row is cut to the slots around its own mark (or around the first one) and ranks far from every mark
    are left out, so that the error of a schedule of a thousand ranks fits on one screen.
    """
    marked = dict(marks)
    first = next(iter(marks), (0, 0))[1]
    lines, skipped = [], 0
    for rank, row in enumerate(rows):
        if marks and min(abs(rank - other) for other in marked) > RANKS_AROUND:
            skipped += 1
            continue
        if skipped:
            lines.append(f"      ({skipped} ranks)")
            skipped = 0
        mark = marked.get(rank)
        centre = first if mark is None else mark
        around = SLOTS_AROUND if marks else len(row)
        end = min(len(row), centre + around + 1)
        start = min(max(0, centre - around), len(row))
        cells = [f">{action}<" if slot == mark else str(action) for slot, action in enumerate(row[start:end], start)]
        if mark is not None and mark >= len(row):
            cells.append(">end of row<")
        before = f"[{start}] ... " if start else ""
        after = " ..." if end < len(row) else ""
        lines.append(f"rank {rank}: {before}{' '.join(cells)}{after}")
    if skipped:
        lines.append(f"      ({skipped} ranks)")
    return with_slices("\n".join(lines), num_slices)
