"""`megapipe doctor`: check this machine, or a whole allocation, before a run."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from megapipe.config.load import load_config
from megapipe.config.parallel import ParallelConfig
from megapipe.environment import Environment
from megapipe.errors import ConfigError
from megapipe.extras.cli.saved_model import run_on_all_ranks
from megapipe.plan.hardware import hardware_named, hardware_of, read_hardware
from megapipe.plan.schedule_choice import schedule_and_chunks
from megapipe.schedule.families import SCHEDULES
from megapipe.schedule.placement import Placement
from megapipe.topology import Topology

HELP = """\
usage: megapipe doctor [--gpu NAME | --hardware FILE] [--slow-factor X] [--seconds S] [--timeout-seconds S] [--json]
                       [flags of pretrain_gpt.py]

  megapipe doctor
  megapipe launch --nproc-per-node 8 -m megapipe doctor --tensor-model-parallel-size 4 --pipeline-model-parallel-size 2
  srun ... python -m megapipe doctor --config configs/gpt3_175b.yaml

One process: versions, fast paths installed and active, cores, memory, limits, network interfaces, RDMA devices,
GPUDirect RDMA.

Several ranks, with the parallel flags or --config of the run: a host's report, in what hosts differ, clocks, and a
measurement of every group of this layout: tp all-reduce, pp messages along each boundary each way, dp reduce-scatter
and all-gather, messages between hosts. Groups are compared with their like, and with the hardware table where the GPU
is in it or is named. Links of a slow group are measured one by one, each way; the slow one is named. What is slow is
measured twice before it is said.

  --gpu NAME, --hardware FILE   what the links should reach (docs/planner.md)
  --slow-factor X               as many times slower than that is slow (default 2; twice that where cores are shared)
  --seconds S                   for the repeats of one size of one group (default 0.1)
  --timeout-seconds S           after which a message that does not come is an error (default 60)
  --json                        one JSON object

Exit code: 0 fine, 1 something is slow or wrong, 2 the flags are.
"""


def main(arguments: Sequence[str]) -> int:
    """Examine this rank and return the exit code."""
    if any(word in ("-h", "--help") for word in arguments):
        print(HELP, end="")
        return 0
    return run_on_all_ranks("megapipe doctor", lambda environment: _examine(arguments, environment))


def _examine(arguments: Sequence[str], environment: Environment) -> int:
    own, rest = _own_flags(arguments)
    loaded = load_config(rest, is_job=False)
    parallel = loaded.config.parallel
    hardware = hardware_named(own.gpu) if own.gpu else read_hardware(own.hardware) if own.hardware else None
    topology, placement = layout_of(parallel, loaded.config.model.num_layers, environment)

    import torch  # report errors in the flags before this import, which takes a second

    from megapipe.comm.bootstrap import start
    from megapipe.comm.collectives import barrier
    from megapipe.comm.groups import build_process_groups
    from megapipe.extras.doctor.examination import Request, examine_allocation
    from megapipe.extras.doctor.host import examine_host
    from megapipe.extras.doctor.report import allocation_json, allocation_text, single_json, single_text

    world = start(environment, parallel.distributed_backend, own.timeout_seconds, loaded.config.training.device)
    if hardware is None and world.device.type == "cuda":
        hardware = hardware_of(torch.cuda.get_device_name(world.device))
    if not environment.is_distributed:
        report = examine_host(environment, world.device)
        answer = single_json(report)
        print(json.dumps(answer) if own.json else single_text(report))
        return 0 if answer["fine"] else 1
    groups = build_process_groups(topology, world.global_rank, world.backend, own.timeout_seconds)
    request = Request(topology, placement, hardware, own.slow_factor, own.seconds)
    found = examine_allocation(request, groups, environment, world.device)
    if environment.global_rank == 0:
        layout = (
            f"{topology.world_size} ranks, tp {topology.tp} x cp {topology.cp} x pp {topology.pp} x dp {topology.dp},"
        )
        print(
            json.dumps(allocation_json(found, hardware)) if own.json else allocation_text(found, hardware, layout),
            flush=True,
        )
    barrier(groups.world)  # when a rank exits with a code other than 0, the launcher terminates the others
    return 0 if found.is_fine else 1


def layout_of(parallel: ParallelConfig, num_layers: int, environment: Environment) -> tuple[Topology, Placement]:
    """Return the grid of these ranks and the placement of the pipeline's stages. Raises ConfigError."""
    name, chunks = schedule_and_chunks(parallel, num_layers)
    placement = SCHEDULES[name].place(parallel.pipeline_model_parallel_size, chunks)
    topology = Topology.of_world(
        environment.world_size,
        tp=parallel.tensor_model_parallel_size,
        cp=parallel.context_parallel_size,
        pp=parallel.pipeline_model_parallel_size,
        order=parallel.rank_order,
        ranks_per_node=environment.local_world_size,
        allow_tp_across_nodes=parallel.allow_tp_across_nodes,
        mirrored_pipeline=placement.second_direction is not None,
    )
    return topology, placement


def _own_flags(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(prog="megapipe doctor", add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--gpu")
    parser.add_argument("--hardware", type=Path)
    parser.add_argument("--slow-factor", type=float, default=2.0)
    parser.add_argument("--seconds", type=float, default=0.1)
    parser.add_argument("--timeout-seconds", type=float, default=60.0)
    parser.add_argument("--json", action="store_true")
    try:
        own, rest = parser.parse_known_args(list(arguments))
    except argparse.ArgumentError as error:
        raise ConfigError(f"megapipe doctor: {error}") from None
    if own.gpu and own.hardware:
        raise ConfigError("--gpu and --hardware both give the accelerator; give one of the two")
    if own.slow_factor <= 1:
        raise ConfigError(
            f"--slow-factor {own.slow_factor:g} must be above 1: it is the factor from which a device or link "
            "counts as slow"
        )
    for flag, value in (("--seconds", own.seconds), ("--timeout-seconds", own.timeout_seconds)):
        if value <= 0:
            raise ConfigError(f"{flag} {value:g} must be above 0")
    return own, rest
