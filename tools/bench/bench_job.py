"""The timed side of tools/bench/bench_cpu.py: one process for each rank, which waits for orders and runs training
steps.

A job is a row of the table: the plain loop, or megapipe on some grid, with the action tracer that a pipeline has on a
CPU. All jobs stay alive and take turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection

import torch
from bench_processes import join
from card_bench.contenders import CLIP, LR, WEIGHT_DECAY, Job, Peer
from plain_loop import PlainGPT, Shape
from schedule_bench.figures import action_seconds, replay_seconds
from torch import Tensor

from megapipe.comm.bootstrap import shutdown
from megapipe.comm.collectives import barrier
from megapipe.comm.trace import Tracer
from megapipe.config.load import load_config
from megapipe.plan.resolve import resolve
from megapipe.plan.run_plan import RunPlan
from megapipe.schedule.action import Op

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


@dataclass(frozen=True)
class Measured:
    """One turn of one rank.

    start, end: seconds of the machine's monotonic clock. cpu_seconds: of all threads of the process. stage_seconds:
    mean time of (stage, op value) without waits. row_seconds: mean time of a step inside its schedule row.
    """

    start: float
    end: float
    cpu_seconds: float
    losses: tuple[float, ...]
    stage_seconds: dict[tuple[int, str], float] = field(default_factory=dict)
    row_seconds: float = 0.0


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

    def turn(self, steps: int) -> Measured:
        """Wait at a barrier, then time some steps."""
        barrier(self.runtime.groups.world)
        if self.tracer is None:
            return timed(lambda: self.step()[0], steps)
        self.tracer.events.clear()
        measured = timed(lambda: self.step()[0], steps)
        stages = {key: sum(found) / len(found) for key, found in action_seconds(self.tracer).items()}
        rows = sum(event.end_ns - event.start_ns for event in self.tracer.of_kind("row")) / 1e9
        return replace(measured, stage_seconds=stages, row_seconds=rows / steps)


class PlainJob(Peer):
    """The plain loop."""

    def __init__(self, shape: Shape) -> None:
        model = PlainGPT(shape)
        super().__init__(make_plan(shape, Grid()), torch.device("cpu"), model, model.loss)
        self.model = model

    def step(self) -> tuple[float, float]:
        """Make one step; return (mean loss, gradient norm)."""
        return float(self.gradients()), self.update()

    def turn(self, steps: int) -> Measured:
        return timed(lambda: self.step()[0], steps)


def timed(step: Callable[[], float], steps: int) -> Measured:
    """Time some steps, each of which returns its loss."""
    cpu, begin = time.process_time(), time.perf_counter()
    losses = tuple(step() for _ in range(steps))
    end, cpu = time.perf_counter(), time.process_time() - cpu
    return Measured(begin, end, cpu, losses)


def simulated_seconds(plan: RunPlan, stage_seconds: dict[tuple[int, str], float]) -> float:
    """Return the simulated step time with each action at its stage's mean time, and free messages."""
    seconds = {(stage, Op(op)): value for (stage, op), value in stage_seconds.items()}
    return replay_seconds(plan.schedule(plan.batch.full // plan.batch.samples_per_microbatch), seconds)


def agreement(shape: Shape) -> float:
    """Return the largest relative difference of loss or gradient norm between the plain loop and megapipe over three
    steps from the same weights."""
    job, plain = MegapipeJob(shape, Grid(), 0, 0), PlainJob(shape)
    with torch.no_grad():
        for name, tensor in plain.model.named_parameters():
            tensor.copy_(_in_plain_order(name, job.runtime.buffers[0].parameter(megatron_name(name)), shape))
    worst = 0.0
    for _ in range(3):
        for one, other in zip(job.step(), plain.step(), strict=True):
            worst = max(worst, abs(one / other - 1))
    return worst


MEGATRON_NAMES = {
    "words.": "embedding.word_embeddings.",
    "positions.": "embedding.position_embeddings.",
    "final_norm.": "decoder.final_layernorm.",
    "blocks.": "decoder.layers.",
    "norm1.": "input_layernorm.",
    "norm2.": "pre_mlp_layernorm.",
    "attention.qkv.": "self_attention.linear_qkv.",
    "attention.proj.": "self_attention.linear_proj.",
    "fc1.": "mlp.linear_fc1.",
    "fc2.": "mlp.linear_fc2.",
}


def megatron_name(name: str) -> str:
    """Return megapipe's name of a parameter of the plain model."""
    for plain, megatron in MEGATRON_NAMES.items():
        name = name.replace(plain, megatron)
    return name


def _in_plain_order(name: str, values: Tensor, shape: Shape) -> Tensor:
    """Reorder megapipe's fused rows, q|k|v of each head in turn, to all of q, all of k, all of v."""
    if ".qkv." not in name:
        return values
    by_head = values.reshape(shape.heads, 3, shape.hidden // shape.heads, -1)
    return by_head.transpose(0, 1).reshape(values.shape)


def serve(orders: Connection, rank: int, ranks: int, port: int, shape: Shape, grid: Grid | None) -> None:
    """Build the job and answer each number of steps with its measurement, until 0. grid None: the plain loop."""
    torch.set_num_threads(1)
    job: PlainJob | MegapipeJob = PlainJob(shape) if grid is None else MegapipeJob(shape, grid, rank, port)
    orders.send(None)
    while steps := orders.recv():
        orders.send(job.turn(steps))
    shutdown(0)


def check(orders: Connection, rank: int, ranks: int, port: int, shape: Shape) -> None:
    """Answer with `agreement`."""
    torch.set_num_threads(1)
    orders.send(agreement(shape))
