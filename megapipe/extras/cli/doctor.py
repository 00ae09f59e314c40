"""`megapipe doctor`: check this machine, or a whole allocation."""

from __future__ import annotations

import argparse
import json

from megapipe.config.load import load_config
from megapipe.environment import Environment
from megapipe.extras.cli.frame import command, option
from megapipe.extras.cli.planning import HARDWARE_OPTIONS, hardware_given
from megapipe.plan.hardware import hardware_of
from megapipe.plan.world_rules import placement_of, topology_of

OPTIONS = (
    *HARDWARE_OPTIONS,
    option(
        "--slow-factor",
        "a device or link counts as slow from this factor (twice that where cores are shared)",
        default=2.0,
        above=1,
    ),
    option("--seconds", "for the repeats of one size of one group", default=0.1, above=0),
    option("--timeout-seconds", "after which a message that does not come is an error", default=60.0, above=0),
    option("--json", "one JSON object", action="store_true"),
)


@command("megapipe doctor", OPTIONS, on_ranks=True, takes_config=True, needs_words=False)
def main(own: argparse.Namespace, environment: Environment) -> int:
    """Check this machine, or a whole allocation, before a run.

      megapipe doctor
      megapipe launch --nproc-per-node 8 -m megapipe doctor --tensor-model-parallel-size 4 \\
          --pipeline-model-parallel-size 2
      srun ... python -m megapipe doctor --config configs/gpt3_175b.yaml

    One process: versions, fast paths installed and active, cores, memory, limits, network interfaces, RDMA devices,
    GPUDirect RDMA.

    Several ranks, with the parallel flags or --config of the run: a host's report, in what hosts differ, clocks, and a
    measurement of every group of this layout: tp all-reduce, pp messages along each boundary each way, dp
    reduce-scatter and all-gather, messages between hosts. Groups are compared with their like, and with the hardware
    table where the GPU is in it or is named. Links of a slow group are measured one by one, each way; the slow one is
    named. What is slow is measured twice before it is said.

    Exit code: 0 fine, 1 something is slow or wrong, 2 the flags are.
    """
    hardware = hardware_given(own)
    config = load_config(own.flags, is_job=False).config
    placement = placement_of(config)
    topology = topology_of(config, environment.world_size, environment.local_world_size, replicas=1)

    import torch  # report errors in the flags before this import, which takes a second

    from megapipe.comm.bootstrap import start
    from megapipe.comm.collectives import barrier
    from megapipe.comm.groups import build_process_groups
    from megapipe.extras.doctor.examination import Request, examine_allocation
    from megapipe.extras.doctor.host import examine_host
    from megapipe.extras.doctor.report import allocation_json, allocation_text, single_json, single_text

    world = start(environment, config.parallel.distributed_backend, own.timeout_seconds, config.training.device)
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
        t = topology
        layout = f"{t.world_size} ranks, tp {t.tp} x cp {t.cp} x pp {t.pp} x dp {t.dp},"
        text = json.dumps(allocation_json(found, hardware)) if own.json else allocation_text(found, hardware, layout)
        print(text, flush=True)
    barrier(groups.world)  # when a rank exits with a code other than 0, the launcher terminates the others
    return 0 if found.is_fine else 1
