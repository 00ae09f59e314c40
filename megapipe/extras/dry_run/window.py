"""How many microbatches of a long step have to be run to meet every situation that the whole step has: pure arithmetic on rows.

A step repeats itself once the pipeline is full. An action's memory depends on what it is and on what lives around it, not on the
microbatch's number; so a shorter step shows the same peak if every action of the longer one meets, somewhere in the shorter one, the same
action with the same things around it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from megapipe.errors import MegapipeError
from megapipe.plan.run_plan import RunPlan
from megapipe.schedule.action import RECV_OPS, SEND_OPS, Action, Op

Situation = tuple[int, Op, tuple[tuple[tuple[int, str], int], ...]]


def situations(row: Iterable[Action], last_stage: int, send_depth: int) -> set[Situation]:
    """(stage, op, what lives when it starts) of every action: microbatches between F and B, between I and W, messages come and sent, and
    what one stage of the rank has made for another or for a send."""
    living: Counter[tuple[int, str]] = Counter()
    found: set[Situation] = set()

    def use(*candidates: tuple[int, str]) -> None:
        used = next((candidate for candidate in candidates if living[candidate]), None)
        if used is not None:
            living[used] -= 1

    for stage, op, _ in row:
        found.add((stage, op, tuple(sorted((what, count) for what, count in living.items() if count))))
        if op is Op.F:
            living[stage, "kept"] += 1
            living[stage, "made"] += stage < last_stage
            use((stage, "come"), (stage - 1, "made"))
        elif op in (Op.B, Op.I):
            living[stage, "kept"] -= 1
            living[stage, "waiting"] += op is Op.I
            living[stage, "gradient made"] += stage > 0
            use((stage, "gradient come"), (stage + 1, "gradient made"))
        elif op is Op.W:
            living[stage, "waiting"] -= 1
        elif op in RECV_OPS:
            living[stage, "come" if op is Op.RECV_F else "gradient come"] += 1
        elif op in SEND_OPS:
            use((stage, "made" if op is Op.SEND_F else "gradient made"))
            living[stage, op.name] = min(living[stage, op.name] + 1, send_depth)
    return found


def microbatches_to_run(plan: RunPlan, pp_rank: int) -> int:
    """The fewest tried whose row has all situations of the full step's row; the full number where no shorter step has them.

    Asynchronous schedules, whose weights change on the way, are always run in full; so are offloaded layers, for what is away when depends
    on the actions around.
    """
    full = plan.batch.full // plan.batch.samples_per_microbatch
    if not plan.is_synchronous or plan.config.offload.cpu_offloading_num_layers:
        return full
    last, pp = plan.placement.num_stages - 1, plan.topology.pp
    wanted = situations(plan.schedule(full).rows[pp_rank], last, plan.send_depth)
    for count in range(2 * pp, full // 2 + 1, pp):
        try:
            row = plan.schedule(count).rows[pp_rank]
        except MegapipeError:  # a number that this schedule cannot run
            continue
        if wanted <= situations(row, last, plan.send_depth):
            return count
    return full
