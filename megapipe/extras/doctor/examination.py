"""The examination of a running allocation: its hosts, its clocks, every group of the layout, and the conclusions.

Trials are the collectives of every group of every axis, and messages across every pipeline boundary, each way. They are
compared with their peers and with what the hardware table expects. Peers are trials of one operation over as many
ranks, all within a host or all between hosts; all messages are peers. The reference is the lower median of their times,
so that of two peers, or where half of them are slow, the better ones count. That a group is slow does not say where;
its links, measured one by one and each way, do.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median, median_low

import torch

from megapipe.comm.collectives import barrier, broadcast_object, gather_objects
from megapipe.comm.groups import Group, ProcessGroups
from megapipe.comm.round_trips import round_trips
from megapipe.environment import Environment
from megapipe.extras.doctor.host import HostReport, examine_host
from megapipe.extras.doctor.timing import time_collective, time_messages
from megapipe.layers.table import ring_bytes
from megapipe.monitor.process import host
from megapipe.plan.hardware import Hardware
from megapipe.profile.profile import RoundTrip, reading
from megapipe.schedule.placement import Placement
from megapipe.topology import Topology

# -------------------------------------------------------------------------------------------------------------- trials

SEND = "send"
# kind -> (groups of the topology, operation)
COLLECTIVES: dict[str, tuple[str, str]] = {
    "tp all_reduce": ("tp", "all_reduce"),
    "cp all_gather": ("cp", "all_gather"),
    "dp reduce_scatter": ("replicas", "reduce_scatter"),
    "dp all_gather": ("replicas", "all_gather"),
}
RING_PASSES = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1}
FORWARD, BACKWARD, HOSTS, PAIR = "pp forward", "pp backward", "between hosts", "pair"
# bytes: a size whose time is all latency, then buffers; rates are those of the largest
SIZES: dict[str, tuple[int, ...]] = {"cpu": (8, 1 << 18, 1 << 22), "cuda": (8, 1 << 20, 1 << 26)}
LATENCY_FACTOR = 3  # applied to the slow factor at the smallest size: small messages vary more
NOISY_FACTOR = 2
PEERS, TABLE = "its peers", "what the hardware table expects"


@dataclass(frozen=True)
class Trial:
    """One operation to measure on one group or between two ranks."""

    kind: str  # of COLLECTIVES, or FORWARD, BACKWARD, HOSTS, PAIR
    group: str  # field of ProcessGroups whose communicator is used
    operation: str
    ranks: tuple[int, ...]  # global, of the group; of a message (source, target)

    @property
    def is_message(self) -> bool:
        return self.operation == SEND

    def crosses_hosts(self, hosts: Sequence[str]) -> bool:
        """Return True if its ranks are on several hosts. hosts: by global rank."""
        return len({hosts[rank] for rank in self.ranks}) > 1

    def sent_bytes(self, num_bytes: int) -> float:
        """Return the bytes that each rank sends for a buffer of num_bytes."""
        if self.is_message:
            return num_bytes
        return RING_PASSES[self.operation] * ring_bytes(num_bytes, len(self.ranks))


@dataclass(frozen=True)
class Sample:
    """The times of one trial: bytes -> seconds of each repeat."""

    trial: Trial
    times: Mapping[int, Sequence[float]]


def trials_of(topology: Topology, placement: Placement, hosts: Sequence[str]) -> list[Trial]:
    """Return all trials of a layout. hosts: by global rank, as found, which may differ from the plan."""
    found = [
        Trial(kind, name, operation, ranks)
        for kind, (name, operation) in COLLECTIVES.items()
        for ranks in topology.groups(name)
        if len(ranks) > 1
    ]
    hops = dict.fromkeys(hop for ranks in placement.directions for hop in pairwise(ranks) if hop[0] != hop[1])
    pipelines = list(topology.groups("pp"))
    found += [Trial(FORWARD, "pp", SEND, (ranks[a], ranks[b])) for ranks in pipelines for a, b in hops]
    found += [Trial(BACKWARD, "pp", SEND, (ranks[b], ranks[a])) for ranks in pipelines for a, b in hops]
    first_ranks = sorted({host: rank for rank, host in reversed(list(enumerate(hosts)))}.values())
    return found + [Trial(HOSTS, "world", SEND, pair) for pair in ring_pairs(first_ranks)]


def ring_pairs(ranks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the neighbours on a ring, each way; nothing for one rank."""
    pairs = list(pairwise(ranks))
    if len(ranks) > 2:
        pairs.append((ranks[-1], ranks[0]))
    for a, b in pairs:
        yield a, b
        yield b, a


