"""Facts that ranks compare before a run, by key; their digest; and the message that names the ranks that differ."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megapipe.formatting import count_text, ranges_text

MOST_KEYS, MOST_VALUES = 8, 4  # listed one by one
MOST_CHARACTERS = 300  # of a value


@dataclass(frozen=True)
class Fact:
    """One thing that must be the same on all ranks."""

    shown: str  # in a message
    compared: str | None = None  # None: what is shown

    @property
    def value(self) -> str:
        return self.shown if self.compared is None else self.compared


Facts = Mapping[str, Fact]  # by flag or name


@dataclass(frozen=True)
class Side:
    """Ranks whose facts have one digest."""

    ranks: tuple[int, ...]  # ascending
    host: str  # of the first of them
    facts: Facts


def digest_of(facts: Facts) -> str:
    """Return a digest of what is compared."""
    values = {key: fact.value for key, fact in facts.items()}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:32]


def to_json(facts: Facts) -> str:
    return json.dumps({key: [fact.shown, fact.compared] for key, fact in facts.items()})


def from_json(text: str | bytes) -> dict[str, Fact]:
    return {key: Fact(*values) for key, values in json.loads(text).items()}


def disagreement(sides: Sequence[Side], world_size: int) -> str:
    """Return the message that names, for each key that differs, ranks, host and values, the minority first."""
    keys = list(dict.fromkeys(key for side in sides for key in side.facts))
    lines = [line for key in keys if (line := _difference(key, sides))]
    compared = sum(len(side.ranks) for side in sides)
    if len(lines) > MOST_KEYS:
        lines[MOST_KEYS:] = [f"and {len(lines) - MOST_KEYS} more"]
    if compared < world_size:
        lines.append(f"{count_text(world_size - compared, 'more rank')} differ in other ways")
    return "\n  ".join(
        [
            "the ranks disagree, so nothing was started:",
            *lines,
            "Give all ranks the same flags, files and versions (what may differ: docs/reliability.md)",
        ]
    )


def _difference(key: str, sides: Sequence[Side]) -> str:
    """Return the line of one key, "" if all have the same value."""
    by_value: dict[str | None, list[Side]] = {}
    for side in sides:
        fact = side.facts.get(key)
        by_value.setdefault(None if fact is None else fact.value, []).append(side)
    if len(by_value) == 1:
        return ""
    sizes = {value: sum(len(side.ranks) for side in of_value) for value, of_value in by_value.items()}
    fewest_first = sorted(by_value, key=lambda value: (sizes[value], by_value[value][0].ranks))
    texts = []
    for value in fewest_first[: MOST_VALUES - 1] + fewest_first[MOST_VALUES - 1 :][-1:]:
        of_value = by_value[value]
        ranks = sorted(rank for side in of_value for rank in side.ranks)
        first = min(of_value, key=lambda side: side.ranks)
        fact = first.facts.get(key)
        shown = "unset" if fact is None else fact.shown
        noun = "rank" if len(ranks) == 1 else "ranks"
        where = first.host if len(ranks) == 1 else f"the first on {first.host}"
        texts.append(f"{shown[:MOST_CHARACTERS]} on {noun} {ranges_text(ranks)} ({where})")
    return f"{key}: {', but '.join(texts)}"
