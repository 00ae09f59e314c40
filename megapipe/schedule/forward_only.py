"""The rows of evaluation and generation: forwards only, for any placement. The same engine runs them."""

from __future__ import annotations

from megapipe.schedule.action import Action, Op
from megapipe.schedule.placement import Placement
from megapipe.schedule.schedule import Schedule


def forward_only(placement: Placement, num_microbatches: int) -> Schedule:
    """Groups of num_ranks microbatches pass chunk by chunk through every rank.

    All rows are sorted by one key (group, stage, microbatch) that also orders the dependencies, so no placement can deadlock.
    """
    group_size = placement.num_ranks
    rows: list[list[Action]] = [[] for _ in range(placement.num_ranks)]
    for start in range(0, num_microbatches, group_size):
        for stage in range(placement.num_stages):
            for microbatch in range(start, min(start + group_size, num_microbatches)):
                rows[placement.rank_of(stage, microbatch)].append(Action(stage, Op.F, microbatch))
    return Schedule("forward_only", placement, num_microbatches, tuple(map(tuple, rows)))