def rounds_of(trials: Sequence[Trial], alone: bool) -> list[tuple[Trial, ...]]:
    """Group trials of one kind into rounds in which no rank takes part twice; those of a round run concurrently.

    alone: put each trial into a separate round.
    """
    if alone:
        return [(trial,) for trial in trials]
    rounds: list[tuple[str, set[int], list[Trial]]] = []
    for trial in trials:
        fitting = (r for r in rounds if r[0] == trial.kind and not r[1].intersection(trial.ranks))
        chosen = next(fitting, None)
        if chosen is None:
            rounds.append(chosen := (trial.kind, set(), []))
        chosen[1].update(trial.ranks)
        chosen[2].append(trial)
    return [tuple(trials) for _, _, trials in rounds]


def measure_rounds(
    rounds: Sequence[Sequence[Trial]], groups: ProcessGroups, device: torch.device, budget_seconds: float
) -> list[Sample]:
    """Return the samples of all trials on every rank, in the order of the rounds. Called by all ranks.

    budget_seconds: for the repeats of one size of one trial. Raises CommunicationError.
    """
    world, sizes, mine = groups.world, SIZES[device.type], []
    for trials in rounds:
        barrier(world)
        trial = next((trial for trial in trials if world.global_rank in trial.ranks), None)
        if trial is None:
            continue
        group: Group = getattr(groups, trial.group)
        if trial.is_message:
            source, target = (group.ranks.index(rank) for rank in trial.ranks)
            times = time_messages(group, source, target, sizes, budget_seconds, device)
        else:
            times = time_collective(trial.operation, group, sizes, budget_seconds, device)
        if times and (trial.is_message or group.rank == 0):  # one rank reports
            mine.append(Sample(trial, times))
    by_trial = {sample.trial: sample for some in gather_objects(mine, world) for sample in some}
    return [by_trial[trial] for trials in rounds for trial in trials]


@dataclass(frozen=True)
class Rules:
    """When a trial counts as slow.

    is_noisy: cores are shared, so only the best repeat shows the link's speed, and small messages show nothing.
    """

    hosts: tuple[str, ...]  # by global rank
    factor: float  # slow is more than this many times the reference or the expected time
    noise_seconds: float  # that a time may be off by chance
    is_noisy: bool = False
    hardware: Hardware | None = None  # None if the expected rates are unknown

    def seconds(self, sample: Sample, num_bytes: int) -> float:
        """Return the time of a trial at one size over its repeats."""
        return min(sample.times[num_bytes]) if self.is_noisy else median(sample.times[num_bytes])

    def expected_seconds(self, trial: Trial, num_bytes: int) -> float | None:
        """Return the time by the hardware table, None without one."""
        if self.hardware is None:
            return None
        link = self.hardware.network if trial.crosses_hosts(self.hosts) else self.hardware.node
        # a message is answered by a receipt; a ring makes a step for each other rank
        steps = 2 if trial.is_message else RING_PASSES[trial.operation] * (len(trial.ranks) - 1)
        return steps * link.latency_seconds + trial.sent_bytes(num_bytes) / link.bytes_per_second


@dataclass(frozen=True)
class Judged:
    """One trial at one size, compared."""

    sample: Sample
    num_bytes: int
    seconds: float
    reference_seconds: float | None  # of its peers; None if it has none
    expected_seconds: float | None
    num_peers: int  # including itself
    against: str = ""  # what it is slow against; "" if it is not slow

    @property
    def trial(self) -> Trial:
        return self.sample.trial

    @property
    def times_slower(self) -> float:
        """The time relative to the smaller of the reference and the expected time."""
        known = [seconds for seconds in (self.reference_seconds, self.expected_seconds) if seconds]
        return self.seconds / min(known) if known else 1.0

    @property
    def bytes_per_second(self) -> float:
        """The rate at which each rank sends."""
        return self.trial.sent_bytes(self.num_bytes) / self.seconds


