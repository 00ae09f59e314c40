"""Which part of the data is train, valid and test, and which files at which weight: the flags, parsed.

`--split 969,30,1` cuts each file's sequences; `--data-path` names files, with or without weights. Read as Megatron reads them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megapipe.config.data import split_shares
from megapipe.errors import ConfigError

SPLIT_NAMES = ("train", "valid", "test")


@dataclass(frozen=True)
class Blend:
    """File prefixes and their weights as given (not normalised), or None where none were given."""

    prefixes: tuple[str, ...]
    weights: tuple[float, ...] | None


def normalize(weights: Sequence[float]) -> tuple[float, ...]:
    """Weights over their sum, in float64."""
    values = np.array(weights, dtype=np.float64)
    return tuple((values / values.sum()).tolist())


def parse_split(split: str) -> tuple[tuple[float, float] | None, ...]:
    """`"969,30,1"` -> ((0, 0.969), (0.969, 0.999), (0.999, 1.0)); an empty part is None.

    Raises ConfigError if the string is not up to three non-negative numbers with a positive sum.
    """
    bookends: list[tuple[float, float] | None] = []
    start = 0.0
    for part in split_shares(split):
        bookends.append((start, start + part) if part > 0 else None)
        start += part
    return tuple(bookends)


def sequence_range(bookend: tuple[float, float], num_sequences: int) -> tuple[int, int]:
    """First and past-the-last sequence of one part of a file."""
    return round(bookend[0] * float(num_sequences)), round(bookend[1] * float(num_sequences))


def parse_blend(values: Sequence[str], flag: str = "--data-path") -> Blend:
    """`["0.3", "A", "0.7", "B"]` or `["A", "B"]` -> Blend.

    An odd number of values, or an even one without any number at the places of weights, is a list of prefixes.
    Raises ConfigError where weights stand at some places only, or are negative, or all zero.
    """
    values = [str(value).strip() for value in values]
    if not values or not all(values):
        raise ConfigError(
            f"{flag} needs at least one file prefix: PREFIX, PREFIX PREFIX ..., or WEIGHT PREFIX WEIGHT PREFIX ..."
        )
    numbers = [_number(value) for value in values[::2]]
    if len(values) % 2 == 1 or all(number is None for number in numbers):
        if len(values) > 1 and any(_number(value) is not None for value in values):
            raise ConfigError(
                f"{flag} {' '.join(values)}: a weight without its prefix; write WEIGHT PREFIX for every file, or prefixes only"
            )
        return Blend(tuple(values), None)
    weights = [number for number in numbers if number is not None]
    if len(weights) != len(numbers):
        raise ConfigError(
            f"{flag} {' '.join(values)}: some files have a weight and some have none; give WEIGHT PREFIX for every file"
        )
    if any(not math.isfinite(weight) or weight < 0 for weight in weights) or sum(weights) <= 0:
        raise ConfigError(f"{flag}: weights {weights} must be non-negative and not all zero")
    return Blend(tuple(values[1::2]), tuple(weights))


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
