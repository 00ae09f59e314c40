"""From measured times to what is slow: groups and directions compared with their like and with what the hardware table expects.

Like are trials of one operation over as many ranks, all inside a host or all between hosts; all messages are like. The reference is the
lower median of their times, so that of two, or of a half that is slow, the better one counts. A group that is slow says nothing about
where; its links, one by one and each way, do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median, median_low

from megapipe.extras.doctor.trials import Trial
from megapipe.plan.hardware import Hardware
from megapipe.plan.traffic import ring_bytes

PASSES = {"all_reduce": 2, "reduce_scatter": 1, "all_gather": 1}
LATENCY_FACTOR = 3  # times the factor of large sizes: small messages vary more
NOISY_FACTOR = 2


@dataclass(frozen=True)
class Sample:
    """times: bytes -> seconds of each repeat."""

    trial: Trial
    times: Mapping[int, Sequence[float]]


@dataclass(frozen=True)
class Rules:
    """factor: as many times slower than its like, or than expected, is slow. noise_seconds: that a time may be off by chance.

    is_noisy: cores are shared, so that only the best repeat tells of the link, and small messages tell nothing.
    hardware: None where nothing is known of what should be reached.
    """

    hosts: tuple[str, ...]  # by global rank
    factor: float
    noise_seconds: float
    is_noisy: bool = False
    hardware: Hardware | None = None

    def crosses(self, trial: Trial) -> bool:
        return len({self.hosts[rank] for rank in trial.ranks}) > 1

    def seconds(self, sample: Sample, num_bytes: int) -> float:
        return min(sample.times[num_bytes]) if self.is_noisy else median(sample.times[num_bytes])

    def expected_seconds(self, trial: Trial, num_bytes: int) -> float | None:
        """By the hardware table."""
        if self.hardware is None:
            return None
        link = self.hardware.network if self.crosses(trial) else self.hardware.node
        steps = 2 if trial.is_message else PASSES[trial.operation] * (len(trial.ranks) - 1)  # a message has a receipt
        return steps * link.latency_seconds + sent_bytes(trial, num_bytes) / link.bytes_per_second


def sent_bytes(trial: Trial, num_bytes: int) -> float:
    """By each rank, for a buffer of num_bytes."""
    return num_bytes if trial.is_message else PASSES[trial.operation] * ring_bytes(num_bytes, len(trial.ranks))


@dataclass(frozen=True)
class Judged:
    """One trial at one size. reference_seconds: of its like, None without any. against: what it is slow against, "" if it is not slow."""

    sample: Sample
    num_bytes: int
    seconds: float
    reference_seconds: float | None
    expected_seconds: float | None
    num_like: int
    against: str = ""

    @property
    def trial(self) -> Trial:
        return self.sample.trial

    @property
    def times_slower(self) -> float:
        """Than what it is slow against, the better of the two."""
        known = [seconds for seconds in (self.reference_seconds, self.expected_seconds) if seconds]
        return self.seconds / min(known) if known else 1.0

    @property
    def bytes_per_second(self) -> float:
        return sent_bytes(self.trial, self.num_bytes) / self.seconds


def judge(samples: Sequence[Sample], rules: Rules) -> list[Judged]:
    """Every sample at its smallest size and at the largest that all of its like have, in the order given."""
    by_likeness: dict[tuple[object, ...], list[Sample]] = {}
    for sample in samples:
        by_likeness.setdefault(_likeness(sample.trial, rules), []).append(sample)
    found: dict[Trial, list[Judged]] = {}
    for like in by_likeness.values():
        for num_bytes in sorted({min(like[0].times), min(max(sample.times) for sample in like)}):
            for sample in like:
                found.setdefault(sample.trial, []).append(_judged(sample, like, num_bytes, rules))
    return [judged for sample in samples for judged in found[sample.trial]]


def slow(judged: Sequence[Judged]) -> list[Judged]:
    """Those that are, each trial once, the worst first."""
    worst: dict[Trial, Judged] = {}
    for one in judged:
        if one.against and (one.trial not in worst or one.times_slower > worst[one.trial].times_slower):
            worst[one.trial] = one
    return sorted(worst.values(), key=lambda one: -one.times_slower)


def common_cause(
    slow_links: Sequence[tuple[str, str]], measured: Sequence[tuple[str, str]]
) -> list[tuple[str | None, str | None]]:
    """The fewest ends that account for slow directions (source, target): (a, None) all that leaves a, (None, b) all that comes to b.

    An end is to blame only if every direction measured there is slow, two of them not for another end, and somewhere else one is not.
    """
    left = list(dict.fromkeys(slow_links))
    all_measured = set(measured) | set(left)
    causes: list[tuple[str | None, str | None]] = []
    for place in (0, 1):
        for end in dict.fromkeys(link[place] for link in left):
            there = {link for link in all_measured if link[place] == end}
            if there <= set(slow_links) and len(there & set(left)) > 1 and all_measured - there - set(slow_links):
                causes.append((end, None) if place == 0 else (None, end))
                left = [link for link in left if link not in there]
    return [*causes, *left]


def _likeness(trial: Trial, rules: Rules) -> tuple[object, ...]:
    return (trial.operation, len(trial.ranks), rules.crosses(trial))


def _judged(sample: Sample, like: Sequence[Sample], num_bytes: int, rules: Rules) -> Judged:
    seconds = rules.seconds(sample, num_bytes)
    reference = median_low([rules.seconds(other, num_bytes) for other in like]) if len(like) > 1 else None
    expected = rules.expected_seconds(sample.trial, num_bytes)
    is_small = num_bytes == min(sample.times)
    factor = rules.factor * (NOISY_FACTOR if rules.is_noisy else 1) * (LATENCY_FACTOR if is_small else 1)
    against = ""
    if not (is_small and rules.is_noisy):
        limits = {"its like": reference, "what the hardware table expects": expected}
        against = " and ".join(
            name
            for name, of in limits.items()
            if of is not None and seconds > factor * of and seconds - of > rules.noise_seconds
        )
    return Judged(sample, num_bytes, seconds, reference, expected, len(like), against)