def judge(samples: Sequence[Sample], rules: Rules) -> list[Judged]:
    """Compare every sample at its smallest size and at the largest that all its peers have, in the order given."""
    peers_of: dict[tuple[object, ...], list[Sample]] = {}
    for sample in samples:
        trial = sample.trial
        key = (trial.operation, len(trial.ranks), trial.crosses_hosts(rules.hosts))
        peers_of.setdefault(key, []).append(sample)
    found: dict[Trial, list[Judged]] = {}
    for peers in peers_of.values():
        for num_bytes in sorted({min(peers[0].times), min(max(sample.times) for sample in peers)}):
            times = [rules.seconds(sample, num_bytes) for sample in peers]
            reference = median_low(times) if len(peers) > 1 else None
            for sample, seconds in zip(peers, times, strict=True):
                expected = rules.expected_seconds(sample.trial, num_bytes)
                is_small = num_bytes == min(sample.times)
                factor = rules.factor * (NOISY_FACTOR if rules.is_noisy else 1) * (LATENCY_FACTOR if is_small else 1)
                limits = {} if is_small and rules.is_noisy else {PEERS: reference, TABLE: expected}
                against = [
                    name
                    for name, limit in limits.items()
                    if limit is not None and seconds > factor * limit and seconds - limit > rules.noise_seconds
                ]
                judged = Judged(sample, num_bytes, seconds, reference, expected, len(peers), " and ".join(against))
                found.setdefault(sample.trial, []).append(judged)
    return [judged for sample in samples for judged in found[sample.trial]]


def slow(judged: Sequence[Judged]) -> list[Judged]:
    """Return the slow ones, each trial once, the worst first."""
    worst: dict[Trial, Judged] = {}
    for one in judged:
        if one.against and (one.trial not in worst or one.times_slower > worst[one.trial].times_slower):
            worst[one.trial] = one
    return sorted(worst.values(), key=lambda one: -one.times_slower)


def common_cause(
    slow_links: Sequence[tuple[str, str]], measured: Sequence[tuple[str, str]]
) -> list[tuple[str | None, str | None]]:
    """Return the fewest causes that account for the slow directions (source, target).

    A cause is a direction, or (a, None) for everything that a sends, or (None, b) for everything that b receives. An
    end is a cause only if every direction measured at it is slow, at least two of these have no other cause, and some
    direction elsewhere is not slow.
    """
    left = list(dict.fromkeys(slow_links))
    all_measured = set(measured) | set(left)
    causes: list[tuple[str | None, str | None]] = []
    for place in (0, 1):
        for end in dict.fromkeys(link[place] for link in left):
            at_end = {link for link in all_measured if link[place] == end}
            if at_end <= set(slow_links) and len(at_end & set(left)) > 1 and all_measured - at_end - set(slow_links):
                causes.append((end, None) if place == 0 else (None, end))
                left = [link for link in left if link not in at_end]
    return [*causes, *left]


