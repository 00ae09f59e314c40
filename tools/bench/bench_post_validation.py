#!/usr/bin/env python3
"""Measure what --optimizer-post-validation saves compared with the barrier, on emulated devices.

torchrun --standalone --nproc-per-node 4 tools/bench/bench_post_validation.py

One pipeline over all ranks. Step, engine, messages, norm, loss and optimizer are those of pretrain_gpt.py on a tiny
model; F, I and W of a rank are stretched to --unit milliseconds each by sleeping, so that four ranks need no four
cores. The run with the barrier and the one without take turns in the same processes. A step's time is that between two
verdicts on rank 0: median [quartiles] over all rounds.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from bench_table import Quartiles

from megapipe.assembly.microbatches import Keys, Microbatches
from megapipe.assembly.runtime import TrainingRuntime
from megapipe.comm.bootstrap import World, shutdown, start
from megapipe.comm.collectives import barrier
from megapipe.comm.groups import build_process_groups
from megapipe.config.load import load_config
from megapipe.data.batch import Batch, DocumentRules
from megapipe.environment import read_environment
from megapipe.optimizer.schedule import Rates
from megapipe.pipeline.stage import StageRunner
from megapipe.plan.resolve import resolve
from megapipe.schedule.action import COMPUTE_OPS, Op
from megapipe.schedule.costs import Costs
from megapipe.schedule.simulate import simulate
from megapipe.train.step import StepBatch, StepResult, train_step

MODEL = (
    "--num-layers 8 --hidden-size 16 --num-attention-heads 2 --seq-length 8 --vocab-size 32 "
    "--make-vocab-size-divisible-by 4 "
    "--micro-batch-size 1 --lr 1e-3 --clip-grad 0 --mock-data --train-iters 1000 --device cpu --pipeline-balance even "
    "--untie-embeddings-and-output-weights"
)
UNITS = {Op.F: ("forward", 1), Op.B: ("backward", 2), Op.I: ("backward_input", 1), Op.W: ("backward_weight", 1)}


def stretch(runner: StageRunner, seconds: float) -> None:
    """Make every op of the stage last at least its units of `seconds`."""

    def lasting(function: Callable[..., Any], least: float) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            end = time.perf_counter() + least
            result = function(*arguments)
            time.sleep(max(0.0, end - time.perf_counter()))
            return result

        return call

    split = {name: getattr(runner, name) for name, _ in UNITS.values()}
    inner = lambda *arguments: StageRunner.backward(runner, *arguments)  # noqa: E731
    runner.backward = lasting(inner, 2 * seconds)  # type: ignore[method-assign]
    runner.forward = lasting(split["forward"], seconds)  # type: ignore[method-assign]
    runner.backward_weight = lasting(split["backward_weight"], seconds)  # type: ignore[method-assign]

    def backward_input(microbatch: int, gradients: Any) -> Any:
        queue = runner._queue()
        queue.defer(microbatch)
        try:
            return inner(microbatch, gradients)
        finally:
            queue.immediate()

    runner.backward_input = lasting(backward_input, seconds)  # type: ignore[method-assign]


class Contender:
    """One run's runtime, and the times of its verdicts."""

    def __init__(self, schedule: str, is_ahead: bool, arguments: argparse.Namespace, world: World) -> None:
        flags = (
            f"{MODEL} --pipeline-model-parallel-size {world.world_size} --global-batch-size {arguments.microbatches}"
        )
        flags += f" --pipeline-schedule {schedule}" + " --optimizer-post-validation" * is_ahead
        plan = resolve(load_config(flags.split()).config, world.world_size)
        groups = build_process_groups(plan.topology, world.global_rank, world.backend, world.timeout_seconds)
        self.runtime = TrainingRuntime(plan, groups, world.device)
        seconds = arguments.unit / 1e3 / plan.num_chunks
        for runner in self.runtime.runners.values():
            stretch(runner, seconds)
        self._step, self._count, self._index = train_step(self.runtime), arguments.microbatches, 0
        self._rows = np.random.RandomState(0).randint(0, 32, (self._count, 9))
        costs = Costs({(s, op): UNITS[op][1] * seconds for s in range(plan.placement.num_stages) for op in COMPUTE_OPS})
        timeline = simulate(plan.schedule(self._count), costs)
        row = max(timeline.work_seconds)
        self.ideal = row + max(timeline.chained_idle_seconds if is_ahead else timeline.barrier_idle_seconds)

    def round(self, steps: int) -> list[float]:
        """Return the seconds between verdicts, from the second to the last but one."""
        barrier(self.runtime.groups.world)
        verdicts: list[float] = []

        def settle(batch: StepBatch, result: StepResult) -> bool:
            verdicts.append(time.perf_counter())
            return True

        for step in range(1, steps + 1):
            rates, is_last = Rates(1e-3, 0.0), step == steps
            batch = StepBatch(step, 0, self._count, self._microbatches(), rates, needs_result=is_last)
            result = self._step.take(batch, settle)
            if result is not None and not is_last:
                settle(batch, result)
        return [after - before for before, after in pairwise(verdicts[1:])]

    def _microbatches(self) -> Microbatches:
        self._index += 1
        read = lambda k: Batch.of(self._rows[k : k + 1], (k,), DocumentRules())  # noqa: E731
        return Microbatches(self._count, read, Keys(1, self._index, 0, 1), self.runtime.device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedule", action="append", help="may be repeated (default: zb-h2, zb-v and 1f1b)")
    parser.add_argument(
        "--unit", type=float, default=20.0, help="milliseconds of a rank's F, of its I, of its W (default: 20)"
    )
    parser.add_argument("--microbatches", type=int, default=8, help="of a step (default: 8)")
    parser.add_argument("--rounds", type=int, default=4, help="number of turns of each contender (default: 4)")
    parser.add_argument("--steps", type=int, default=7, help="steps of a turn, at least 4 (default: 7)")
    parser.add_argument("--json", type=Path, help="write every measured time to this file")
    arguments = parser.parse_args()
    if arguments.steps < 4:
        parser.error(f"--steps {arguments.steps} is too few: the first two and the last of a turn are not timed; use 4")
    torch.set_num_threads(1)
    world = start(read_environment(), "gloo", 120.0, "cpu", facts_of=lambda _: {})
    found: dict[str, dict[str, list[float]]] = {}
    for schedule in arguments.schedule or ["zb-h2", "zb-v", "1f1b"]:
        contenders = {name: Contender(schedule, name == "ahead", arguments, world) for name in ("barrier", "ahead")}
        times: dict[str, list[float]] = {name: [] for name in contenders}
        for turn in range(arguments.rounds):
            for name in list(contenders)[:: 1 if turn % 2 else -1]:
                times[name] += contenders[name].round(arguments.steps)
        found[schedule] = times
        if world.global_rank == 0:
            print(line(schedule, times, {name: contender.ideal for name, contender in contenders.items()}), flush=True)
    if world.global_rank == 0 and arguments.json is not None:
        arguments.json.write_text(json.dumps(found))
    shutdown(0)


def line(schedule: str, times: dict[str, list[float]], ideal: dict[str, float]) -> str:
    """Return a row of a Markdown table: milliseconds a step, their ratio, the simulated ratio."""
    cells = []
    for name in ("barrier", "ahead"):
        cells.append(Quartiles.of([1e3 * seconds for seconds in times[name]]).text(".0f"))
    ratio = median(times["barrier"]) / median(times["ahead"])
    return f"| {schedule} | {cells[0]} | {cells[1]} | {ratio:.3f} | {ideal['barrier'] / ideal['ahead']:.3f} |"


if __name__ == "__main__":
    main()
