"""What is measured on a layout: collectives of every group of every axis, and messages along every boundary of the pipeline, each way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

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
FORWARD, BACKWARD, HOSTS, PAIR = "pp forward", "pp backward", "between hosts", "pair"

Round = tuple["Trial", ...]


@dataclass(frozen=True)
class Trial:
    """One thing to measure. group: kind of group whose communicator is used. ranks: global, of the group; of a message (source, target)."""

    kind: str
    group: str
    operation: str
    ranks: tuple[int, ...]

    @property
    def is_message(self) -> bool:
        return self.operation == SEND


def trials_of(topology: Topology, placement: Placement, hosts: Sequence[str]) -> list[Trial]:
    """Everything that a layout is measured by. hosts: by global rank, as they are, not as planned."""
    found = [
        Trial(kind, name, operation, ranks)
        for kind, (name, operation) in COLLECTIVES.items()
        for ranks in topology.groups(name)
        if len(ranks) > 1
    ]
    hops = dict.fromkeys(hop for ranks in placement.directions for hop in pairwise(ranks) if hop[0] != hop[1])
    for kind, turn in ((FORWARD, 1), (BACKWARD, -1)):
        for ranks in topology.groups("pp"):
            found += [Trial(kind, "pp", SEND, (ranks[a], ranks[b])[::turn]) for a, b in hops]  # type: ignore[arg-type]
    firsts = list({host: rank for rank, host in reversed(list(enumerate(hosts)))}.values())
    found += [Trial(HOSTS, "world", SEND, pair) for pair in ring_pairs(sorted(firsts))]
    return found


def ring_pairs(ranks: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Neighbours on a ring, each way; () of one rank."""
    if len(ranks) < 2:
        return
    ends = list(pairwise(ranks)) + ([(ranks[-1], ranks[0])] if len(ranks) > 2 else [])
    for a, b in ends:
        yield a, b
        yield b, a


def pairs_of(trial: Trial) -> list[Trial]:
    """The links of a group, one by one."""
    return [Trial(PAIR, trial.group, SEND, pair) for pair in ring_pairs(trial.ranks)]


def rounds_of(trials: Sequence[Trial], alone: bool) -> list[Round]:
    """In each round no rank is asked twice; all trials of one round are of one kind and run side by side, as in training.

    alone: each has a round of its own.
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
