"""The measurements of a layout: collectives of every group of every axis, and messages across every pipeline boundary,
each way. `Meter` carries them out in rounds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise

import torch

from megapipe.comm.collectives import barrier, gather_objects
from megapipe.comm.groups import Group, ProcessGroups
from megapipe.comm.timing import Times, time_collective, time_messages
from megapipe.plan.traffic import ring_bytes
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


Round = tuple[Trial, ...]


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
    for ranks in topology.groups("pp"):
        found += [Trial(FORWARD, "pp", SEND, (ranks[a], ranks[b])) for a, b in hops]
    for ranks in topology.groups("pp"):
        found += [Trial(BACKWARD, "pp", SEND, (ranks[b], ranks[a])) for a, b in hops]
    first_ranks = sorted({host: rank for rank, host in reversed(list(enumerate(hosts)))}.values())
    found += [Trial(HOSTS, "world", SEND, pair) for pair in ring_pairs(first_ranks)]
    return found


def ring_pairs(ranks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the neighbours on a ring, each way; nothing for one rank."""
    if len(ranks) < 2:
        return
    ends = list(pairwise(ranks)) + ([(ranks[-1], ranks[0])] if len(ranks) > 2 else [])
    for a, b in ends:
        yield a, b
        yield b, a


def pairs_of(trial: Trial) -> list[Trial]:
    """Return the links of a group's ring as separate trials."""
    return [Trial(PAIR, trial.group, SEND, pair) for pair in ring_pairs(trial.ranks)]


def sent_bytes(trial: Trial, num_bytes: int) -> float:
    """Return the bytes that each rank sends for a buffer of num_bytes."""
    if trial.is_message:
        return num_bytes
    return RING_PASSES[trial.operation] * ring_bytes(num_bytes, len(trial.ranks))


def rounds_of(trials: Sequence[Trial], alone: bool) -> list[Round]:
    """Group trials into rounds in which no rank takes part twice; the trials of a round are of one kind and run
    concurrently, as in training.

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


@dataclass(frozen=True)
class Meter:
    """Carries out rounds of trials on all ranks. budget_seconds: for the repeats of one size of one trial."""

    groups: ProcessGroups
    device: torch.device
    budget_seconds: float

    def measure(self, rounds: Sequence[Round]) -> list[Sample]:
        """Return the samples of all trials on every rank, in the order of the rounds. Called by all ranks.

        Raises CommunicationError.
        """
        world, mine = self.groups.world, []
        for trials in rounds:
            barrier(world)
            trial = next((trial for trial in trials if world.global_rank in trial.ranks), None)
            if trial is not None and (times := self._measure(trial)):
                mine.append(Sample(trial, times))
        by_trial = {sample.trial: sample for some in gather_objects(mine, world) for sample in some}
        return [by_trial[trial] for trials in rounds for trial in trials]

    def _measure(self, trial: Trial) -> Times:
        """Return the times, or {} on all ranks of the group but the one that reports."""
        found: dict[str, Group | None] = {field.name: getattr(self.groups, field.name) for field in fields(self.groups)}
        group, sizes = found[trial.group], SIZES[self.device.type]
        assert group is not None
        if trial.is_message:
            source, target = (group.ranks.index(rank) for rank in trial.ranks)
            return time_messages(group, source, target, sizes, self.budget_seconds, self.device)
        times = time_collective(trial.operation, group, sizes, self.budget_seconds, self.device)
        return times if group.rank == 0 else {}
