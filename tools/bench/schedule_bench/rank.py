"""The process of a rank: for each case the contenders take turns, step by step, and everything is recorded."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
from bench_processes import join

from megapipe.comm.bootstrap import shutdown
from megapipe.comm.collectives import all_reduce
from megapipe.comm.groups import Group, ProcessGroups
from megapipe.comm.trace import Tracer
from megapipe.schedule.schedule import Schedule
from megapipe.topology import Topology
from schedule_bench.cases import AnyCase, RealCase
from schedule_bench.figures import RankStep, action_seconds
from schedule_bench.megapipe_side import Alone, MegapipeSide
from schedule_bench.peers.floor import Floor, new_group
from schedule_bench.peers.torch_side import TorchSide
from schedule_bench.work import Contender, Work, make_work

TIMEOUT_SECONDS = 120.0
HEAD_START_NS = 2_000_000  # from the barrier to the common start


@dataclass(frozen=True)
class RankCase:
    """A case on one rank: the schedule and the steps of each contender."""

    schedules: dict[str, Schedule]
    steps: dict[str, list[RankStep]]


@dataclass(frozen=True)
class Order:
    """One case, and its number of steps."""

    case: AnyCase
    steps: int


def serve(connection: Connection, rank: int, ranks: int, port: int, real_time: bool) -> None:
    """Answer orders until None comes. real_time: under SCHED_FIFO, threads of the communication included (they inherit
    it).

    Answers first if that was permitted.
    """
    connection.send(real_time and _enter_real_time())
    groups = join(rank, ranks, port, Topology(pp=ranks), TIMEOUT_SECONDS)
    others = {name: new_group(ranks, TIMEOUT_SECONDS) for name in ("torch", "floor")}
    gc.collect()
    gc.freeze()  # existing objects are no garbage: collections in the steps skip them
    while (order := connection.recv()) is not None:
        connection.send(_run_case(order, rank, groups, others))
    shutdown(0)


def _enter_real_time() -> bool:
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(10))
    except (AttributeError, PermissionError):
        return False
    return True


def _run_case(order: Order, rank: int, groups: ProcessGroups, others: dict[str, Any]) -> RankCase:
    """Let the contenders take turns, another one first in each; the first turn warms up."""
    tracer = Tracer() if isinstance(order.case, RealCase) else None
    makers: dict[str, Callable[[Work], Contender]] = {
        "megapipe": lambda work: MegapipeSide(work, groups.pp, tracer),
        "torch": lambda work: TorchSide(work, rank, others["torch"]),
        "floor": lambda work: Floor(work, rank, others["floor"]),
        "alone": lambda work: Alone(work, rank),
    }
    names = order.case.contenders
    works = {name: make_work(order.case) for name in names}
    contenders = {name: makers[name](work) for name, work in works.items()}
    steps: dict[str, list[RankStep]] = {name: [] for name in names}
    for turn in range(order.steps + 1):
        first = turn % len(names)
        for name in (*names[first:], *names[:first]):
            step = _timed(contenders[name], works[name], groups.world, tracer)
            if turn > 0:
                steps[name].append(step)
    return RankCase({name: contender.schedule for name, contender in contenders.items()}, steps)


def _timed(contender: Contender, work: Work, world: Group, tracer: Tracer | None) -> RankStep:
    """Time a step. tracer: of megapipe's real computation; None on an emulated device, which measures itself."""
    contender.begin_step()
    gc.collect()  # no contender pays for another's garbage
    work.watch.reset()
    if tracer is not None:
        tracer.events.clear()
    begin = _agree_on_start(world)
    cpu = time.process_time_ns()
    time.sleep(max(0, begin - time.perf_counter_ns()) / 1e9)
    contender.step()
    end = time.perf_counter_ns()
    durations = work.watch.durations if tracer is None else action_seconds(tracer)
    cpu_seconds = (time.process_time_ns() - cpu) / 1e9
    return RankStep(begin, work.watch.end_ns or end, cpu_seconds, dict(durations))


def _agree_on_start(world: Group) -> int:
    """Wait at a barrier that all ranks leave at one moment of the machine's clock."""
    moment = torch.tensor([time.perf_counter_ns()])
    all_reduce(moment, world, op="max")
    return int(moment) + HEAD_START_NS
