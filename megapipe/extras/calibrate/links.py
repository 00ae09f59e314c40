"""Links between this world's ranks, in a node and between nodes, by the doctor's measurements."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from megapipe.comm.bootstrap import World
from megapipe.comm.groups import build_process_groups
from megapipe.extras.doctor.trials import SEND, SIZES, Meter, Sample, Trial, rounds_of, sent_bytes
from megapipe.plan.hardware import Link
from megapipe.topology import Topology

NODE, NETWORK = "node", "network"  # the links of a hardware file
LEGS = 2  # latencies in a small trial: an all-reduce has two passes, a message its receipt


@dataclass(frozen=True)
class MeasuredLink:
    """name: of the link in a hardware file. ranks: of a group. all_reduce: what the file holds. message: of one rank to the next."""

    name: str
    ranks: int
    all_reduce: Link
    message: Link


def measure_links(world: World, ranks_per_node: int, seconds: float) -> list[MeasuredLink]:
    """All nodes side by side, as in training. seconds: about what it takes. The same on all ranks, all of which call it.

    Raises CommunicationError.
    """
    topology = Topology(tp=ranks_per_node, dp=world.world_size // ranks_per_node, ranks_per_node=ranks_per_node)
    groups = build_process_groups(topology, world.global_rank, world.backend, world.timeout_seconds)
    trials = list(trials_of(topology))
    rounds = rounds_of(trials, alone=False)
    budget = seconds / max(1, len(rounds) * len(SIZES[world.device.type]))
    samples = Meter(groups, world.device, budget).measure(rounds)
    return [link for name in (NODE, NETWORK) if (link := measured_link(name, samples)) is not None]


def trials_of(topology: Topology) -> Iterator[Trial]:
    """All-reduces over the ranks of each node, and over those at one place in all nodes; a message between the first two of each."""
    for name, group in ((NODE, "tp"), (NETWORK, "replicas")):
        for ranks in topology.groups(group):
            if len(ranks) > 1:
                yield Trial(name, group, "all_reduce", ranks)
                yield Trial(name, group, SEND, ranks[:2])


def measured_link(name: str, samples: Sequence[Sample]) -> MeasuredLink | None:
    """Medians over the groups of one link; None where there is none."""
    of_link = [sample for sample in samples if sample.trial.kind == name]
    if not of_link:
        return None
    reduced = [sample for sample in of_link if not sample.trial.is_message]
    messages = [sample for sample in of_link if sample.trial.is_message]
    return MeasuredLink(name, len(reduced[0].trial.ranks), _median_link(reduced), _median_link(messages))


def _median_link(samples: Sequence[Sample]) -> Link:
    links = [fitted(sample) for sample in samples]
    return Link(median(link.bytes_per_second for link in links), median(link.latency_seconds for link in links))


def fitted(sample: Sample) -> Link:
    """The latency of the smallest size; the rate by what the largest takes longer than it."""
    seconds = {num_bytes: median(times) for num_bytes, times in sample.times.items()}
    small, large = min(seconds), max(seconds)
    longer = seconds[large] - seconds[small]
    if longer <= 0:  # chance is larger than what the size costs
        longer = seconds[large]
    return Link(sent_bytes(sample.trial, large) / longer, seconds[small] / LEGS)
