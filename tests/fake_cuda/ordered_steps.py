"""Training steps of all ranks of a pipeline on the fake device, for each line of the standard input, and their races.

    python -m tests.fake_cuda.ordered_steps LIBRARY < LINES

LIBRARY: what `device.build` returned. A line is the JSON of `races_of`'s arguments. For each, prints the JSON of its
result. The ranks of a pipeline (tp_rank 0, dp_rank 0) run one after another; `order` puts their logs together.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    from tests.fake_cuda.device import load

    load(Path(sys.argv[1]))

import dataclasses
import json
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megapipe.assembly import runtime as assembly
from megapipe.assembly.compose import parameter_dtype
from megapipe.assembly.microbatches import Keys, Microbatches
from megapipe.assembly.runtime import TrainingRuntime
from megapipe.comm.groups import Group, ProcessGroups, Traffic, fake_process_groups
from megapipe.extras.streams.rows import rows_of_experts
from megapipe.optimizer.schedule import Rates
from megapipe.plan.run_plan import RunPlan
from megapipe.sharding.spec import ParamSpec
from megapipe.tensor_parallel.gradients import gemm_adds_to_fp32
from megapipe.topology import GROUP_NAMES
from megapipe.train.step import StepBatch, train_step
from tests.extras.dry_run.grids import make_plan, read_for
from tests.fake_cuda.order import Entry, find_races
from tests.fake_cuda.plants import PLANTS
from tests.fake_cuda.recorder import Device, NcclHandle, OrderedAnswers, Recorder, pretend_streams
from tests.fake_cuda.steps import ACTIVE, DEVICE, ShapesOnly, pretend

BASE: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "seq_length": 16,
    "vocab_size": 96,
    "global_batch_size": 4,
    "micro_batch_size": 1,
    "hidden_dropout": 0.0,
    "dtype": "bf16",
    "device": "cuda",
}


def nccl_groups(plan: RunPlan, rank: int, recorder: Recorder) -> ProcessGroups:
    """Return the rank's groups, each with its internal stream."""
    groups = fake_process_groups(plan.topology, rank, Traffic())
    found = {name: getattr(groups, name) for name in GROUP_NAMES}
    return ProcessGroups(**{name: group and _communicator(group, name, recorder) for name, group in found.items()})


def _communicator(group: Group, name: str, recorder: Recorder) -> Group:
    if group.handle is None:
        return group
    return dataclasses.replace(group, handle=NcclHandle(name, Traffic(), recorder))


def log_of(plan: RunPlan, rank: int, num_steps: int) -> list[Entry]:
    """Run steps of one rank and return its log."""
    answers = OrderedAnswers()
    ACTIVE[:] = [answers]
    recorder = answers.recorder = Device.recorder = Recorder(answers)
    Device.set_current(0)
    groups, read = nccl_groups(plan, rank, recorder), read_for(plan)
    assembly.second_communicator = lambda group: _communicator(group, f"{group.name} 2", recorder)
    assembly.gather_objects = lambda value, group: [value] * group.size

    def empty(spec: ParamSpec, tp_rank: int, tp: int) -> Tensor:
        return torch.empty(spec.local_shape(tp_rank, tp), device=DEVICE)

    with ShapesOnly(), rows_of_experts(), recorder, answers:
        gemm_adds_to_fp32(DEVICE, parameter_dtype(plan.config.precision.dtype))  # as at the start of a run
        runtime = TrainingRuntime(plan, groups, DEVICE, empty)
        for channel in runtime.channels.values():
            channel.handle = NcclHandle(str(channel), Traffic(), recorder)
        step, place, count = train_step(runtime), runtime.coordinates.dp_rank, plan.batch.num_microbatches
        size = plan.config.training.global_batch_size
        for number in range(num_steps):
            keys = Keys(1, number, place, plan.topology.dp)
            batch = Microbatches(count, partial(read, place), keys, DEVICE)
            is_last = number == num_steps - 1
            step.take(StepBatch(number + 1, number * size, size, batch, Rates(1e-3, 0.1), is_last), lambda *_: True)
            del batch
        runtime.finish_parameters()
    Device.recorder = None
    return recorder.log


def races_of(world_size: int, changes: dict[str, Any], num_steps: int = 2, plant: str = "") -> dict[str, Any]:
    """Return the races of a configuration, with a planted mistake if one is named, and the size of the logs."""
    started = time.perf_counter()
    given = {key: tuple(value) if isinstance(value, list) else value for key, value in (BASE | changes).items()}
    result: dict[str, Any] = {"races": [], "entries": 0, "error": ""}
    planted: Callable[[], AbstractContextManager[Any]] = PLANTS[plant] if plant else nullcontext
    try:
        plan = make_plan(world_size, given)
        places = map(plan.topology.coordinates, range(world_size))
        with planted():
            logs = [log_of(plan, rank, num_steps) for rank, at in enumerate(places) if at.tp_rank == at.dp_rank == 0]
        result["races"], result["entries"] = [str(race) for race in find_races(logs)], sum(map(len, logs))
    except Exception as error:
        result["error"] = "".join(traceback.format_exception(error))
    return result | {"seconds": round(time.perf_counter() - started, 1)}


if __name__ == "__main__":
    warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")  # our buffers align their start
    warnings.filterwarnings("error", "The AccumulateGrad node's stream")  # it would break the capture of a graph
    pretend()
    pretend_streams()
    Device.load(sys.argv[1])
    for line in sys.stdin:
        print(json.dumps(races_of(**json.loads(line))), flush=True)
