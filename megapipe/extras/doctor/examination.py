"""The whole examination of a running allocation: its hosts, its clocks, every group of the layout, and what follows from them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from megapipe.comm.collectives import broadcast_object, gather_objects
from megapipe.comm.groups import ProcessGroups
from megapipe.comm.timing import round_trips
from megapipe.environment import Environment
from megapipe.extras.doctor.host import HostReport, examine_host
from megapipe.extras.doctor.hosts import Remark, clock_remarks, examine
from megapipe.extras.doctor.measure import Meter
from megapipe.extras.doctor.trials import Trial, pairs_of, rounds_of, trials_of
from megapipe.extras.doctor.verdict import Judged, Rules, judge, slow
from megapipe.monitor.process import host
from megapipe.plan.hardware import Hardware
from megapipe.profile.clock import RoundTrip, reading
from megapipe.schedule.placement import Placement
from megapipe.topology import Topology

NOISE_SECONDS = {"cpu": 0.5e-3, "cuda": 50e-6}
MOST_ALONE = 32  # trials that get a round of their own where cores are shared
MOST_SUSPECTS = 2  # groups of a kind whose links are measured one by one
CLOCK_TRIPS = 5


@dataclass(frozen=True)
class Wish:
    """What to examine. hardware: to compare with, None for like with like alone. factor, budget_seconds: as Rules and Meter."""

    topology: Topology
    placement: Placement
    hardware: Hardware | None
    factor: float
    budget_seconds: float


@dataclass(frozen=True)
class Examination:
    """The same on all ranks. hosts: name by global rank. skews: host -> (seconds ahead of the first, error). judged: every trial at two
    sizes. slow: trials that are slow, twice measured; links among them are the pairs of a slow group, too."""

    reports: tuple[HostReport, ...]
    hosts: tuple[str, ...]
    skews: Mapping[str, tuple[float, float]]
    judged: tuple[Judged, ...]
    slow: tuple[Judged, ...]
    remarks: tuple[Remark, ...]
    seconds: float

    @property
    def is_fine(self) -> bool:
        return not self.slow and not any(remark.is_wrong for remark in self.remarks)


def examine_allocation(
    wish: Wish, groups: ProcessGroups, environment: Environment, device: torch.device
) -> Examination:
    """Called by all ranks. Raises CommunicationError."""
    began = time.perf_counter()
    world = groups.world
    hosts = named_hosts(gather_objects((environment.node_rank, host()), world))
    is_first = hosts.index(hosts[world.global_rank]) == world.global_rank
    found = gather_objects(examine_host(environment, device) if is_first else None, world)
    reports = tuple(report for report in found if report is not None)
    skews = _skews(groups, hosts, device)
    is_noisy = any(report.is_busy for report in reports)
    rules = Rules(hosts, wish.factor, NOISE_SECONDS[device.type], is_noisy and device.type == "cpu", wish.hardware)
    judged, slow_ones = _measured(
        trials_of(wish.topology, wish.placement, hosts), Meter(groups, device, wish.budget_seconds), rules
    )
    remarks = (*examine(reports), *clock_remarks(skews, reports[0].name))
    return Examination(reports, hosts, skews, judged, slow_ones, remarks, time.perf_counter() - began)


def _measured(trials: Sequence[Trial], meter: Meter, rules: Rules) -> tuple[tuple[Judged, ...], tuple[Judged, ...]]:
    """(all, those that are slow). What is slow at first sight is measured again by itself; a group's links are measured one by one."""
    alone = rules.is_noisy and len(trials) <= MOST_ALONE
    samples = meter.measure(rounds_of(trials, alone))
    samples += meter.measure(rounds_of(_links_in_doubt(judge(samples, rules)), alone))
    judged = judge(samples, rules)
    suspects = [one.trial for one in slow(judged)]
    again = meter.measure(rounds_of(suspects, alone=len(suspects) <= MOST_ALONE))
    confirmed = judge([*(sample for sample in samples if sample.trial not in suspects), *again], rules)
    return tuple(judged), tuple(one for one in slow(confirmed) if one.trial in suspects)


def named_hosts(found: Sequence[tuple[int, str]]) -> tuple[str, ...]:
    """The host of each rank from (node_rank, host name); nodes that call themselves the same get their number."""
    nodes = {name: {node for node, other in found if other == name} for _, name in found}
    return tuple(name if len(nodes[name]) == 1 else f"{name}#{node}" for node, name in found)


def _links_in_doubt(judged: Sequence[Judged]) -> list[Trial]:
    """The links of the slowest groups of each kind, and those of a good group of the same kind to compare with; each link once."""
    slow_trials = [one.trial for one in slow(judged)]
    groups: list[Trial] = []
    for kind in dict.fromkeys(trial.kind for trial in slow_trials if not trial.is_message):
        good = [one.trial for one in judged if one.trial.kind == kind and one.trial not in slow_trials]
        groups += [trial for trial in slow_trials if trial.kind == kind][:MOST_SUSPECTS] + good[:1]
    return list({pair.ranks: pair for group in groups for pair in pairs_of(group)}.values())


def _skews(groups: ProcessGroups, hosts: Sequence[str], device: torch.device) -> dict[str, tuple[float, float]]:
    """Of each host's clock against that of rank 0's."""
    found = {}
    for name in dict.fromkeys(hosts):
        if name != hosts[0]:
            trips = round_trips(groups.world, 0, hosts.index(name), CLOCK_TRIPS, device, now=time.time_ns)
            if trips:
                read = reading([RoundTrip(*trip) for trip in trips])
                found[name] = (read.offset_ns / 1e9, read.error_ns / 1e9)
    received: dict[str, tuple[float, float]] = broadcast_object(found, groups.world)
    return received
