#!/usr/bin/env python3
"""Measure what --overlap-moe-expert-parallel-comm saves, on emulated devices, compared with the simulator.

torchrun --standalone --nproc-per-node 8 tools/bench/bench_expert_overlap.py

4 pipeline ranks x ep 2. Runtime, engine and messages are those of pretrain_gpt.py on a tiny model whose router is
forced to balance, so that all splits are equal. Every part of a stage is stretched to its seconds by sleeping, so that
eight ranks need no eight cores. An all-to-all is a real one of few bytes that ends no earlier than its seconds after it
was issued, and after the one before it on the rank: network time is emulated, since messages of real size would compete
for the cores. In the serial step all-to-alls block; in the other they run under the parts of pairs and under weight
gradients. The two take turns in the same processes.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from megapipe.assembly.microbatches import Keys, Microbatches
from megapipe.assembly.runtime import TrainingRuntime
from megapipe.comm.bootstrap import World, shutdown, start
from megapipe.comm.collectives import barrier
from megapipe.comm.groups import build_process_groups
from megapipe.config.load import load_config
from megapipe.data.batch import Batch, DocumentRules
from megapipe.environment import read_environment
from megapipe.pipeline.deliveries import deliveries_for
from megapipe.pipeline.engine import Engine, Step
from megapipe.pipeline.parts import Exchange, part_runners
from megapipe.plan.resolve import resolve
from megapipe.schedule.action import Op
from megapipe.schedule.costs import Seconds
from megapipe.schedule.experts import ExpertModel
from megapipe.schedule.lower import lower, without_pairs
from megapipe.schedule.parts import Parts, expand
from megapipe.schedule.schedule import Schedule
from megapipe.schedule.simulate import simulate

EP = 2
MODEL = (
    "--hidden-size 16 --num-attention-heads 2 --seq-length 8 --vocab-size 32 --make-vocab-size-divisible-by 4 "
    "--micro-batch-size 1 --lr 1e-3 --clip-grad 0 --mock-data --train-iters 1000 --device cpu --disable-bias-linear "
    "--pipeline-balance even --untie-embeddings-and-output-weights --num-experts 4 --moe-ffn-hidden-size 8 "
    f"--moe-router-force-load-balancing --expert-model-parallel-size {EP} --overlap-moe-expert-parallel-comm "
    "--delay-wgrad-compute"
)
SCHEDULES = {"1f1b": 1, "interleaved": 2, "dualpipe": 1, "dualpipe-v": 2}  # and chunks per rank
CALLS = {Op.F: "forward", Op.B: "backward", Op.I: "backward_input", Op.W: "backward_weight"}


class Link:
    """The emulated network of a rank: one all-to-all at a time. late: seconds by which real ones ended later."""

    def __init__(self) -> None:
        self._free_at = self.late = 0.0

    def lasting(self, work: Any, seconds: float) -> Any:
        """Return the handle of an all-to-all issued now that also lasts its seconds."""
        self._free_at = max(time.perf_counter(), self._free_at) + seconds
        return LastingWork(self, work, self._free_at)


class LastingWork:
    """A handle that is complete when the all-to-all is, and not before its time."""

    def __init__(self, link: Link, work: Any, end: float) -> None:
        self._link, self._work, self._end = link, work, end

    def wait(self) -> None:
        self._work.wait()
        left = self._end - time.perf_counter()
        self._link.late += max(0.0, -left)
        time.sleep(max(0.0, left))


def stretch(part: Any, seconds: Callable[[Op], float]) -> None:
    """Make every op of a part with computation last its seconds."""

    def lasting(function: Callable[..., Any], least: float) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            end = time.perf_counter() + least
            result = function(*arguments)
            time.sleep(max(0.0, end - time.perf_counter()))
            return result

        return call

    for op, name in CALLS.items():
        setattr(part, name, lasting(getattr(part, name), seconds(op)))


def delay(part: Any, seconds: Callable[[Op], float], link: Link, is_blocking: bool) -> None:
    """Make the all-to-alls of a part last their seconds; is_blocking: the rank waits for each of them."""

    def lasting(function: Callable[..., Any], least: float) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            exchange = function(*arguments)
            assert isinstance(exchange, Exchange)
            *others, last = exchange._works
            exchange._works = (*others, link.lasting(last, least))
            return exchange.wait() if is_blocking else exchange

        return call

    for op in (Op.F, Op.B):
        setattr(part, CALLS[op], lasting(getattr(part, CALLS[op]), seconds(op)))


class Contender:
    """An engine on its own row of parts, with stretched parts."""

    def __init__(
        self, runtime: TrainingRuntime, schedule: Schedule, parts: Parts, model: ExpertModel, overlaps: bool
    ) -> None:
        self.costs, self.link = model.part_costs(parts, overlaps), Link()
        self.simulated = simulate(schedule, self.costs).makespan_seconds
        runners: dict[int, Any] = {}
        for stage, module in runtime.stages.items():
            runners |= part_runners(parts, stage, module, runtime.runners[stage], frees_weights=False)
        for index, part in runners.items():
            if index in parts.network:
                delay(part, partial(self._seconds, index), self.link, not overlaps)
            else:
                stretch(part, partial(self._seconds, index))
        self._runtime, self._schedule = runtime, schedule
        self._engine = Engine(
            schedule,
            runtime.coordinates.pp_rank,
            runners,
            runtime.channels,
            parts=parts,
            deliveries=deliveries_for(runtime.device, None),
        )

    def _seconds(self, index: int, op: Op) -> float:
        return self.costs.seconds[index, op]

    def step(self, microbatches: Microbatches) -> float:
        """Run forward and backward of one step and return its seconds."""
        runtime = self._runtime
        runtime.stores.begin_step(len(microbatches))
        step = Step(microbatches, runtime.message, lambda output, _: (output.loss_sum, output.loss_sum.detach()))
        barrier(runtime.groups.world)
        began = time.perf_counter()
        self._engine.run(step)
        barrier(runtime.groups.world)
        seconds = time.perf_counter() - began
        runtime.stores.finish_gradients()
        return seconds


def expert_model(arguments: argparse.Namespace) -> ExpertModel:
    """Return the seconds of the parts."""
    given = {name: [each / 1e3 for each in getattr(arguments, name)] for name in ("attention", "mlp", "head", "a2a")}
    attention, mlp, head = (Seconds(*given[name]) for name in ("attention", "mlp", "head"))
    forward, backward = given["a2a"]
    both = forward, backward
    return ExpertModel((True,) * arguments.layers, attention, mlp, mlp, head, both, both)


def measure(name: str, arguments: argparse.Namespace, world: World) -> dict[str, Any]:
    """Return the measured and simulated seconds of one schedule."""
    pp, chunks = world.world_size // EP, SCHEDULES[name]
    flags = f"{MODEL} --num-layers {arguments.layers} --pipeline-model-parallel-size {pp} --pipeline-schedule {name}"
    flags += f" --global-batch-size {arguments.microbatches * EP}"
    flags += f" --num-virtual-stages-per-pipeline-rank {chunks}" * (chunks > 1)
    plan = resolve(load_config(flags.split()).config, world.world_size)
    parts, count, model = plan.parts, arguments.microbatches, expert_model(arguments)
    assert parts is not None
    groups = build_process_groups(plan.topology, world.global_rank, world.backend, world.timeout_seconds)
    runtime = TrainingRuntime(plan, groups, world.device)
    whole = plan.schedule(count).compute_only()
    serial = replace(whole, rows=tuple(map(without_pairs, whole.rows)))
    depth = 4 * max(map(len, parts.of_stage))  # of receives, as in the plan of a run on CPUs
    rows = {False: lower(expand(serial, parts, delay_weights=False), depth), True: plan.part_schedule(count)}
    contenders = {overlaps: Contender(runtime, rows[overlaps], parts, model, overlaps) for overlaps in rows}
    tokens = np.random.RandomState(0).randint(0, 32, (count, 9))
    seconds: dict[bool, list[float]] = {False: [], True: []}

    def read(k: int) -> Batch:
        return Batch.of(tokens[k : k + 1], (k,), DocumentRules())

    for turn in range(arguments.steps + 1):
        for overlaps, contender in contenders.items():
            taken = contender.step(Microbatches(count, read, Keys(1, turn, 0, 1), runtime.device))
            if turn:  # the first one is a warm-up
                seconds[overlaps].append(taken)
    return {
        "serial": seconds[False],
        "overlapped": seconds[True],
        "simulated serial": contenders[False].simulated,
        "simulated overlapped": contenders[True].simulated,
        "late": contenders[True].link.late,
    }


def line(name: str, found: dict[str, Any]) -> str:
    """Return a row of a Markdown table: milliseconds of steps, measured and simulated gain, and their ratio."""
    serial, overlapped = median(found["serial"]), median(found["overlapped"])
    simulated = found["simulated serial"] - found["simulated overlapped"]
    cells = [serial, found["simulated serial"], overlapped, found["simulated overlapped"], serial - overlapped]
    times = " | ".join(f"{1e3 * seconds:.0f}" for seconds in (*cells, simulated))
    return f"| {name} | {times} | {(serial - overlapped) / simulated:.2f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedule", action="append", choices=SCHEDULES, help="may be repeated (default: all)")
    parser.add_argument("--attention", type=float, nargs=3, default=[20, 26, 14], help="F, I and W in milliseconds")
    parser.add_argument("--mlp", type=float, nargs=3, default=[20, 20, 20], help="of the experts: F, I and W")
    parser.add_argument("--head", type=float, nargs=3, default=[4, 4, 4], help="F, I and W in milliseconds")
    parser.add_argument("--a2a", type=float, nargs=2, default=[15, 15], help="an all-to-all: F and B, in milliseconds")
    parser.add_argument("--layers", type=int, default=8, help="of the model (default: 8)")
    parser.add_argument("--microbatches", type=int, default=12, help="of a step (default: 12)")
    parser.add_argument("--steps", type=int, default=5, help="measured steps of each (default: 5)")
    parser.add_argument("--json", type=Path, help="write every measured time to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    world = start(read_environment(), "gloo", 120.0, "cpu", facts_of=lambda _: {})
    if world.global_rank == 0:
        print(
            "| schedule | serial | simulated | overlapped | simulated | gain | simulated | ratio |\n" + "|---" * 8 + "|"
        )
    results = {}
    for name in arguments.schedule or SCHEDULES:
        results[name] = measure(name, arguments, world)
        if world.global_rank == 0:
            print(line(name, results[name]), flush=True)
    if world.global_rank == 0 and arguments.json is not None:
        arguments.json.write_text(json.dumps(results))
    shutdown(0)


if __name__ == "__main__":
    main()
