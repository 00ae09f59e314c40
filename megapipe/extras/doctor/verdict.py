"""From measured times to what is slow: trials are compared with their peers and with what the hardware table expects.

Peers are trials of one operation over as many ranks, all within a host or all between hosts; all messages are peers.
The reference is the lower median of their times, so that of two peers, or where half of them are slow, the better ones
count. That a group is slow does not say where; its links, measured one by one and each way, do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, median_low

from megapipe.extras.doctor.trials import RING_PASSES, Sample, Trial, sent_bytes
from megapipe.plan.hardware import Hardware

LATENCY_FACTOR = 3  # applied to the slow factor at the smallest size: small messages vary more
NOISY_FACTOR = 2
PEERS, TABLE = "its peers", "what the hardware table expects"


@dataclass(frozen=True)
class Rules:
    """When a trial counts as slow."""

    hosts: tuple[str, ...]  # by global rank
    factor: float  # slow is more than this many times the reference or the expected time
    noise_seconds: float  # that a time may be off by chance
    is_noisy: bool = (
        False  # cores are shared: only the best repeat shows the link's speed, and small messages show nothing
    )
    hardware: Hardware | None = None  # None if the expected rates are unknown

    def crosses_hosts(self, trial: Trial) -> bool:
        return len({self.hosts[rank] for rank in trial.ranks}) > 1

    def seconds(self, sample: Sample, num_bytes: int) -> float:
        """Return the time of a trial at one size over its repeats."""
        return min(sample.times[num_bytes]) if self.is_noisy else median(sample.times[num_bytes])

    def expected_seconds(self, trial: Trial, num_bytes: int) -> float | None:
        """Return the time by the hardware table, None without one."""
        if self.hardware is None:
            return None
        link = self.hardware.network if self.crosses_hosts(trial) else self.hardware.node
        # a message is answered by a receipt; a ring makes a step for each other rank
        steps = 2 if trial.is_message else RING_PASSES[trial.operation] * (len(trial.ranks) - 1)
        return steps * link.latency_seconds + sent_bytes(trial, num_bytes) / link.bytes_per_second


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
        return sent_bytes(self.trial, self.num_bytes) / self.seconds


def judge(samples: Sequence[Sample], rules: Rules) -> list[Judged]:
    """Compare every sample at its smallest size and at the largest that all its peers have, in the order given."""
    peers_of: dict[tuple[object, ...], list[Sample]] = {}
    for sample in samples:
        trial = sample.trial
        key = (trial.operation, len(trial.ranks), rules.crosses_hosts(trial))
        peers_of.setdefault(key, []).append(sample)
    found: dict[Trial, list[Judged]] = {}
    for peers in peers_of.values():
        for num_bytes in sorted({min(peers[0].times), min(max(sample.times) for sample in peers)}):
            for sample in peers:
                found.setdefault(sample.trial, []).append(_judged(sample, peers, num_bytes, rules))
    return [judged for sample in samples for judged in found[sample.trial]]


def _judged(sample: Sample, peers: Sequence[Sample], num_bytes: int, rules: Rules) -> Judged:
    seconds = rules.seconds(sample, num_bytes)
    reference = median_low([rules.seconds(other, num_bytes) for other in peers]) if len(peers) > 1 else None
    expected = rules.expected_seconds(sample.trial, num_bytes)
    is_small = num_bytes == min(sample.times)
    factor = rules.factor * (NOISY_FACTOR if rules.is_noisy else 1) * (LATENCY_FACTOR if is_small else 1)
    against = ""
    if not (is_small and rules.is_noisy):
        limits = {PEERS: reference, TABLE: expected}
        against = " and ".join(
            name
            for name, limit in limits.items()
            if limit is not None and seconds > factor * limit and seconds - limit > rules.noise_seconds
        )
    return Judged(sample, num_bytes, seconds, reference, expected, len(peers), against)


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
