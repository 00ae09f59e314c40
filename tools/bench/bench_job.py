"""The timed side of tools/bench/bench_cpu.py: one process for each rank, which waits for orders and runs training
steps.

A job is a row of the table: the plain loop, or megapipe on some grid. megapipe's steps are those of pretrain_gpt.py:
TrainingRuntime and TrainStep with batches of megapipe.data, clipping, AdamW, and the action tracer that a pipeline has
on a CPU. All jobs stay alive and take turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
from bench_processes import join
from plain_loop import PlainLoop, Shape
from torch import Tensor

from megapipe.assembly.microbatches import Keys, Microbatches
from megapipe.assembly.runtime import TrainingRuntime
from megapipe.comm.bootstrap import shutdown
from megapipe.comm.collectives import barrier
from megapipe.comm.trace import Tracer
from megapipe.config.config import Config
from megapipe.config.model import ModelConfig
from megapipe.config.parallel import ParallelConfig
from megapipe.config.training import OptimizerConfig, TrainingConfig
from megapipe.data.batch import Batch, DocumentRules
from megapipe.optimizer.schedule import Rates
from megapipe.plan.resolve import resolve
from megapipe.plan.run_plan import RunPlan
from megapipe.schedule.action import COMPUTE_OPS, Op, parse_action
from megapipe.schedule.costs import Costs
from megapipe.schedule.simulate import simulate
from megapipe.train.step import StepResult, TrainStep

LR, WEIGHT_DECAY, CLIP = 1e-4, 0.01, 1.0
SEED = 1234
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
    config = Config(
        model=ModelConfig(
            num_layers=shape.layers,
            hidden_size=shape.hidden,
            num_attention_heads=shape.heads,
            seq_length=shape.seq,
            vocab_size=shape.vocab,
            make_vocab_size_divisible_by=1,  # the plain loop has no padding
            hidden_dropout=0.0,
            attention_dropout=0.0,
        ),
        parallel=ParallelConfig(
            tensor_model_parallel_size=grid.tp,
            pipeline_model_parallel_size=grid.pp,
            num_virtual_stages_per_pipeline_rank=grid.chunks if grid.chunks > 1 else None,
            use_distributed_optimizer=grid.dp > 1,
            overlap_grad_reduce=grid.dp > 1,
            overlap_param_gather=grid.dp > 1,
        ),
        training=TrainingConfig(
            micro_batch_size=shape.micro_batch,
            global_batch_size=shape.micro_batch * shape.microbatches,
            train_iters=1000,
            device="cpu",
        ),
        optimizer=OptimizerConfig(lr=LR, weight_decay=WEIGHT_DECAY, clip_grad=CLIP),
    )
    return resolve(config, grid.world)


def draw_rows(shape: Shape) -> np.ndarray:
    """Return one global batch of random tokens, [microbatches x micro_batch, s + 1]; the same for every job."""
    return np.random.default_rng(SEED).integers(0, shape.vocab, (shape.microbatches * shape.micro_batch, shape.seq + 1))


class MegapipeJob:
    """megapipe on one rank of a grid."""

    def __init__(self, shape: Shape, grid: Grid, rank: int, port: int) -> None:
        self.plan = make_plan(shape, grid)
        groups = join(rank, grid.world, port, self.plan.topology, TIMEOUT_SECONDS)
        self.tracer = Tracer() if grid.pp > 1 else None
        self.runtime = TrainingRuntime(self.plan, groups, torch.device("cpu"), tracer=self.tracer)
        self._train = TrainStep(self.runtime)
        self._shape, self._rows, self._number = shape, draw_rows(shape), 0

    def step(self) -> StepResult:
        """Make one optimizer step on this rank's part of the global batch."""
        dp, dp_rank, micro = self.plan.topology.dp, self.runtime.coordinates.dp_rank, self._shape.micro_batch

        def read(k: int) -> Batch:
            first = (k * dp + dp_rank) * micro
            return Batch.of(self._rows[first : first + micro], tuple(range(first, first + micro)), DocumentRules())

        keys = Keys(SEED, self._number, dp_rank, dp)
        self._number += 1
        microbatches = Microbatches(self._shape.microbatches // dp, read, keys, self.runtime.device)
        return self._train.run(microbatches, Rates(LR, WEIGHT_DECAY))

    def turn(self, steps: int) -> Measured:
        """Wait at a barrier, then time some steps."""
        barrier(self.runtime.groups.world)
        if self.tracer is not None:
            self.tracer.events.clear()
        return _timed(lambda: self.step().loss, steps, self._stage_times)

    def _stage_times(self, steps: int) -> dict[str, Any]:
        if self.tracer is None:
            return {}
        waits = [(event.start_ns, event.end_ns) for event in self.tracer.of_kind("wait")]
        seconds: dict[tuple[int, str], list[float]] = {}
        for event in self.tracer.of_kind("action"):
            action = parse_action(event.name)
            if action.op in COMPUTE_OPS:
                waited = sum(end - begin for begin, end in waits if event.start_ns <= begin and end <= event.end_ns)
                seconds.setdefault((action.stage, action.op.value), []).append(
                    (event.end_ns - event.start_ns - waited) / 1e9
                )
        rows = sum(event.end_ns - event.start_ns for event in self.tracer.of_kind("row")) / 1e9
        return {
            "stage_seconds": {key: sum(found) / len(found) for key, found in seconds.items()},
            "row_seconds": rows / steps,
        }


class PlainJob:
    """The plain loop."""

    def __init__(self, shape: Shape) -> None:
        self.loop = PlainLoop(shape, LR, WEIGHT_DECAY, CLIP)
        self._rows = torch.from_numpy(draw_rows(shape))

    def step(self) -> tuple[float, float]:
        """Make one step; return (mean loss, gradient norm)."""
        return self.loop.step(self._rows)

    def turn(self, steps: int) -> Measured:
        return _timed(lambda: self.step()[0], steps, lambda _: {})


def _timed(step: Callable[[], float], steps: int, details: Callable[[int], dict[str, Any]]) -> Measured:
    cpu, begin = time.process_time(), time.perf_counter()
    losses = tuple(step() for _ in range(steps))
    end, cpu = time.perf_counter(), time.process_time() - cpu
    return Measured(begin, end, cpu, losses, **details(steps))


def simulated_seconds(plan: RunPlan, stage_seconds: dict[tuple[int, str], float]) -> float:
    """Return the simulated step time with each action at its stage's mean time, and free messages."""
    costs = Costs({(stage, Op(op)): seconds for (stage, op), seconds in stage_seconds.items()})
    assert plan.config.training.global_batch_size is not None
    count = plan.config.training.global_batch_size // plan.batch.samples_per_microbatch
    return simulate(plan.schedule(count), costs).makespan_seconds


def agreement(shape: Shape) -> float:
    """Return the largest relative difference of loss or gradient norm between the plain loop and megapipe over three
    steps from the same weights."""
    job, plain = MegapipeJob(shape, Grid(), 0, 0), PlainJob(shape)
    with torch.no_grad():
        for name, tensor in plain.loop.model.named_parameters():
            tensor.copy_(_in_plain_order(name, job.runtime.buffers[0].parameter(megatron_name(name)), shape))
    worst = 0.0
    for _ in range(3):
        loss, norm = plain.step()
        result = job.step()
        worst = max(worst, abs(result.loss / loss - 1), abs(result.update.grad_norm / norm - 1))
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


def check(orders: Connection, shape: Shape) -> None:
    """Answer with `agreement`."""
    torch.set_num_threads(1)
    orders.send(agreement(shape))
