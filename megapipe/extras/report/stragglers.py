"""From the times of all ranks in a step to the rank, link or group that is slow, for --log-straggler."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from megapipe.formatting import seconds_text
from megapipe.monitor.heartbeat import RankPace

# A rank, link or group is slow if it takes more than so many times as long
PEERS_RATIO = 1.3  # as ranks that do the same work
WORK_RATIO = 2.0  # as ranks that do other work, by the plan's estimate of it
LINK_RATIO = 3.0  # as the median of the other links, or of the other groups of that kind
LEAST_SHARE = 0.1  # and if at least this share of a step is lost by it


def find_stragglers(
    paces: Sequence[RankPace], groups: Mapping[str, Sequence[tuple[int, ...]]], names: Sequence[str]
) -> list[str]:
    """Describe what is slow in one sentence each, the worst first.

    paces: by global rank. groups: all groups of more than one rank, by kind. names: of the ranks, with place and host.
    """
    step = max(pace.step for pace in paces)
    found = [*_slow_ranks(paces, step, names), *_slow_links(paces, step, names), *_slow_groups(paces, groups, step)]
    return [sentence for _, sentence in sorted(found, key=lambda one: -one[0])]


def _slow_ranks(paces: Sequence[RankPace], step: float, names: Sequence[str]) -> Iterator[tuple[float, str]]:
    """Yield (seconds lost, sentence)."""
    for pace in paces:
        others = [other for other in paces if other.rank != pace.rank]
        peers = [paces[rank].computing for rank in pace.peers]
        scaled = [other.computing / other.work * pace.work for other in others if other.work > 0]
        # without ranks that do the same work, the plan's estimate of it says what to expect
        expected = median(peers or scaled or [pace.computing])
        reading = median([other.reading for other in others] or [pace.reading])
        for does, seconds, usual, same_work in (
            ("computes", pace.computing, expected, bool(peers)),
            ("reads data", pace.reading, reading, True),
        ):
            ratio, whose = PEERS_RATIO, "ranks with the same work"
            if not same_work:
                ratio, whose = WORK_RATIO, "the others, for the work that the plan gives it"
            if seconds <= ratio * usual or seconds - usual <= LEAST_SHARE * step:
                continue
            compared = f"{whose}: {seconds_text(usual)}"
            if seconds < 100 * usual:
                compared = f"{seconds / usual:.1f} times the {seconds_text(usual)} of {whose}"
            sentence = f"it {does} {seconds_text(seconds)} a step, {compared}; it waits {seconds_text(pace.waiting)}"
            yield seconds - usual, f"{names[pace.rank]} is slow: {sentence}"


def _slow_links(paces: Sequence[RankPace], step: float, names: Sequence[str]) -> Iterator[tuple[float, str]]:
    links = [pace for pace in paces if pace.link >= 0]
    for pace in links:
        seconds = pace.link_seconds
        others = [other.link_seconds for other in links if other is not pace]
        usual = median(others or [0.0])
        if seconds > LEAST_SHARE * step and seconds > LINK_RATIO * usual:
            compared = f"the others {seconds_text(usual)}" if others else "there is no other link to compare with"
            yield (
                seconds - usual,
                f"the link between {names[pace.rank]} and {names[pace.link]} is slow: a message there and one back "
                f"take {seconds_text(seconds)}, {seconds / max(pace.step, 1e-9):.0%} of a step; {compared}",
            )


def _slow_groups(
    paces: Sequence[RankPace], groups: Mapping[str, Sequence[tuple[int, ...]]], step: float
) -> Iterator[tuple[float, str]]:
    """Compare groups by their least waits: the rank that joins a collective last waits only for the operation."""
    for kind, members in groups.items():
        least = [min(paces[rank].waits.get(kind, 0.0) for rank in ranks) for ranks in members]
        for index, ranks in enumerate(members):
            seconds, others = least[index], [other for i, other in enumerate(least) if i != index]
            usual = median(others or [seconds])
            if seconds > LINK_RATIO * usual and seconds - usual > LEAST_SHARE * step:
                shown = " ".join(map(str, ranks[:8])) + (" ..." if len(ranks) > 8 else "")
                yield (
                    seconds - usual,
                    f"collectives of the {kind} group of ranks {shown} are slow: {seconds_text(seconds)} a step even "
                    f"for the rank that joins last, {seconds_text(usual)} in the other {kind} groups",
                )
