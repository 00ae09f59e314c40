"""`check`: training steps of the ranks of a pipeline on the fake device, and the races between their streams.

The process has loaded the device (`device.load`, before torch) and called `prepare`. The ranks of one pipeline (tp_rank
0, dp_rank 0) run one after another; `order` puts their logs together.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from megapipe.assembly.compose import parameter_dtype
from megapipe.assembly.runtime import TrainingRuntime
from megapipe.comm.groups import fake_process_groups
from megapipe.extras.dry_run.rank import empty_slices, random_reader, run_steps
from megapipe.extras.streams.order import Operation, Race, computed_meanwhile, find_races
from megapipe.extras.streams.recorder import Device, NcclBackend, Recorder, pretend_streams
from megapipe.extras.streams.rows import rows_of_experts
from megapipe.extras.streams.shapes import DEVICE, ShapesOnly, pretend
from megapipe.plan.run_plan import RunPlan
from megapipe.tensor_parallel.gradients import gemm_adds_to_fp32


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
    recorder: Recorder = kind()
    groups, read = fake_process_groups(plan.topology, rank, NcclBackend(recorder)), random_reader(plan)
    with recorder.watching(), on_device(recorder):
        gemm_adds_to_fp32(DEVICE, parameter_dtype(plan.config.precision.dtype))  # as at the start of a run
        runtime = build(plan, groups, DEVICE, empty_slices(DEVICE), marks=recorder.marks)
        recorder.take(runtime)
        run_steps(runtime, read, num_steps, begin=recorder.begin_step)
    return recorder


@contextmanager
def on_device(recorder: Recorder) -> Iterator[None]:
    """Let code inside run on the fake device, where this recorder sees it."""
    Device.recorder = recorder
    Device.set_current(0)
    try:
        with ShapesOnly(), rows_of_experts(), recorder, recorder.answers:
            yield
    finally:
        Device.recorder = None
