"""Base configurations for tests, and hypothesis strategies for single fields."""

from __future__ import annotations

import shlex
from typing import Any

from hypothesis import strategies as st

from megapipe.config.fields import out_of_bounds
from megapipe.config.options import ConfigField, Option
from megapipe.registry import Registry

SHAPE = "--num-layers 4 --hidden-size 64 --num-attention-heads 8 --seq-length 32"
JOB = (SHAPE + " --micro-batch-size 2 --lr 1e-3 --train-iters 100 --mock-data --vocab-size 100").split()


def job(*more: str) -> list[str]:
    """Return the command line of a small job with additional flags."""
    words: list[str] = []
    for text in more:
        words += shlex.split(text)
    return [*JOB, *words]


def has_values(field: ConfigField) -> bool:
    """Return False for a field that takes only names of extensions."""
    return not isinstance(field.option.choices, Registry) or len(field.option.choices) > 0


def scalars(scalar: type, option: Option) -> st.SearchStrategy[Any]:
    """Build a strategy for the field's scalar type, within its choices and range."""
    if option.choices:
        return st.sampled_from(tuple(option.choices))
    if scalar is bool:
        return st.booleans()
    if scalar is str:
        characters = st.characters(exclude_categories=["Cs"], exclude_characters="\0")
        return st.text(characters, min_size=1, max_size=12).filter(lambda text: text != "--")
    if scalar is int:
        numbers: st.SearchStrategy[Any] = st.integers(
            int(option.at_least or 0), int(option.at_most if option.at_most is not None else 10**9)
        )
    else:
        low = option.at_least if option.at_least is not None else option.above if option.above is not None else 0.0
        high = option.at_most if option.at_most is not None else option.below if option.below is not None else 1e12
        numbers = st.floats(low, high, allow_nan=False, allow_infinity=False)
    return numbers.filter(lambda number: not out_of_bounds(option, number))


def values(field: ConfigField) -> st.SearchStrategy[Any]:
    """Build a strategy for all values that the field's declaration allows."""
    if not has_values(field):
        return st.just(field.default)
    one = scalars(field.kind.scalar, field.option)
    if field.kind.many:
        length = field.kind.length
        one = st.lists(one, min_size=length or 1, max_size=length or 4).map(tuple)
    return st.none() | one if field.kind.optional else one
