"""The timed side of tools/bench/bench_cpu.py: one process for each rank, which waits for orders and runs training
steps.

A job is a row of the table: the plain loop, or megapipe on some grid, with the action tracer that a pipeline has on a
CPU. All jobs stay alive and take turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection

import torch
from bench_processes import join
from card_bench.agreement import Agreement
from card_bench.agreement import agreement as compare
from card_bench.contenders import CLIP, LR, WEIGHT_DECAY, Job, Peer
from plain_loop import PlainGPT, Shape
from schedule_bench.figures import RankStep, action_seconds

from megapipe.comm.bootstrap import shutdown
from megapipe.comm.collectives import barrier
from megapipe.comm.trace import Tracer
from megapipe.config.load import load_config
from megapipe.plan.resolve import resolve
from megapipe.plan.run_plan import RunPlan

TIMEOUT_SECONDS = 300.0


@dataclass(frozen=True)
class Grid:
    """The grid of megapipe; a grid of one rank is a single process."""

    tp: int = 1
    pp: int = 1
    chunks: int = 1
    dp: int = 1

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.dp


def make_plan(shape: Shape, grid: Grid) -> RunPlan:
    """Return the plan of a row. The batch of a step is the same on every grid."""
    flags = (
        f"--num-layers {shape.layers} --hidden-size {shape.hidden} --num-attention-heads {shape.heads} "
        f"--seq-length {shape.seq} --vocab-size {shape.vocab} --make-vocab-size-divisible-by 1 --hidden-dropout 0 "
        f"--attention-dropout 0 --micro-batch-size {shape.micro_batch} --train-iters 1000 --device cpu --mock-data "
        f"--global-batch-size {shape.micro_batch * shape.microbatches} --lr {LR} --weight-decay {WEIGHT_DECAY} "
        f"--clip-grad {CLIP} --compile-blocks off --tensor-model-parallel-size {grid.tp} "
        f"--pipeline-model-parallel-size {grid.pp}"
    )
    flags += f" --num-virtual-stages-per-pipeline-rank {grid.chunks}" * (grid.chunks > 1)
    flags += " --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather" * (grid.dp > 1)
    return resolve(load_config(flags.split()).config, grid.world)


class MegapipeJob(Job):
    """megapipe on one rank of a grid."""

    def __init__(self, shape: Shape, grid: Grid, rank: int, port: int) -> None:
        plan = make_plan(shape, grid)
        self.tracer = Tracer() if grid.pp > 1 else None
        groups = join(rank, grid.world, port, plan.topology, TIMEOUT_SECONDS)
        super().__init__(plan, torch.device("cpu"), groups=groups, tracer=self.tracer)

    def turn(self) -> RankStep:
        """Wait at a barrier, then time a step."""
        barrier(self.runtime.groups.world)
        if self.tracer is None:
            return timed(self.step)
        self.tracer.events.clear()
        return replace(timed(self.step), durations=action_seconds(self.tracer))


class PlainJob(Peer):
    """The plain loop."""

    def __init__(self, shape: Shape) -> None:
        model = PlainGPT(shape)
        super().__init__(make_plan(shape, Grid()), torch.device("cpu"), model, model.loss)
        self.model = model

    def turn(self) -> RankStep:
        return timed(lambda: (float(self.gradients()), self.update()))


def timed(step: Callable[[], object]) -> RankStep:
    """Time a step."""
    cpu, begin = time.process_time(), time.perf_counter_ns()
    step()
    return RankStep(begin, time.perf_counter_ns(), time.process_time() - cpu)


def agreement(shape: Shape) -> Agreement:
    """Compare megapipe and the plain loop over three steps from the same weights."""
    job, plain = MegapipeJob(shape, Grid(), 0, 0), PlainJob(shape)
    with torch.no_grad():
        for name, tensor in plain.model.named_parameters():
            tensor.copy_(job.runtime.buffers[0].parameter(name))
    (found,) = compare({"megapipe": job, "the plain loop": plain}, "fp32", steps=3)
    return found


def serve(orders: Connection, rank: int, ranks: int, port: int, shape: Shape, grid: Grid | None) -> None:
    """Build the job and answer each order with a step, until None. grid None: the plain loop."""
    torch.set_num_threads(1)
    job: PlainJob | MegapipeJob = PlainJob(shape) if grid is None else MegapipeJob(shape, grid, rank, port)
    orders.send(None)
    while orders.recv() is not None:
        orders.send(job.turn())
    shutdown(0)


def check(orders: Connection, rank: int, ranks: int, port: int, shape: Shape) -> None:
    """Answer with `agreement`."""
    torch.set_num_threads(1)
    orders.send(agreement(shape))
