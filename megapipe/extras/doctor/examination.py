"""The examination of a running allocation: its hosts, its clocks, every group of the layout, and the conclusions."""

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
from megapipe.extras.doctor.remarks import Remark, clock_remarks, host_remarks
from megapipe.extras.doctor.trials import Meter, Trial, pairs_of, rounds_of, trials_of
from megapipe.extras.doctor.verdict import Judged, Rules, judge, slow
from megapipe.monitor.process import host
from megapipe.plan.hardware import Hardware
from megapipe.profile.clock import RoundTrip, reading
from megapipe.schedule.placement import Placement
from megapipe.topology import Topology

NOISE_SECONDS = {"cpu": 0.5e-3, "cuda": 50e-6}
MAX_ALONE = 32  # trials that run one at a time where cores are shared
MAX_SUSPECTS = 2  # groups of a kind whose links are measured one by one
CLOCK_TRIPS = 5


@dataclass(frozen=True)
class Request:
    """The layout to examine, and the limits."""

    topology: Topology
    placement: Placement
    hardware: Hardware | None  # expected rates; None compares trials with their peers only
    factor: float  # as in Rules
    budget_seconds: float  # as in Meter


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
    skews = _skews(groups, hosts, device)
    is_noisy = device.type == "cpu" and any(report.is_busy for report in reports)
    rules = Rules(hosts, request.factor, NOISE_SECONDS[device.type], is_noisy, request.hardware)
    trials = trials_of(request.topology, request.placement, hosts)
    judged, slow_ones = _measured(trials, Meter(groups, device, request.budget_seconds), rules)
    remarks = (*host_remarks(reports), *clock_remarks(skews, reports[0].name))
    return Examination(reports, hosts, skews, judged, slow_ones, remarks, time.perf_counter() - began)


def _measured(trials: Sequence[Trial], meter: Meter, rules: Rules) -> tuple[tuple[Judged, ...], tuple[Judged, ...]]:
    """Return all trials judged, and those that are slow.

    The links of slow groups are measured one by one. Whatever is slow is then measured again alone.
    """
    alone = rules.is_noisy and len(trials) <= MAX_ALONE
    samples = meter.measure(rounds_of(trials, alone))
    samples += meter.measure(rounds_of(_links_of_slow_groups(judge(samples, rules)), alone))
    judged = judge(samples, rules)
    suspects = [one.trial for one in slow(judged)]
    again = meter.measure(rounds_of(suspects, alone=len(suspects) <= MAX_ALONE))
    confirmed = judge([*(sample for sample in samples if sample.trial not in suspects), *again], rules)
    return tuple(judged), tuple(one for one in slow(confirmed) if one.trial in suspects)


def named_hosts(found: Sequence[tuple[int, str]]) -> tuple[str, ...]:
    """Return the host of each rank from (node_rank, host name); nodes with equal names get their number appended."""
    nodes = {name: {node for node, other in found if other == name} for _, name in found}
    return tuple(name if len(nodes[name]) == 1 else f"{name}#{node}" for node, name in found)


def _links_of_slow_groups(judged: Sequence[Judged]) -> list[Trial]:
    """Return the links of the slowest groups of each kind and, to compare with, of a good group of that kind."""
    slow_trials = [one.trial for one in slow(judged)]
    groups: list[Trial] = []
    for kind in dict.fromkeys(trial.kind for trial in slow_trials if not trial.is_message):
        good = [one.trial for one in judged if one.trial.kind == kind and one.trial not in slow_trials]
        groups += [trial for trial in slow_trials if trial.kind == kind][:MAX_SUSPECTS] + good[:1]
    return list({pair.ranks: pair for group in groups for pair in pairs_of(group)}.values())


def _skews(groups: ProcessGroups, hosts: Sequence[str], device: torch.device) -> dict[str, tuple[float, float]]:
    """Measure each host's clock against that of rank 0's host."""
    found = {}
    for name in dict.fromkeys(hosts):
        if name != hosts[0]:
            trips = round_trips(groups.world, 0, hosts.index(name), CLOCK_TRIPS, device, now=time.time_ns)
            if trips:
                read = reading([RoundTrip(*trip) for trip in trips])
                found[name] = (read.offset_ns / 1e9, read.error_ns / 1e9)
    received: dict[str, tuple[float, float]] = broadcast_object(found, groups.world)
    return received
