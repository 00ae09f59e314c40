"""`check`: training steps of the ranks of a pipeline on the fake device, and the races between their streams.

The process has loaded the device (`device.load`, before torch) and called `prepare`. The ranks of one pipeline (tp_rank
0, dp_rank 0) run one after another; `order` puts their logs together.
"""

from __future__ import annotations

import dataclasses
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from megapipe.assembly import compose
from megapipe.assembly import runtime as assembly
from megapipe.assembly.compose import parameter_dtype
from megapipe.assembly.microbatches import Keys, Microbatches
from megapipe.assembly.runtime import TrainingRuntime
from megapipe.comm.groups import Group, ProcessGroups, Traffic, fake_process_groups
from megapipe.data.batch import Batch, DocumentRules
from megapipe.extras.streams.order import Operation, Race, computed_meanwhile, find_races
from megapipe.extras.streams.recorder import Device, NcclHandle, Recorder, pretend_streams
from megapipe.extras.streams.rows import rows_of_experts
from megapipe.extras.streams.shapes import ACTIVE, DEVICE, ShapesOnly, pretend
from megapipe.optimizer.schedule import Rates
from megapipe.plan.run_plan import RunPlan
from megapipe.sharding.spec import ParamSpec
from megapipe.tensor_parallel.gradients import gemm_adds_to_fp32
from megapipe.topology import GROUP_NAMES
from megapipe.train.step import train_step

RATES = Rates(1e-3, 0.1)  # arbitrary: there are no values


class Checked(NamedTuple):
    """The ranks that ran, what they launched, and the races."""

    ranks: tuple[int, ...]
    num_operations: int
    num_queues: int
    races: list[Race]
    overlaps: dict[str, list[int]]  # as `computed_meanwhile`, of all ranks
    seconds: float


def prepare(library: str) -> None:
    """Replace what torch asks of a GPU by the fake device, for the rest of this process."""
    warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")  # our buffers align their start
    warnings.filterwarnings("error", "The AccumulateGrad node's stream")  # it would break the capture of a graph
    pretend()
    pretend_streams()
    Device.load(library)


def check(plan: RunPlan, num_steps: int = 2, build: Callable[..., TrainingRuntime] = TrainingRuntime) -> Checked:
    """Run steps of every rank of the pipeline and return the races. build: makes a rank's runtime."""
    started = time.perf_counter()
    places = map(plan.topology.coordinates, range(plan.topology.world_size))
    ranks = tuple(rank for rank, at in enumerate(places) if not (at.tp_rank or at.dp_rank or at.cp_rank))
    logs = [recorded(plan, rank, num_steps, build).log for rank in ranks]
    operations = [entry for log in logs for entry in log if isinstance(entry, Operation)]
    queues = {operation.queue for operation in operations}
    overlaps: dict[str, list[int]] = {}
    for log in logs:
        for place, products in computed_meanwhile(log).items():
            overlaps.setdefault(place, []).extend(products)
    races = find_races(logs)
    return Checked(ranks, len(operations), len(queues), races, overlaps, time.perf_counter() - started)


def recorded(
    plan: RunPlan,
    rank: int,
    num_steps: int,
    build: Callable[..., TrainingRuntime] = TrainingRuntime,
    kind: type[Any] = Recorder,
) -> Any:
    """Run steps of one rank and return what has recorded them, a recorder of this kind."""
    answers = kind.answers_type()
    ACTIVE[:] = [answers]
    recorder: Recorder = kind(answers)
    answers.recorder = Device.recorder = recorder
    Device.set_current(0)
    groups, read = nccl_groups(plan, rank, recorder), random_batches(plan)

    def empty(spec: ParamSpec, tp_rank: int, tp: int) -> Tensor:
        return torch.empty(spec.local_shape(tp_rank, tp), device=DEVICE)

    def second(group: Group) -> Group:
        return _communicator(group, f"{group.name} 2", recorder)

    gathered = patch.object(assembly, "gather_objects", lambda value, group: [value] * group.size)
    try:
        with (
            patch.object(compose, "second_communicator", second),
            gathered,
            ShapesOnly(),
            rows_of_experts(),
            recorder.watching(),
            recorder,
            answers,
        ):
            gemm_adds_to_fp32(DEVICE, parameter_dtype(plan.config.precision.dtype))  # as at the start of a run
            runtime = build(plan, groups, DEVICE, empty, marks=recorder.marks)
            routes = {channel.route for channel in runtime.channels.values()}
            handles = {route: NcclHandle(str(route), Traffic(), recorder) for route in routes}
            for channel in runtime.channels.values():
                channel.handle = handles[channel.route]
            recorder.take(runtime)
            _run(runtime, read, num_steps, recorder)
    finally:
        Device.recorder = None
    return recorder


def _run(runtime: TrainingRuntime, read: Callable[[int, int], Batch], num_steps: int, recorder: Recorder) -> None:
    plan, step, place = runtime.plan, train_step(runtime), runtime.coordinates.dp_rank
    count = plan.batch.num_microbatches
    parts = runtime.sequence_part, runtime.packs_documents, runtime.num_ahead
    for number in range(num_steps):
        recorder.last_step = len(recorder.log)
        keys = Keys(1, number, place, plan.topology.dp)
        batch = Microbatches(count, partial(read, place), keys, DEVICE, *parts)
        step.run(batch, RATES)
        del batch
    runtime.finish_parameters()


def nccl_groups(plan: RunPlan, rank: int, recorder: Recorder) -> ProcessGroups:
    """Return the rank's groups, each with its internal stream; groups that are one have one."""
    groups = fake_process_groups(plan.topology, rank, Traffic())
    made: dict[int, Group] = {}
    found: dict[str, Group | None] = {}
    for name in GROUP_NAMES:
        group = getattr(groups, name)
        found[name] = group and made.setdefault(id(group), _communicator(group, name, recorder))
    return ProcessGroups(**found)  # type: ignore[arg-type]


def _communicator(group: Group, name: str, recorder: Recorder) -> Group:
    if group.handle is None:
        return group
    return dataclasses.replace(group, handle=NcclHandle(name, Traffic(), recorder))


def random_batches(plan: RunPlan) -> Callable[[int, int], Batch]:
    """Return a function (dp_rank, microbatch) -> a batch of random token ids."""
    micro, seq = plan.config.training.micro_batch_size, plan.config.model.seq_length
    data = plan.config.data
    rules = DocumentRules(0, data.reset_position_ids, data.reset_attention_mask, data.eod_mask_loss)

    def read(dp_rank: int, k: int) -> Batch:
        samples = np.random.default_rng([dp_rank, k]).integers(1, plan.config.model.vocab_size, (micro, seq + 1))
        return Batch.of(samples.astype(np.int64), tuple(range(micro)), rules)

    return read
