"""From the times of all ranks to the slow rank, link or group that keeps the others waiting. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from megapipe.formatting import seconds_text

# A rank, link or group is slow if it takes more than so many times as long
PEERS_RATIO = 1.3  # as ranks that do the same work
WORK_RATIO = 2.0  # as ranks that do other work, by the plan's estimate of it
LINK_RATIO = 3.0  # as the median of the other links, or of the other groups of that kind
LEAST_SHARE = 0.1  # and if at least this share of a step is lost by it


@dataclass(frozen=True)
class RankPace:
    """One rank's step, medians over some steps, in seconds.

    waits: by kind of group, "messages" for those of the pipeline. work: its computation by the plan, on any scale.
    peers: the other ranks with exactly the same work. link, link_seconds: the neighbour up the pipeline to which
    messages there and back take longest, and how long; -1 and 0 if unknown.
    """

    rank: int
    step: float
    computing: float
    reading: float
    waits: Mapping[str, float]
    work: float
    peers: tuple[int, ...] = ()
    link: int = -1
    link_seconds: float = 0.0

    @property
    def waiting(self) -> float:
        return sum(self.waits.values())


@dataclass(frozen=True)
class SlowRank:
    """A slow rank.

    seconds: for computing or reading data; expected: of the others. same_work: the others do the same work.
    """

    rank: int
    what: str  # "computes" or "reads data"
    seconds: float
    expected: float
    same_work: bool


@dataclass(frozen=True)
class SlowLink:
    """A slow link.

    seconds: for a message there and one back; expected: on the other links, None if there is no other.
    """

    ranks: tuple[int, int]
    seconds: float
    expected: float | None


@dataclass(frozen=True)
class SlowGroup:
    """A group with slow collectives.

    seconds: for the rank that joins them last; expected: in the other groups of that kind.
    """

    kind: str
    ranks: tuple[int, ...]
    seconds: float
    expected: float


Straggler = SlowRank | SlowLink | SlowGroup


def find_stragglers(paces: Sequence[RankPace], groups: Mapping[str, Sequence[tuple[int, ...]]]) -> list[Straggler]:
    """Return what is slow, the worst first.

    paces: by global rank. groups: all groups of more than one rank, by kind.
    """
    step = max(pace.step for pace in paces)
    found = [*_slow_ranks(paces, step), *_slow_links(paces, step), *_slow_groups(paces, groups, step)]
    return [straggler for _, straggler in sorted(found, key=lambda one: -one[0])]


def _slow_ranks(paces: Sequence[RankPace], step: float) -> list[tuple[float, Straggler]]:
    """Return (seconds lost, slow rank)."""
    found: list[tuple[float, Straggler]] = []
    for pace in paces:
        expected, ratio, same_work = _expected(pace, paces)
        lost = pace.computing - expected
        if pace.computing > ratio * expected and lost > LEAST_SHARE * step:
            found.append((lost, SlowRank(pace.rank, "computes", pace.computing, expected, same_work)))
        others = [other.reading for other in paces if other.rank != pace.rank]
        reading = median(others) if others else pace.reading
        if pace.reading - reading > LEAST_SHARE * step and pace.reading > PEERS_RATIO * reading:
            found.append((pace.reading - reading, SlowRank(pace.rank, "reads data", pace.reading, reading, True)))
    return found


def _expected(pace: RankPace, paces: Sequence[RankPace]) -> tuple[float, float, bool]:
    """Return (seconds it should compute, ratio from which on it is slow, True if ranks with the same work say so)."""
    peers = [paces[rank].computing for rank in pace.peers]
    if peers:
        return median(peers), PEERS_RATIO, True
    others = [other.computing / other.work * pace.work for other in paces if other.rank != pace.rank and other.work > 0]
    return (median(others) if others else pace.computing), WORK_RATIO, False


def _slow_links(paces: Sequence[RankPace], step: float) -> list[tuple[float, Straggler]]:
    links = [(pace.link_seconds, (pace.rank, pace.link)) for pace in paces if pace.link >= 0]
    found: list[tuple[float, Straggler]] = []
    for index, (seconds, ranks) in enumerate(links):
        others = [other for i, (other, _) in enumerate(links) if i != index]
        expected = median(others) if others else None
        if seconds > LEAST_SHARE * step and (expected is None or seconds > LINK_RATIO * expected):
            found.append((seconds - (expected or 0.0), SlowLink(ranks, seconds, expected)))
    return found


def _slow_groups(
    paces: Sequence[RankPace], groups: Mapping[str, Sequence[tuple[int, ...]]], step: float
) -> list[tuple[float, Straggler]]:
    """Compare groups by their least waits: the rank that joins a collective last waits only for the operation."""
    found: list[tuple[float, Straggler]] = []
    for kind, members in groups.items():
        least = [min(paces[rank].waits.get(kind, 0.0) for rank in ranks) for ranks in members]
        for index, ranks in enumerate(members):
            others = [other for i, other in enumerate(least) if i != index]
            if (
                others
                and least[index] > LINK_RATIO * median(others)
                and least[index] - median(others) > LEAST_SHARE * step
            ):
                found.append((least[index] - median(others), SlowGroup(kind, ranks, least[index], median(others))))
    return found


def straggler_text(straggler: Straggler, paces: Sequence[RankPace], names: Sequence[str]) -> str:
    """Describe a straggler in one sentence. names: of the ranks, with place and host."""
    if isinstance(straggler, SlowLink):
        other = (
            "there is no other link to compare with"
            if straggler.expected is None
            else f"the others {seconds_text(straggler.expected)}"
        )
        share = straggler.seconds / max(paces[straggler.ranks[0]].step, 1e-9)
        return (
            f"the link between {names[straggler.ranks[0]]} and {names[straggler.ranks[1]]} is slow: a message there "
            f"and one back take {seconds_text(straggler.seconds)}, {share:.0%} of a step; {other}"
        )
    if isinstance(straggler, SlowGroup):
        ranks = " ".join(map(str, straggler.ranks[:8])) + (" ..." if len(straggler.ranks) > 8 else "")
        return (
            f"collectives of the {straggler.kind} group of ranks {ranks} are slow: "
            f"{seconds_text(straggler.seconds)} a step even for the rank that joins last, "
            f"{seconds_text(straggler.expected)} in the other {straggler.kind} groups"
        )
    pace = paces[straggler.rank]
    ratio = straggler.seconds / straggler.expected if straggler.expected > 0 else float("inf")
    others = "ranks with the same work" if straggler.same_work else "the others, for the work that the plan gives it"
    times = (
        f"{ratio:.1f} times the {seconds_text(straggler.expected)} of {others}"
        if ratio < 100
        else f"{others}: {seconds_text(straggler.expected)}"
    )
    seconds, waiting = seconds_text(straggler.seconds), seconds_text(pace.waiting)
    return f"{names[straggler.rank]} is slow: it {straggler.what} {seconds} a step, {times}; it waits {waiting}"


def extremes_text(paces: Sequence[RankPace], count: int) -> str:
    """Name the ranks that compute longest and shortest, `count` of each."""
    ordered = sorted(paces, key=lambda pace: (-pace.computing, pace.rank))
    count = min(count, max(1, len(ordered) // 2))
    longest, shortest = ordered[:count], ordered[-count:][::-1]
    return f"longest {_listed(longest)}; shortest {_listed(shortest)}"


def _listed(paces: Sequence[RankPace]) -> str:
    return ", ".join(
        f"rank {pace.rank} {seconds_text(pace.computing)} (waits {seconds_text(pace.waiting)})" for pace in paces
    )
