#!/usr/bin/env python3
"""Train steps of one rank of a grid on one device: its real kernels and memory, over process groups that move nothing.

    python tools/bench/one_rank.py WORLD_SIZE RANK --flags 'FLAGS of pretrain_gpt.py'

Prints peak bytes and seconds beside the plan's. The planned step has bubbles and collectives; this one has neither.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor

from megapipe.assembly.runtime import TrainingRuntime
from megapipe.comm.groups import Traffic, fake_process_groups
from megapipe.config.load import load_config
from megapipe.environment import set_for_libraries
from megapipe.errors import MegapipeError
from megapipe.extras.streams.ranks import random_batches
from megapipe.optimizer.schedule import Rates
from megapipe.plan.hardware import hardware_of
from megapipe.plan.memory import rank_memory
from megapipe.plan.resolve import resolve
from megapipe.plan.run_plan import RunPlan
from megapipe.plan.step_time import predict_step
from megapipe.sharding.spec import ParamSpec
from megapipe.train.step import train_step

RATES = Rates(1e-4, 0.1)
GIB = 1 << 30


def weights_on(device: torch.device) -> Callable[[ParamSpec, int, int], Tensor]:
    """Return a function that draws weights on the device, which is faster than the run's own draw."""

    def draw(spec: ParamSpec, tp_rank: int, tp: int) -> Tensor:
        shape = spec.local_shape(tp_rank, tp)
        return torch.ones(shape, device=device) if len(shape) < 2 else torch.randn(shape, device=device) * 0.02

    return draw


def measure(plan: RunPlan, global_rank: int, steps: int, device: torch.device) -> dict[str, float]:
    """Return what steps of the rank take. seconds: the fastest step, after the first."""
    groups, read = fake_process_groups(plan.topology, global_rank, Traffic()), random_batches(plan)
    runtime = TrainingRuntime(plan, groups, device, weights_on(device))
    dp_rank, step, times, peak = runtime.coordinates.dp_rank, train_step(runtime), [], 0
    for number in range(steps):
        batch = runtime.microbatches(plan.batch.num_microbatches, partial(read, dp_rank), number)
        began = time.perf_counter()
        step.run(batch, RATES)
        runtime.stores.finish_weights()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            peak = torch.cuda.max_memory_allocated(device)
        times.append(time.perf_counter() - began)
    figures = {"first_step_s": times[0], "step_s": min(times[1:] or times)}
    planned = rank_memory(plan, runtime.coordinates.pp_rank)
    figures["planned_gib"] = planned.total / GIB
    if device.type == "cuda":
        reserved = torch.cuda.max_memory_reserved(device)
        figures |= {"peak_gib": peak / GIB, "reserved_gib": reserved / GIB, "peak/planned": peak / planned.total}
        hardware = hardware_of(torch.cuda.get_device_name(device))
        if hardware is not None:
            figures["planned_step_s"] = predict_step(plan, hardware).seconds
    return figures


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("world_size", type=int)
    parser.add_argument("rank", type=int, help="the global rank")
    parser.add_argument("--flags", required=True, help="of pretrain_gpt.py, in one word")
    parser.add_argument("--steps", type=int, default=4, metavar="N", help="default: 4")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args(argv)
    try:
        flags = [*shlex.split(arguments.flags), "--device", arguments.device]
        plan = resolve(load_config(flags).config, arguments.world_size)
        if not 0 <= arguments.rank < arguments.world_size:
            parser.error(f"rank {arguments.rank}: ranks are 0 to {arguments.world_size - 1}")
        set_for_libraries(PYTORCH_ALLOC_CONF="expandable_segments:True")  # as in a run
        device = torch.device("cuda", 0) if arguments.device == "cuda" else torch.device("cpu")
        torch.manual_seed(0)
        figures = measure(plan, arguments.rank, arguments.steps, device)
    except MegapipeError as error:
        print(f"one_rank: {error}", file=sys.stderr)
        return 2
    for name, value in figures.items():
        print(f"{name:16} {value:.4g}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"figures": figures}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
