"""The measurements of a layout, and what is slow in them.

Trials are the collectives of every group of every axis, and messages across every pipeline boundary, each way. They are
compared with their peers and with what the hardware table expects. Peers are trials of one operation over as many
ranks, all within a host or all between hosts; all messages are peers. The reference is the lower median of their times,
so that of two peers, or where half of them are slow, the better ones count. That a group is slow does not say where;
its links, measured one by one and each way, do.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median, median_low

import torch

from megapipe.comm.collectives import barrier, gather_objects
from megapipe.comm.groups import Group, ProcessGroups
from megapipe.comm.timing import time_collective, time_messages
from megapipe.layers.table import ring_bytes
from megapipe.plan.hardware import Hardware
from megapipe.schedule.placement import Placement
from megapipe.topology import Topology

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


def pairs_of(trial: Trial) -> list[Trial]:
    """Return the links of a group's ring as separate trials."""
    return [Trial(PAIR, trial.group, SEND, pair) for pair in ring_pairs(trial.ranks)]


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
