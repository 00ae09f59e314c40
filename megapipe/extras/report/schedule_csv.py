"""Schedules read from CSV, the format that `schedule.to_csv` and torch.distributed.pipelining write; schedules of parts
written and read.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from megapipe.errors import ScheduleError
from megapipe.schedule.action import Action, Op, parse_action
from megapipe.schedule.parts import Parts
from megapipe.schedule.placement import Placement
from megapipe.schedule.schedule import Schedule

_PAIR = re.compile(r"\(([^;]*);([^;]*)\)OVERLAP_F_B")


def from_csv(
    text: str, name: str = "csv", placement: Placement | None = None, num_microbatches: int | None = None
) -> Schedule:
    """Read rows of actions. The result is not validated: call `validate`.

    Skips empty cells, which torch.distributed.pipelining writes for bubbles. Placement and number of microbatches are
    taken from the forwards unless given; a placement in two directions must be given. Raises ScheduleError with the
    line and cell that cannot be read.
    """
    found: list[list[tuple[Action, int | None]]] = []
    for line in text.splitlines():
        found.append([])
        for column, cell in enumerate(line.split(",")):
            if cell.strip():
                try:
                    pair = _PAIR.fullmatch(cell.strip())
                    if pair is None:
                        found[-1].append(parse_slice(cell))
                    else:
                        (forward, slice_of), backward = parse_slice(pair[1]), parse_slice(pair[2])
                        overlap = forward._replace(op=Op.OVERLAP)
                        found[-1] += [(overlap, slice_of), (forward, slice_of), backward]
                except ScheduleError as error:
                    raise ScheduleError(f"line {len(found)}, cell {column + 1}: {error}") from None
    rows, num_slices = _numbered(found, name)
    actions = [action for row in rows for action in row if action.microbatch is not None]
    last, num_actions = max((action.microbatch or 0 for action in actions), default=-1), sum(map(len, rows))
    if last >= num_actions:  # checked before anything is allocated by that number
        first = next(action for action in actions if (action.microbatch or 0) >= num_actions)
        raise ScheduleError(
            f"schedule {name}: {first} among {num_actions} actions: microbatches are numbered from 0 without gaps"
        )
    if placement is None:
        placement = _placement_of(rows, name)
    count = last // num_slices + 1 if num_microbatches is None else num_microbatches
    return Schedule(name, placement, count, tuple(map(tuple, rows)), num_slices)


def _numbered(rows: Sequence[Sequence[tuple[Action, int | None]]], name: str) -> tuple[list[list[Action]], int]:
    """Return rows with the numbers that actions have in a schedule, and the number of slices of a microbatch."""
    actions = [each for row in rows for each in row if each[0].microbatch is not None]
    slices = [number for _, number in actions if number is not None]
    if not slices:
        return [[action for action, _ in row] for row in rows], 1
    if len(slices) < len(actions):
        whole = next(action for action, number in actions if number is None)
        raise ScheduleError(
            f"schedule {name}: {whole} has no slice, other actions have; write {whole}.0, {whole}.1, ..."
        )
    count = max(slices) + 1
    if count > len(actions):  # checked before anything is allocated by that number
        raise ScheduleError(f"schedule {name}: slice {count - 1} among {len(actions)} actions: slices count from 0")

    def numbered(action: Action, number: int | None) -> Action:
        return action if number is None else action._replace(microbatch=(action.microbatch or 0) * count + number)

    return [[numbered(*each) for each in row] for row in rows], count


def _placement_of(rows: Sequence[Sequence[Action]], name: str) -> Placement:
    rank_of_stage: dict[int, int] = {}
    for pp_rank, row in enumerate(rows):
        for action in row:
            if action.op is Op.F and rank_of_stage.setdefault(action.stage, pp_rank) != pp_rank:
                raise ScheduleError(
                    f"schedule {name}: {action} is on rank {pp_rank}, its stage also runs on rank "
                    f"{rank_of_stage[action.stage]}; give the placement if every stage is on two ranks"
                )
    missing = next((stage for stage in range(len(rank_of_stage) or 1) if stage not in rank_of_stage), None)
    if missing is not None:
        raise ScheduleError(f"schedule {name}: no rank runs the forward of stage {missing}")
    return Placement(len(rows), tuple(rank_of_stage[stage] for stage in range(len(rank_of_stage))))


def parse_slice(text: str) -> tuple[Action, int | None]:
    """Parse an action with or without a slice: 2F0 and 3 for "2F0.3", 2F0 and None for "2F0". Raises ScheduleError."""
    name, dot, number = text.strip().partition(".")
    action = parse_action(name)
    if not dot:
        return action, None
    if action.microbatch is None or re.fullmatch(r"\d+", number, re.ASCII) is None:
        raise ScheduleError(f"{text!r} is not an action; a slice is written as in 2F0.3")
    return action, int(number)


def parts_to_csv(parts: Parts, schedule: Schedule) -> str:
    """Write one line per pp_rank, one part per cell, in the order of issue."""
    return "".join(",".join(map(parts.text, row)) + "\n" for row in schedule.rows)


def parts_from_csv(parts: Parts, text: str, like: Schedule) -> Schedule:
    """Read rows written by `parts_to_csv` into a schedule with the placement and microbatches of `like`."""
    lines = [line.split(",") for line in text.splitlines()]
    rows = tuple(tuple(parse_part(parts, cell) for cell in line if cell.strip()) for line in lines)
    return replace(like, rows=rows)


def parse_part(parts: Parts, text: str) -> Action:
    """Return the action of a text: the inverse of `Parts.text`. Raises ScheduleError for anything else."""
    name, _, place = text.strip().partition(".")
    action = parse_action(name)
    found = _sites(parts).get(f"{action.stage}.{place}")
    if found is None:
        example = parts.text(Action(0, Op.F, 0))
        raise ScheduleError(f"{text!r} is not a part of this model; write an action, its layer and part: {example}")
    return action._replace(stage=found)


@cache
def _sites(parts: Parts) -> dict[str, int]:
    """Return stage, layer and part of each site, such as "0.5A", with its index."""
    names = (parts.text(Action(index, Op.F, 0)) for index in range(len(parts.sites)))
    return {name.replace("F0", "", 1): index for index, name in enumerate(names)}
