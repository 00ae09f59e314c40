"""`megapipe queues`: which schedules can hang with how many work queues, and the SMs that waiting receives hold."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from megapipe.extras.cli.frame import command, option
from megapipe.formatting import text_table
from megapipe.plan.queues import BY_POOL, BY_USE, RankTraffic, beside, enqueue, waiting_receives, why_it_hangs
from megapipe.schedule.costs import AutoGoal, Costs
from megapipe.schedule.families import SCHEDULES, build_forward_only, build_lowered, schedule_family
from megapipe.schedule.lifetimes import Moves, StageGroups, plan_moves
from megapipe.schedule.schedule import Schedule
from megapipe.schedule.simulate import unhindered_send_depth

CONNECTIONS = (1, 2, 8, 32)
DEPTHS = (1, 2, 3, 4)
MESSAGE_SECONDS = 0.05  # of a forward

OPTIONS = (
    option("names", "which schedules (default: all)", nargs="*", metavar="NAME"),
    option("-p --ranks", "pipeline ranks", default=4, above=0),
    option("-m --microbatches", "default: four times the ranks", type=int, above=0),
    option("-v --chunks", "stages a rank where a schedule takes any number", default=2, above=0),
    option("--tp", "with tensor parallelism: two collectives in every forward and backward", action="store_true"),
    option("--offload", "layers of every stage, all offloaded to the host", default=0, at_least=0, metavar="LAYERS"),
    option("--evaluation", "of the forwards of an evaluation instead of a training step", action="store_true"),
    option("--channels", "NCCL channels of a message, each of which holds an SM while it waits", default=4, above=0),
    option("--sms", "of the GPU; H100: 132", default=132, above=0),
    option("--sm-table", "print the SMs that waiting receives hold instead of the hangs", action="store_true"),
    option("--json", "machine-readable output", action="store_true"),
)


@command("megapipe queues", OPTIONS, needs_words=False)
def main(own: argparse.Namespace) -> None:
    """Show which schedules can hang with 1, 2, 8 and 32 hardware work queues, at receive depths 1 to 4.

    CUDA_DEVICE_MAX_CONNECTIONS is the number of queues. With --sm-table: how many SMs the receives hold that wait for
    their senders, on average while a rank computes and at most. All of this is simulated (docs/gpu_queues.md).
    """
    names = own.names or list(SCHEDULES)
    rows = [row for name in names for row in (_held if own.sm_table else _hangs)(name, own)]
    if own.json:
        print(json.dumps(rows))
        return
    print(
        "\n".join(
            text_table([list(rows[0]), *([str(cell) for cell in row.values()] for row in rows)], left=(0,), indent=0)
        )
    )
    if own.sm_table:
        of = f"of {own.sms} SMs with {own.channels} channels a message"
        print(f"\nreceives that wait, of the worst rank: mean while it computes, and at most; {of}")
        print("bound: kernels of messages, sends included, that can wait at once however long kernels take")
    else:
        print("\nreceive depths at which a step can hang, by the number of queues (CUDA_DEVICE_MAX_CONNECTIONS);")
        print("streams are mapped to queues in the order of their use, (depth): only if in the order of torch's pool")


Step = tuple[Schedule, RankTraffic]


def _steps(name: str, own: argparse.Namespace) -> Iterator[tuple[int, int, Step, Step]]:
    """Yield (depth, chunks, the lowered schedule to look at with its traffic, those of training) at every depth."""
    family, p = schedule_family(name), own.ranks
    chunks, count = family.num_chunks(own.chunks), own.microbatches or 4 * p
    goal = AutoGoal(Costs.equal(p, 1.0, 1.0, 1.0), p) if family.is_automatic else None
    for depth in DEPTHS:
        schedule = build_lowered(name, p, chunks, count, None, depth, goal)
        forward = build_forward_only(schedule.placement, count, depth)
        send_depth = 1 + max(unhindered_send_depth(schedule), unhindered_send_depth(forward) if own.evaluation else 0)
        moves: tuple[Moves, ...] = ()
        if own.offload:
            groups = {
                stage: StageGroups(own.offload, own.offload, stage == schedule.placement.num_stages - 1)
                for stage in range(schedule.placement.num_stages)
            }
            moves = tuple(plan_moves(row, groups) for row in schedule.rows)
        traffic = RankTraffic(2 if own.tp else 0, True, send_depth, MESSAGE_SECONDS, moves=moves)
        training = schedule, traffic
        evaluation = forward, replace(traffic, dp=False, moves=())
        yield depth, chunks, evaluation if own.evaluation else training, training


def _hangs(name: str, own: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield one row: for every number of connections the depths at which the schedule can hang."""
    row: dict[str, Any] = {"schedule": name, "chunks": 0} | {str(connections): [] for connections in CONNECTIONS}
    for depth, chunks, step, training in _steps(name, own):
        row["chunks"], programs = chunks, beside(enqueue(*step), enqueue(*training))
        for connections in CONNECTIONS:
            if why_it_hangs(programs, connections, mappings=(BY_USE,)):
                row[str(connections)].append(str(depth))
            elif why_it_hangs(programs, connections, mappings=(BY_POOL,)):
                row[str(connections)].append(f"({depth})")
    yield {key: (" ".join(value) or "-") if isinstance(value, list) else value for key, value in row.items()}


def _held(name: str, own: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for depth, chunks, step, _ in _steps(name, own):
        held = waiting_receives(*step)
        mean, peak, bound = (max(each[index] for each in held) for index in range(3))
        yield {
            "schedule": name,
            "chunks": chunks,
            "depth": depth,
            "mean": f"{mean:.2f}",
            "peak": peak,
            "SMs": f"{mean * own.channels:.0f}/{peak * own.channels}",
            "of the GPU": f"{peak * own.channels / own.sms:.0%}",
            "bound": bound,
        }