# ----------------------------------------------------------------------------------------------------- the examination

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
    trials = trials_of(request.topology, request.placement, hosts)
    alone = is_noisy and len(trials) <= MAX_ALONE
    samples = measure_rounds(rounds_of(trials, alone), groups, device, request.budget_seconds)
    # the links of the slowest groups of each kind and, to compare with, of a good group of that kind
    judged = judge(samples, rules)
    slow_trials = [one.trial for one in slow(judged)]
    suspects: list[Trial] = []
    for kind in dict.fromkeys(trial.kind for trial in slow_trials if not trial.is_message):
        good = [one.trial for one in judged if one.trial.kind == kind and one.trial not in slow_trials]
        suspects += [trial for trial in slow_trials if trial.kind == kind][:MAX_SUSPECTS] + good[:1]
    links = {pair: Trial(PAIR, trial.group, SEND, pair) for trial in suspects for pair in ring_pairs(trial.ranks)}
    samples += measure_rounds(rounds_of(list(links.values()), alone), groups, device, request.budget_seconds)
    judged = judge(samples, rules)
    slow_trials = [one.trial for one in slow(judged)]
    # what is slow is measured a second time, alone
    again = rounds_of(slow_trials, alone=len(slow_trials) <= MAX_ALONE)
    others = [sample for sample in samples if sample.trial not in slow_trials]
    confirmed = slow(judge([*others, *measure_rounds(again, groups, device, request.budget_seconds)], rules))
    twice = tuple(one for one in confirmed if one.trial in slow_trials)
    remarks = (*host_remarks(reports), *clock_remarks(skews, reports[0].name))
    return Examination(reports, hosts, skews, tuple(judged), twice, remarks, time.perf_counter() - began)


def named_hosts(found: Sequence[tuple[int, str]]) -> tuple[str, ...]:
    """Return the host of each rank from (node_rank, host name); nodes with equal names get their number appended."""
    nodes = {name: {node for node, other in found if other == name} for _, name in found}
    return tuple(name if len(nodes[name]) == 1 else f"{name}#{node}" for node, name in found)


def host_remarks(reports: Sequence[HostReport]) -> list[Remark]:
    """Return all remarks, those about single hosts first, then one for each property in which hosts differ. What holds
    for several hosts is one remark.
    """
    found: dict[tuple[bool, str, str], list[str]] = {}
    for report in reports:
        for finding in _findings(report):
            found.setdefault(finding, []).append(report.name)
    remarks = [Remark(is_wrong, kind, text, tuple(names)) for (is_wrong, kind, text), names in found.items()]
    settings = dict.fromkeys(name for report in reports for name in report.settings)
    versions = dict.fromkeys(name for report in reports for name in report.versions)
    tables: list[dict[str, str]] = []  # of each host: property -> value
    for report in reports:
        gpus = ", ".join(sorted({gpu.name for gpu in report.gpus})) or "none"
        table = {"GPUs": gpus, "CPU": f"{report.resources.cpu}, {report.resources.cores} cores"}
        table |= {f"setting {name}": report.settings.get(name, "not set") for name in settings}
        tables.append(table | {name: report.versions.get(name) or "none" for name in versions})
    every_host = tuple(report.name for report in reports)
    for what in tables[0]:
        hosts_with: dict[str, list[str]] = {}
        for name, table in zip(every_host, tables, strict=True):
            hosts_with.setdefault(table[what], []).append(name)
        if len(hosts_with) > 1:
            parts = []
            for value, hosts in hosts_with.items():
                listed = hosts if len(hosts) <= 4 else [*hosts[:3], f"... ({len(hosts)} in all)"]
                parts.append(f"{value} on {', '.join(listed)}")
            text = f"hosts differ in {what}: {'; '.join(parts)}"
            remarks.append(Remark(what in MUST_AGREE, "difference", text, every_host))
    return remarks


def _findings(report: HostReport) -> Iterator[tuple[bool, str, str]]:
    """Yield (is_wrong, kind, text): what breaks a run on a host, slows it down, or makes measurements unreliable."""
    has, ranks, threads = report.resources, report.num_ranks, report.threads_of_a_rank
    cores = has.usable_cores
    if report.has_nvidia_driver and not report.gpus and not report.versions.get("cuda"):
        way = "install a CUDA build, or the ranks stay on the CPU"
        yield True, "torch without CUDA", f"an NVIDIA driver is loaded, but this torch is built without CUDA: {way}"
    # with a single one each rank may see its own (srun --gpus-per-task=1); sharing it is refused when ranks meet
    if 1 < len(report.gpus) < ranks // report.ranks_per_gpu:
        most = f"start at most {report.ranks_per_gpu} a GPU"
        yield True, "ranks without a GPU", f"{ranks} ranks and {len(report.gpus)} GPUs: {most}"
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
