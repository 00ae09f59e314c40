"""Measurements of a machine: `megapipe doctor` checks it or an allocation, `calibrate` measures rates for plans and the
best settings of a run, `profile-layers` the layers of a configuration.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from megapipe.assembly.datasets import with_vocabulary
from megapipe.config.load import load_config
from megapipe.config.training import DEVICES
from megapipe.config.tuned import to_yaml
from megapipe.dtypes import TENSOR_DTYPES
from megapipe.environment import Environment
from megapipe.errors import ConfigError
from megapipe.extras.calibrate.hardware_reader import read_hardware
from megapipe.extras.cli.frame import HARDWARE_OPTIONS, command, hardware_given, option, switch, write_file
from megapipe.formatting import grid_text
from megapipe.plan.hardware import hardware_of
from megapipe.plan.layer_costs import to_json
from megapipe.plan.world_rules import placement_of, topology_of

CALIBRATE_OPTIONS = (
    option("--output", "never overwritten without --force", type=Path, default="hardware.yaml", metavar="FILE.yaml"),
    switch("--force", "overwrite the file"),
    option("--seconds", "that it may take, about; with fewer, smaller sizes are measured", default=30.0, above=0),
    option("--dtype", "of GEMMs by size, attention, memory (default: bf16 on GPU, fp32 on CPU)", choices=TENSOR_DTYPES),
    option("--name", "of the hardware in the file (default: the device's)"),
    option("--device", "default: cuda if there is a GPU", choices=DEVICES, default="auto"),
    option("--timeout-seconds", "after which a message that does not come is an error", default=60.0, above=0),
    switch("--json", "the figures as one JSON object instead of the table"),
)
PROFILE_OPTIONS = (
    option("--output", "the file to write", type=Path, required=True, metavar="FILE.json"),
    option("--seconds", "for each of some ten figures", default=1.0, above=0),
)

TUNE_OPTIONS = (
    switch("--tune", "measure settings of a run instead of the machine"),
    option("--nproc-per-node", "ranks of the measured runs, on this machine", type=int, required=True, above=0),
    option("--output", "never overwritten without --force", type=Path, default="tuned.yaml", metavar="FILE.yaml"),
    switch("--force", "overwrite the file"),
    option("--steps", "counted in each run, after two to warm up; every candidate runs twice", default=8, above=0),
)
DOCTOR_OPTIONS = (
    *HARDWARE_OPTIONS,
    option(
        "--slow-factor",
        "a device or link counts as slow from this factor (twice that where cores are shared)",
        default=2.0,
        above=1,
    ),
    option("--seconds", "for the repeats of one size of one group", default=0.1, above=0),
    option("--timeout-seconds", "after which a message that does not come is an error", default=60.0, above=0),
    switch("--json", "one JSON object"),
)


@command("megapipe doctor", DOCTOR_OPTIONS, on_ranks=True, takes_config=True, needs_words=False)
def doctor(own: argparse.Namespace, environment: Environment) -> int:
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
    from megapipe.extras.cli.agreement import option_facts
    from megapipe.extras.doctor.examination import Request, examine_allocation
    from megapipe.extras.doctor.host import examine_host
    from megapipe.extras.doctor.report import allocation_json, allocation_text, single_json, single_text
    from megapipe.train.facts import config_facts, process_facts

    backend, device = config.parallel.distributed_backend, config.training.device
    processes = process_facts(environment, backend, device)
    # not the versions: the examination reports in which ones hosts differ
    facts = {**option_facts(own), **config_facts(config, {}), **processes} if environment.is_distributed else {}
    world = start(environment, backend, own.timeout_seconds, device, facts_of=lambda _: facts)
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
        layout = f"{t.world_size} ranks, {grid_text(t.tp, t.pp, t.dp, t.cp)},"
        text = json.dumps(allocation_json(found, hardware)) if own.json else allocation_text(found, hardware, layout)
        print(text, flush=True)
    barrier(groups.world)  # when a rank exits with a code other than 0, the launcher terminates the others
    return 0 if found.is_fine else 1


def calibrate(arguments: Sequence[str]) -> int:
    """Run `megapipe calibrate`, or with --tune its measurement of settings, and return the exit code."""
    return (_tune if "--tune" in arguments else calibrate_machine)(arguments)


@command("megapipe calibrate --tune", TUNE_OPTIONS, takes_config=True, interrupted="interrupted; no file was written")
def _tune(own: argparse.Namespace) -> None:
    """Measure which settings make a configuration fastest on this machine, and write them to a file.

      megapipe calibrate --tune --nproc-per-node 8 --output tuned.yaml --config run.yaml
      megapipe launch --nproc-per-node 8 pretrain --config run.yaml --tuned tuned.yaml

    Short runs of the configuration with one setting changed at a time: with a pipeline the receive depth, with tensor
    parallelism the overlap of its collectives and their chunks, on GPUs also NCCL's channels of messages and the SMs
    that GEMMs leave free. A setting is changed only if that is more than 2 % faster. What flags and files give is not
    varied. The machine should do nothing else.
    """
    from megapipe.extras.calibrate.hardware_file import refuse_taken
    from megapipe.extras.calibrate.tune import figures_text, tune

    refuse_taken(own.output, own.force)
    tuned, figures = tune(own.flags, own.nproc_per_node, own.steps)
    write_file(own.output, to_yaml(tuned), "--output")
    print(f"{figures_text(figures, tuned.settings)}\nwritten: {own.output}, for --tuned {own.output}")


@command(
    "megapipe calibrate",
    CALIBRATE_OPTIONS,
    on_ranks=True,
    needs_words=False,
    interrupted="interrupted; no file was written",
)
def calibrate_machine(own: argparse.Namespace, environment: Environment) -> None:
    """Measure this machine and write a hardware file for `megapipe plan`.

      megapipe calibrate --output here.yaml
      megapipe launch --nproc-per-node 2 -m megapipe calibrate --output here.yaml       (links between ranks, too)
      megapipe plan --gpus 2 --hardware here.yaml --config run.yaml

    GEMMs in every precision and by size, fused attention, memory; on several ranks all-reduce and messages inside a
    node, and between nodes where there are several. Ranks measure at the same time, and the slowest counts. The file
    says what was not measured. Measure on a machine that does nothing else. On CPUs a rank has OMP_NUM_THREADS threads,
    as in training, and one where that is not set.

      megapipe calibrate --tune --nproc-per-node 2 --config run.yaml                (its own options: add --help)

    measures instead which settings make a configuration fastest, for --tuned FILE.
    """
    from megapipe.extras.calibrate import hardware_file
    from megapipe.extras.calibrate.rates import measure
    from megapipe.extras.cli.agreement import command_facts

    _refuse_shared_gpus(environment)
    is_first = environment.global_rank == 0
    if is_first:
        hardware_file.refuse_taken(own.output, own.force)
    facts = command_facts(own, environment, "auto", own.device)
    found = measure(environment, own.device, own.dtype, own.seconds, own.timeout_seconds, facts)
    if is_first:
        machine = hardware_file.machine_of(found, environment)
        measured = hardware_file.hardware_measured(own.name, machine, found.rates, found.links)
        hardware_file.refuse_taken(own.output, own.force)  # another process may have written it meanwhile
        write_file(own.output, hardware_file.to_yaml(measured, machine, found.links), "--output")
        hardware = read_hardware(own.output)
        if own.json:
            print(json.dumps(hardware_file.as_data(hardware, machine, found)))
        else:
            print(hardware_file.as_text(hardware, machine, found.links))
            print(f"written: {own.output}, for megapipe plan --hardware {own.output}")


@command("megapipe profile-layers", PROFILE_OPTIONS, on_ranks=True, takes_config=True)
def profile_layers(own: argparse.Namespace, environment: Environment) -> None:
    """Measure embedding, layers and head of a configuration, to balance pipeline stages.

      megapipe profile-layers --output times.json --config run.yaml
      megapipe launch --nproc-per-node 2 -m megapipe profile-layers --output times.json --config run.yaml
                                                                                (tp 2: on as many ranks as tp)

    Forward, backward and its two halves of the embedding, a layer, and final norm, head and loss, at the run's shapes
    on this rank's device; the slowest rank counts. The run then takes the file with --pipeline-layer-times FILE.
    """
    _refuse_shared_gpus(environment)
    config = with_vocabulary(load_config(["--plan", *own.flags], is_job=False).config)

    from megapipe.extras.calibrate.layer_times import measure_layers, times_text
    from megapipe.extras.cli.agreement import option_facts

    times = measure_layers(config, environment, option_facts(own), own.seconds)
    if times is not None:
        write_file(own.output, to_json(times) + "\n", "--output")
        print(f"{times_text(config, times)}\nwritten: {own.output}, for --pipeline-layer-times {own.output}")


def _refuse_shared_gpus(environment: Environment) -> None:
    if environment.ranks_per_gpu > 1:
        ranks = environment.ranks_per_gpu
        raise ConfigError(f"--ranks-per-gpu {ranks}: times of ranks that share a GPU mean nothing; measure without it")
