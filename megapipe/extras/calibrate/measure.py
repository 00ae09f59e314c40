"""The measurement of a world of ranks for a hardware file: each rank's device, and the links between ranks."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from megapipe.comm.bootstrap import World, start
from megapipe.comm.collectives import barrier, gather_objects
from megapipe.comm.groups import build_process_groups
from megapipe.environment import Environment
from megapipe.extras.calibrate.rates import Rates, Stopwatch, measure_rates, slowest
from megapipe.extras.doctor.trials import SEND, SIZES, Meter, Sample, Trial, rounds_of, sent_bytes
from megapipe.monitor.process import host
from megapipe.plan.hardware import Link
from megapipe.topology import Topology

LINKS_SHARE = 0.15  # of the seconds, with several ranks
DEFAULT_DTYPES = {"cpu": "fp32", "cuda": "bf16"}
NODE, NETWORK = "node", "network"  # the links of a hardware file
LEGS = 2  # latencies in a small trial: an all-reduce has two passes, a message a receipt


@dataclass(frozen=True)
class MeasuredLink:
    """A link of the hardware file as measured."""

    name: str  # NODE or NETWORK
    ranks: int  # of a group
    all_reduce: Link  # the one in the file
    message: Link  # between two ranks


@dataclass(frozen=True)
class Found:
    """The result of a measurement; the same on all ranks."""

    device: torch.device
    dtype: str
    rates: Rates  # of the slowest rank
    links: tuple[MeasuredLink, ...]
    hosts: tuple[str, ...]  # by global rank
    seconds: float  # that the measurement took


def measure(environment: Environment, device: str, dtype: str | None, seconds: float, timeout_seconds: float) -> Found:
    """Measure on all ranks at the same time.

    device: 'auto', 'cpu' or 'cuda'. dtype: None for the device's default. seconds: about how long it takes.
    Raises ConfigError, CommunicationError. It has not run on GPUs so far.
    """
    world = start(environment, "auto", timeout_seconds, device)
    if world.device.type == "cpu":
        torch.set_num_threads(environment.num_threads or 1)
    began = time.perf_counter()
    dtype = dtype or DEFAULT_DTYPES[world.device.type]
    topology = Topology(dp=world.world_size)
    everyone = build_process_groups(topology, world.global_rank, world.backend, timeout_seconds).world
    barrier(everyone)
    share = 1 - LINKS_SHARE * environment.is_distributed
    rates = slowest(gather_objects(measure_rates(dtype, Stopwatch(world.device), share * seconds), everyone))
    links: list[MeasuredLink] = []
    if environment.is_distributed:
        links = measure_links(world, environment.local_world_size, LINKS_SHARE * seconds)
    hosts = tuple(gather_objects(host(), everyone))
    return Found(world.device, dtype, rates, tuple(links), hosts, time.perf_counter() - began)


def measure_links(world: World, ranks_per_node: int, seconds: float) -> list[MeasuredLink]:
    """Measure all nodes at the same time, as in training; called by all ranks. seconds: about how long it takes.

    Raises CommunicationError.
    """
    topology = Topology(tp=ranks_per_node, dp=world.world_size // ranks_per_node, ranks_per_node=ranks_per_node)
    groups = build_process_groups(topology, world.global_rank, world.backend, world.timeout_seconds)
    rounds = rounds_of(list(link_trials(topology)), alone=False)
    budget = seconds / max(1, len(rounds) * len(SIZES[world.device.type]))
    samples = Meter(groups, world.device, budget).measure(rounds)
    found = []
    for name in (NODE, NETWORK):
        reduced = [s for s in samples if s.trial.kind == name and not s.trial.is_message]
        messages = [s for s in samples if s.trial.kind == name and s.trial.is_message]
        if reduced:
            found.append(MeasuredLink(name, len(reduced[0].trial.ranks), _median_link(reduced), _median_link(messages)))
    return found


def link_trials(topology: Topology) -> Iterator[Trial]:
    """Yield an all-reduce over the ranks of each node and over the ranks with one local rank on all nodes, and for each
    of these groups a message between its first two ranks."""
    for name, group in ((NODE, "tp"), (NETWORK, "replicas")):
        for ranks in topology.groups(group):
            if len(ranks) > 1:
                yield Trial(name, group, "all_reduce", ranks)
                yield Trial(name, group, SEND, ranks[:2])


def _median_link(samples: Sequence[Sample]) -> Link:
    links = [fitted(sample) for sample in samples]
    return Link(median(link.bytes_per_second for link in links), median(link.latency_seconds for link in links))


def fitted(sample: Sample) -> Link:
    """Return the link with the latency of the smallest size, and the rate from the extra time of the largest."""
    seconds = {num_bytes: median(times) for num_bytes, times in sample.times.items()}
    small, large = min(seconds), max(seconds)
    longer = seconds[large] - seconds[small]
    if longer <= 0:  # noise is larger than the cost of the size
        longer = seconds[large]
    return Link(sent_bytes(sample.trial, large) / longer, seconds[small] / LEGS)
