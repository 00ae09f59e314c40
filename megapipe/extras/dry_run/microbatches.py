"""The fewest microbatches that show all that a step does.

An action's memory depends on its kind and on what is alive around it, not on the microbatch's number: a shorter step
has the same peak if every action of the longer one occurs in it with the same things alive.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from megapipe.errors import MegapipeError
from megapipe.plan.run_plan import RunPlan
from megapipe.schedule.action import Action, Op
from megapipe.schedule.lifetimes import Item, lifetimes
from megapipe.schedule.placement import Placement
from megapipe.schedule.schedule import Schedule

Situation = tuple[int, Op, tuple[tuple[str, int, int], ...]]


def situations(
    row: Iterable[Action], placement: Placement | None = None, pp_rank: int = 0, send_depth: int | None = None
) -> set[Situation]:
    """Return (stage, op, numbers of what is alive at its start) of every action. Arguments: those of `lifetimes`."""
    alive: Counter[Item] = Counter()
    found: set[Situation] = set()
    for (stage, op, _), changes in lifetimes(row, placement, pp_rank, send_depth):
        found.add((stage, op, tuple(sorted((kind.value, of, count) for (kind, of), count in alive.items() if count))))
        alive.subtract(changes.takes)
        alive.update(changes.creates)
        alive.subtract(changes.frees)
        alive.update(changes.leaves)
    return found


def microbatches_to_run(plan: RunPlan, pp_rank: int) -> int:
    """Return the fewest microbatches whose row has all situations of the full step's row, or the full number.

    Asynchronous schedules change their weights within the step, with offloading, or with stages in parts, the actions
    around decide what is on the device, and slices of a microbatch differ in size: these are always run in full.
    """
    full, is_cut = plan.batch.num_microbatches, plan.parts is not None or plan.num_slices > 1
    if not plan.is_synchronous or plan.config.offload.cpu_offloading_num_layers or is_cut:
        return full
    pp, where = plan.topology.pp, (plan.placement, pp_rank, plan.send_depth)
    wanted = situations(plan.schedule(full).rows[pp_rank], *where)
    counts = range(2 * pp, full // 2 + 1, pp)
    return fewest_microbatches(plan, counts, lambda schedule: wanted <= situations(schedule.rows[pp_rank], *where))


def fewest_microbatches(plan: RunPlan, counts: Iterable[int], is_enough: Callable[[Schedule], bool]) -> int:
    """Return the first of these numbers of microbatches that the schedule can run and that is enough, or the full one.

    is_enough: called with the schedule of stages, or of their parts if the plan has any.
    """
    for count in counts:
        try:
            schedule = schedule_of(plan, count)
        except MegapipeError:  # the schedule cannot run this number
            continue
        if is_enough(schedule):
            return count
    return plan.batch.num_microbatches


def schedule_of(plan: RunPlan, num_microbatches: int) -> Schedule:
    """Return the schedule that the ranks run: of stages, or of their parts."""
    return (plan.schedule if plan.parts is None else plan.part_schedule)(num_microbatches)
