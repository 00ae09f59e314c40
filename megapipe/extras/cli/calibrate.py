"""Measurements of a machine: `megapipe doctor` checks it or an allocation, `calibrate` measures rates for plans and the
best settings of a run, `profile-layers` the layers of a configuration.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from megapipe.assembly.datasets import planned, with_vocabulary
from megapipe.config.config import fields_by_key
from megapipe.config.flags import flag_words
from megapipe.config.layers import layer_kinds
from megapipe.config.load import DEFAULT, LoadedConfig, load_config
from megapipe.config.training import DEVICES
from megapipe.config.tuned import TUNABLE, Tuned, to_yaml
from megapipe.dtypes import TENSOR_DTYPES
from megapipe.environment import Environment
from megapipe.errors import ConfigError, MegapipeError
from megapipe.extras.cli.frame import HARDWARE_OPTIONS, command, hardware_given, option, switch, write_file
from megapipe.formatting import grid_text, ranges_text
from megapipe.plan.hardware import hardware_of
from megapipe.plan.layer_costs import LayerTimes, PartCost, setting_of, to_json
from megapipe.plan.resolve import resolve
from megapipe.plan.run_plan import RunPlan
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

    refuse_taken(own.output, own.force)
    loaded = load_config(own.flags)
    plan = planned(loaded, own.nproc_per_node, own.nproc_per_node)

    import torch

    from megapipe.train.gpu_setup import device_kind

    is_gpu = loaded.config.training.device != "cpu" and torch.cuda.is_available()
    decisions = tuple(choices(plan, loaded, is_gpu))
    if not decisions:
        raise ConfigError("nothing to tune: the run has neither tp nor pp, or its flags and files give every setting")
    load = os.getloadavg()[0]
    measure = measured_run(own.flags, own.nproc_per_node, own.steps)
    settings, figures = search(iter(decisions), measure)
    measured = {
        "command": shlex.join(["megapipe", *sys.argv[1:]]),
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "versions": {"torch": str(torch.__version__), "cuda": torch.version.cuda, "python": platform.python_version()},
        "load_before": round(load, 1),
        "steps": [{"settings": dict(each.settings), "step_seconds": list(each.step_seconds)} for each in figures],
    }
    kind = device_kind(torch.device("cuda" if is_gpu else "cpu"))
    write_file(own.output, to_yaml(Tuned(kind, settings, measured)), "--output")
    print("  median ms   fastest   slowest  settings")
    for each in figures:
        times = (each.median_seconds, min(each.step_seconds), max(each.step_seconds))
        numbers = "{:11.1f}{:10.1f}{:10.1f}".format(*(1000 * seconds for seconds in times))
        print(f"{numbers}  {' '.join(flags_of(each.settings)) or 'as given'}")
    print(f"fastest: {' '.join(flags_of(settings)) or 'as given'}\nwritten: {own.output}, for --tuned {own.output}")


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
        hardware = hardware_file.write(own.output, hardware_file.to_yaml(measured, machine, found.links), own.force)
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
    if config.model.mtp_num_layers is not None:
        rule = "multi-token prediction is balanced by its FLOPs, as its times cannot be measured apart yet"
        raise ConfigError(f"megapipe profile-layers with --mtp-num-layers: {rule}; leave --pipeline-layer-times out")

    import torch

    from megapipe.comm.bootstrap import join
    from megapipe.comm.groups import build_process_groups
    from megapipe.extras.calibrate.rates import one_pipeline_rank, profile_parts
    from megapipe.extras.cli.agreement import option_facts
    from megapipe.train.facts import facts_of

    world_size, local = environment.world_size, environment.local_world_size
    plan = resolve(one_pipeline_rank(config, world_size), world_size, local)
    world = join(plan.config, environment, lambda notes: {**option_facts(own), **facts_of(plan, environment, notes)})
    groups = build_process_groups(plan.topology, world.global_rank, world.backend, world.timeout_seconds)
    kinds = layer_kinds(config.model)
    alike = (resolve(one_pipeline_rank(config, world_size, layer), world_size, local) for layer in kinds)
    # embedding, one layer, and head, with layers of each kind
    costs = [profile_parts(each, groups, world.device, own.seconds) for each in alike]
    if environment.global_rank == 0:
        name = torch.cuda.get_device_name() if world.device.type == "cuda" else platform.machine()
        measured = {
            "device": f"{world.device}, {name}",
            "torch": torch.__version__,
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "command": shlex.join(["megapipe", *sys.argv[1:]]),
        }
        of_layer = {number: cost[1] for numbers, cost in zip(kinds.values(), costs, strict=True) for number in numbers}
        layers = tuple(of_layer[number] for number in range(len(of_layer) if len(kinds) > 1 else 1))
        embedding, _, head = costs[0]
        times = LayerTimes(setting_of(plan.config), embedding, layers, head, measured)
        write_file(own.output, to_json(times) + "\n", "--output")
        names = ["layer"] if len(kinds) == 1 else [f"layers {ranges_text(numbers)}" for numbers in kinds.values()]
        print(_text(embedding, dict(zip(names, (cost[1] for cost in costs), strict=True)), head))
        print(f"written: {own.output}, for --pipeline-layer-times {own.output}")


def _refuse_shared_gpus(environment: Environment) -> None:
    if environment.ranks_per_gpu > 1:
        ranks = environment.ranks_per_gpu
        raise ConfigError(f"--ranks-per-gpu {ranks}: times of ranks that share a GPU mean nothing; measure without it")


def _text(embedding: PartCost, layers: dict[str, PartCost], head: PartCost) -> str:
    """Return the table. layers: of each kind, by its name."""
    width = max(12, *(len(name) + 1 for name in layers))
    lines = ["milliseconds".ljust(width) + "     F      B      I      W  replay"]
    for name, part in {"embedding": embedding, **layers, "head": head}.items():
        lines.append(f"{name:<{width}}" + "".join(f"{1000 * value:7.2f}" for value in astuple(part)))
    layer = sum(part.forward + part.backward for part in layers.values()) / len(layers)
    ends = ((part.forward + part.backward) / layer for part in (head, embedding))
    return "\n".join([*lines, "the head weighs {:.2f} layers, the embedding {:.2f}".format(*ends)])


# --------------------------------------------------------------------------------------- settings of a run, for --tune

# Every candidate is a separate run under `megapipe launch`: NCCL and CUDA read some settings only when they start.
DEPTH, OVERLAP, CHUNKS, CARVEOUT, NCCL = TUNABLE
MARGIN = 0.02  # a candidate must be faster by more than this share
WARM_UP_STEPS = 2  # not counted: first touches, connections, algorithms
Settings = Mapping[str, Any]  # 'section.name' -> value
Measure = Callable[[Settings], list[float]]  # a run with these settings -> seconds of each counted step


@dataclass(frozen=True)
class Figure:
    """The measured steps of one candidate, over both of its runs."""

    settings: Settings
    step_seconds: tuple[float, ...]

    @property
    def median_seconds(self) -> float:
        return median(self.step_seconds)


def choices(plan: RunPlan, loaded: LoadedConfig, is_gpu: bool) -> Iterator[tuple[Settings, ...]]:
    """Yield the alternatives to the run's own settings, those of one decision at a time.

    What the user's flags and files give is not varied: it would win over the tuned value.
    """
    config, topology = plan.config, plan.topology
    free = {key for key in TUNABLE if loaded.origins[key] == DEFAULT or loaded.origins[key].startswith("tuned ")}
    positions = config.model.seq_length // topology.tp
    if topology.pp > 1 and DEPTH in free:
        yield tuple({DEPTH: depth} for depth in (1, 2, 3, 4))
    if topology.tp > 1 and {OVERLAP, CHUNKS} <= free and config.kernels.transformer_impl == "local":
        chunks = [{OVERLAP: True, CHUNKS: count} for count in (2, 4) if count <= positions]
        yield ({OVERLAP: False}, *chunks)
    if is_gpu and topology.pp > 1 and topology.cp == topology.ep == 1 and NCCL in free:  # a limit of the whole process
        yield tuple({NCCL: [f"NCCL_MAX_P2P_NCHANNELS={count}"]} for count in (2, 4, 8))
    if is_gpu and topology.tp > 1 and CARVEOUT in free:
        yield tuple({CARVEOUT: count} for count in (0, 8, 16, 24))


def search(decisions: Iterator[tuple[Settings, ...]], measure: Measure) -> tuple[Settings, list[Figure]]:
    """Take the decisions one after the other, each with the best of those before; return the settings and all figures.

    Candidates of a decision run in order and once more in reverse, so that a machine that slows down favours none. The
    run as it is comes first among them, and holds unless another is faster by MARGIN.
    """
    chosen: Settings = {}
    figures: list[Figure] = []
    for alternatives in decisions:
        candidates = [chosen, *({**chosen, **each} for each in alternatives)]
        seconds: list[list[float]] = [[] for _ in candidates]
        for index in (*range(len(candidates)), *reversed(range(len(candidates)))):
            seconds[index] += measure(candidates[index])
        found = [Figure(settings, tuple(each)) for settings, each in zip(candidates, seconds, strict=True)]
        figures += found
        best = min(found, key=lambda figure: figure.median_seconds)
        if best.median_seconds < found[0].median_seconds * (1.0 - MARGIN):
            chosen = best.settings
    return chosen, figures


def flags_of(settings: Settings) -> list[str]:
    """Return the flags that give a run these settings."""
    return [word for key, value in settings.items() for word in flag_words(fields_by_key()[key], value)]


def measured_run(flags: Sequence[str], num_ranks: int, num_steps: int) -> Measure:
    """Return the function that runs the configuration for WARM_UP_STEPS + num_steps steps and returns their seconds.

    Nothing is saved or loaded, and nothing evaluated. Raises MegapipeError with the run's output if it fails.
    """

    def measure(settings: Settings) -> list[float]:
        with tempfile.TemporaryDirectory() as folder:
            metrics = Path(folder) / "metrics.jsonl"
            own = f"--save none --load none --eval-iters 0 --log-interval 1 --exit-interval {WARM_UP_STEPS + num_steps}"
            launch = ["-m", "megapipe", "launch", "--nproc-per-node", str(num_ranks), "pretrain"]
            words = [*flags, *flags_of(settings), *own.split(), "--metrics-file", str(metrics)]
            done = subprocess.run([sys.executable, *launch, *words], capture_output=True, text=True)
            if done.returncode:
                shown = "\n".join((done.stdout + done.stderr).strip().splitlines()[-8:])
                raise MegapipeError(f"the run with {' '.join(flags_of(settings)) or 'no change'} failed:\n{shown}")
            lines = map(json.loads, metrics.read_text().splitlines())
            seconds = [line["step_seconds"] for line in lines if "step_seconds" in line]
        if len(seconds) < WARM_UP_STEPS + num_steps:
            wanted = WARM_UP_STEPS + num_steps
            raise ConfigError(
                f"the run ended after {len(seconds)} of {wanted} steps; give --train-iters {wanted} or more"
            )
        return seconds[WARM_UP_STEPS:]

    return measure
