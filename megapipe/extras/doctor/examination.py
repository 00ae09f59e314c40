"""The examination of a running allocation: its hosts, its clocks, every group of the layout, and the conclusions."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from megapipe.comm.collectives import broadcast_object, gather_objects
from megapipe.comm.groups import ProcessGroups
from megapipe.comm.timing import round_trips
from megapipe.environment import Environment
from megapipe.extras.doctor.host import HostReport, examine_host
from megapipe.extras.doctor.trials import (
    Judged,
    Rules,
    Trial,
    judge,
    measure_rounds,
    pairs_of,
    rounds_of,
    slow,
    trials_of,
)
from megapipe.monitor.process import host
from megapipe.plan.hardware import Hardware
from megapipe.profile.clock import RoundTrip, reading
from megapipe.schedule.placement import Placement
from megapipe.topology import Topology

MIB = 1 << 20
MIN_SHARED_MEMORY = 64 * MIB
MIN_OPEN_FILES = 4096
MAX_SKEW_SECONDS = 1.0
# hosts that differ in one of these break a run or change its results; other differences are only noted
MUST_AGREE = ("megapipe", "python", "torch", "numpy", "cuda", "nccl", "cudnn")
NOISE_SECONDS = {"cpu": 0.5e-3, "cuda": 50e-6}
MAX_ALONE = 32  # trials that run one at a time where cores are shared
MAX_SUSPECTS = 2  # groups of a kind whose links are measured one by one
CLOCK_TRIPS = 5


@dataclass(frozen=True)
class Remark:
    """One finding about hosts."""

    is_wrong: bool  # an error, which the exit code reports; else a note
    kind: str  # a key for programs
    text: str
    hosts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Request:
    """The layout to examine, and the limits."""

    topology: Topology
    placement: Placement
    hardware: Hardware | None  # expected rates; None compares trials with their peers only
    factor: float  # as in Rules
    budget_seconds: float  # for the repeats of one size of one trial


@dataclass(frozen=True)
class Examination:
    """The result; the same on all ranks."""

    reports: tuple[HostReport, ...]
    hosts: tuple[str, ...]  # name by global rank
    skews: Mapping[str, tuple[float, float]]  # host -> (seconds ahead of rank 0's host, error)
    judged: tuple[Judged, ...]  # every trial at two sizes
    slow: tuple[Judged, ...]  # trials that were slow twice; among them the links of slow groups
    remarks: tuple[Remark, ...]
    seconds: float

    @property
    def is_fine(self) -> bool:
        """True if no trial is slow and no remark is an error."""
        return not self.slow and not any(remark.is_wrong for remark in self.remarks)


def examine_allocation(
    request: Request, groups: ProcessGroups, environment: Environment, device: torch.device
) -> Examination:
    """Examine all hosts and groups; called by all ranks. Raises CommunicationError."""
    began = time.perf_counter()
    world = groups.world
    hosts = named_hosts(gather_objects((environment.node_rank, host()), world))
    is_first = hosts.index(hosts[world.global_rank]) == world.global_rank
    found = gather_objects(examine_host(environment, device) if is_first else None, world)
    reports = tuple(report for report in found if report is not None)
    skews: dict[str, tuple[float, float]] = {}
    for name in dict.fromkeys(hosts):
        if name != hosts[0]:
            trips = round_trips(world, 0, hosts.index(name), CLOCK_TRIPS, device, now=time.time_ns)
            if trips:
                read = reading([RoundTrip(*trip) for trip in trips])
                skews[name] = (read.offset_ns / 1e9, read.error_ns / 1e9)
    skews = broadcast_object(skews, world)
    is_noisy = device.type == "cpu" and any(report.is_busy for report in reports)
    rules = Rules(hosts, request.factor, NOISE_SECONDS[device.type], is_noisy, request.hardware)
    judged, slow_ones = _measured(request, groups, device, rules)
    remarks = (*host_remarks(reports), *clock_remarks(skews, reports[0].name))
    return Examination(reports, hosts, skews, judged, slow_ones, remarks, time.perf_counter() - began)


def named_hosts(found: Sequence[tuple[int, str]]) -> tuple[str, ...]:
    """Return the host of each rank from (node_rank, host name); nodes with equal names get their number appended."""
    nodes = {name: {node for node, other in found if other == name} for _, name in found}
    return tuple(name if len(nodes[name]) == 1 else f"{name}#{node}" for node, name in found)


def _measured(
    request: Request, groups: ProcessGroups, device: torch.device, rules: Rules
) -> tuple[tuple[Judged, ...], tuple[Judged, ...]]:
    """Return all trials judged, and those that are slow. What is slow is measured a second time, alone."""
    trials = trials_of(request.topology, request.placement, rules.hosts)
    alone = rules.is_noisy and len(trials) <= MAX_ALONE
    samples = measure_rounds(rounds_of(trials, alone), groups, device, request.budget_seconds)
    # the links of the slowest groups of each kind and, to compare with, of a good group of that kind
    judged = judge(samples, rules)
    slow_trials = [one.trial for one in slow(judged)]
    suspects: list[Trial] = []
    for kind in dict.fromkeys(trial.kind for trial in slow_trials if not trial.is_message):
        good = [one.trial for one in judged if one.trial.kind == kind and one.trial not in slow_trials]
        suspects += [trial for trial in slow_trials if trial.kind == kind][:MAX_SUSPECTS] + good[:1]
    links = list({pair.ranks: pair for group in suspects for pair in pairs_of(group)}.values())
    samples += measure_rounds(rounds_of(links, alone), groups, device, request.budget_seconds)
    judged = judge(samples, rules)
    slow_trials = [one.trial for one in slow(judged)]
    again = rounds_of(slow_trials, alone=len(slow_trials) <= MAX_ALONE)
    others = [sample for sample in samples if sample.trial not in slow_trials]
    confirmed = judge([*others, *measure_rounds(again, groups, device, request.budget_seconds)], rules)
    return tuple(judged), tuple(one for one in slow(confirmed) if one.trial in slow_trials)


def host_remarks(reports: Sequence[HostReport]) -> list[Remark]:
    """Return all remarks, those about single hosts first. What holds for several hosts is one remark."""
    found: dict[tuple[bool, str, str], list[str]] = {}
    for report in reports:
        for finding in _findings(report):
            found.setdefault(finding, []).append(report.name)
    about_hosts = [Remark(is_wrong, kind, text, tuple(names)) for (is_wrong, kind, text), names in found.items()]
    return [*about_hosts, *_differences(reports)]


def _findings(report: HostReport) -> Iterator[tuple[bool, str, str]]:
    """Yield (is_wrong, kind, text): what breaks a run on a host, slows it down, or makes measurements unreliable."""
    has, ranks, threads = report.resources, report.num_ranks, report.threads_of_a_rank
    cores = has.usable_cores
    if report.has_nvidia_driver and not report.gpus and not report.versions.get("cuda"):
        way = "install a CUDA build, or the ranks stay on the CPU"
        yield True, "torch without CUDA", f"an NVIDIA driver is loaded, but this torch is built without CUDA: {way}"
    # with a single one each rank may see its own (srun --gpus-per-task=1); sharing it is refused when ranks meet
    if 1 < len(report.gpus) < ranks:
        yield True, "ranks without a GPU", f"{ranks} ranks and {len(report.gpus)} GPUs: start at most one rank a GPU"
    if not report.gpus and threads > 1 and ranks * threads > cores:
        way = f"set OMP_NUM_THREADS={max(1, int(cores // ranks))}"
        yield False, "threads", f"{ranks} ranks of {threads} threads on {cores:g} cores: {way}"
    unreliable = "small differences of measured times mean nothing"
    if report.is_oversubscribed:
        yield False, "oversubscribed", f"{ranks} ranks on {cores:g} cores take turns; {unreliable}"
    elif report.is_busy:
        yield False, "busy", f"load {report.load:.1f} on {cores:g} cores: other programs run here too; {unreliable}"
    if has.shared_memory_bytes is not None and has.shared_memory_bytes < MIN_SHARED_MEMORY:
        need = "heartbeats and NCCL's transport within a host need it (docker run --shm-size 1g)"
        yield False, "shared memory", f"/dev/shm holds {has.shared_memory_bytes / MIB:.0f} MiB: {need}"
    if has.open_files is not None and has.open_files < MIN_OPEN_FILES:
        need = f"a rank has one for each peer: ulimit -n {has.most_open_files or 65536}"
        yield False, "open files", f"a process may have {has.open_files} files open, and {need}"
    if report.gpus and report.rdma_ports and not report.gpu_direct.seen:
        effect = "so messages of GPUs to other hosts go through host memory"
        yield False, "GPUDirect", f"GPUDirect RDMA not found, {effect}: {report.gpu_direct.reason}"
    down = [f"{port.device}/{port.number}" for port in report.rdma_ports if "ACTIVE" not in port.state]
    if down:
        yield False, "RDMA ports", f"RDMA ports that are not active: {', '.join(down)}"
    inactive = [f"{name} {state}" for name, state in report.fast_paths.items() if state.startswith("not active")]
    if report.gpus and inactive:
        yield False, "slow kernels", "; ".join(inactive)


def clock_remarks(skews: Mapping[str, tuple[float, float]], first: str) -> list[Remark]:
    """Return a remark for each clock that is off. skews: host -> (seconds ahead of the first host, error)."""
    off = "the clock of {} is {:+.3f} s off that of {} (+- {:.3f} s)"
    return [
        Remark(True, "clock", off.format(name, seconds, first, error), (name,))
        for name, (seconds, error) in skews.items()
        if abs(seconds) - error > MAX_SKEW_SECONDS
    ]


def _differences(reports: Sequence[HostReport]) -> list[Remark]:
    """Return a remark for each property in which hosts differ."""
    settings = dict.fromkeys(name for report in reports for name in report.settings)
    versions = dict.fromkeys(name for report in reports for name in report.versions)
    tables: list[dict[str, str]] = []  # of each host: property -> value
    for report in reports:
        gpus = ", ".join(sorted({gpu.name for gpu in report.gpus})) or "none"
        table = {"GPUs": gpus, "CPU": f"{report.resources.cpu}, {report.resources.cores} cores"}
        table |= {f"setting {name}": report.settings.get(name, "not set") for name in settings}
        tables.append(table | {name: report.versions.get(name) or "none" for name in versions})
    found = []
    names = tuple(report.name for report in reports)
    for what in tables[0]:
        hosts_with: dict[str, list[str]] = {}
        for name, table in zip(names, tables, strict=True):
            hosts_with.setdefault(table[what], []).append(name)
        if len(hosts_with) > 1:
            parts = []
            for value, hosts in hosts_with.items():
                listed = hosts if len(hosts) <= 4 else [*hosts[:3], f"... ({len(hosts)} in all)"]
                parts.append(f"{value} on {', '.join(listed)}")
            text = f"hosts differ in {what}: {'; '.join(parts)}"
            found.append(Remark(what in MUST_AGREE, "difference", text, names))
    return found
