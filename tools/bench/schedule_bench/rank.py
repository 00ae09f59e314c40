"""The process of a rank: for each case the contenders take turns, step by step, and everything is recorded."""

from __future__ import annotations

import gc
import os
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch

from megapipe.comm.bootstrap import shutdown, start
from megapipe.comm.collectives import all_reduce
from megapipe.comm.groups import Group, ProcessGroups, build_process_groups
from megapipe.comm.trace import Event, Tracer
from megapipe.environment import Environment
from megapipe.schedule.action import COMPUTE_OPS, parse_action
from megapipe.schedule.schedule import Schedule
from megapipe.topology import Topology
from schedule_bench.cases import Case, RealCase
from schedule_bench.devices import Span
from schedule_bench.megapipe_side import Alone, MegapipeSide
from schedule_bench.peers.floor import Floor, Wire
from schedule_bench.peers.groups import new_group
from schedule_bench.peers.torch_side import TorchSide
from schedule_bench.work import Contender, Work, make_work

TIMEOUT_SECONDS = 120.0
HEAD_START_NS = 2_000_000  # from the barrier to the common start


@dataclass(frozen=True)
class RankStep:
    """One step of one contender on one rank.

    start_ns: agreed by all ranks. end_ns: when the step returned. cpu_seconds: of all threads. spans: of an emulated
    device. action_seconds: with real computation under megapipe, by (stage, op value), without waits.
    """

    start_ns: int
    end_ns: int
    cpu_seconds: float
    spans: tuple[Span, ...] = ()
    action_seconds: dict[tuple[int, str], list[float]] = field(default_factory=dict)


@dataclass(frozen=True)
class RankCase:
    """A case on one rank: the schedule and the steps of each contender."""

    schedules: dict[str, Schedule]
    steps: dict[str, list[RankStep]]


@dataclass(frozen=True)
class Order:
    """One case, and how to run it."""

    case: Case | RealCase
    steps: int
    receive_depth: int


def serve(connection: Connection, rank: int, ranks: int, port: int, real_time: bool) -> None:
    """Answer orders until None comes. real_time: under SCHED_FIFO, threads of the communication included (they inherit
    it).

    Answers first if that was permitted.
    """
    torch.set_num_threads(1)
    connection.send(real_time and _enter_real_time())
    here = Environment(rank, ranks, rank, ranks, 1, 0, master_addr="127.0.0.1", master_port=port, launcher="single")
    start(here, "gloo", TIMEOUT_SECONDS, "cpu", facts_of=lambda _: {})
    groups = build_process_groups(Topology(pp=ranks), rank, "gloo", TIMEOUT_SECONDS)
    others = {name: new_group(ranks, TIMEOUT_SECONDS) for name in ("torch", "floor", "wire")}
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
    tracer = Tracer()
    is_real = isinstance(order.case, RealCase)
    makers: dict[str, Callable[[Work], Contender]] = {
        "megapipe": lambda work: MegapipeSide(work, groups.pp, order.receive_depth, tracer if is_real else None),
        "torch": lambda work: TorchSide(work, rank, others["torch"]),
        "wire": lambda work: Wire(work, rank, others["wire"]),
        "floor": lambda work: Floor(work, rank, others["floor"]),
        "alone": lambda work: Alone(work, rank),
    }
    names = order.case.contenders
    works = {name: make_work(order.case) for name in names}
    contenders = {name: makers[name](works[name]) for name in names}
    steps: dict[str, list[RankStep]] = {name: [] for name in names}
    for turn in range(order.steps + 1):
        first = turn % len(names)
        for name in (*names[first:], *names[:first]):
            tracer.events.clear()
            step = _timed(contenders[name], works[name], groups.world)
            if name == "megapipe" and is_real:
                step = RankStep(step.start_ns, step.end_ns, step.cpu_seconds, (), action_seconds(tracer))
            if turn > 0:  # the first only warms up
                steps[name].append(step)
    return RankCase({name: contender.schedule for name, contender in contenders.items()}, steps)


def _timed(contender: Contender, work: Work, world: Group) -> RankStep:
    contender.begin_step()
    gc.collect()  # no contender pays for another's garbage
    work.watch.take()
    begin = _agree_on_start(world)
    cpu = time.process_time_ns()
    time.sleep(max(0, begin - time.perf_counter_ns()) / 1e9)
    contender.step()
    end = time.perf_counter_ns()
    return RankStep(begin, end, (time.process_time_ns() - cpu) / 1e9, tuple(work.watch.take()))


def _agree_on_start(world: Group) -> int:
    """Wait at a barrier that all ranks leave at one moment of the machine's clock."""
    moment = torch.tensor([time.perf_counter_ns()])
    all_reduce(moment, world, op="max")
    return int(moment) + HEAD_START_NS


def action_seconds(tracer: Tracer) -> dict[tuple[int, str], list[float]]:
    """Return the durations of computing actions, without their waits for messages."""
    waits: list[Event] = tracer.of_kind("wait")
    found: dict[tuple[int, str], list[float]] = defaultdict(list)
    for event in tracer.of_kind("action"):
        action = parse_action(event.name)
        if action.op in COMPUTE_OPS:
            waited = sum(
                w.end_ns - w.start_ns for w in waits if event.start_ns <= w.start_ns and w.end_ns <= event.end_ns
            )
            found[action.stage, action.op.value].append((event.end_ns - event.start_ns - waited) / 1e9)
    return dict(found)
