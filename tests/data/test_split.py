from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megapipe.data.split import Blend, parse_blend, parse_split, sequence_range
from megapipe.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "bookends"),
    [
        ("90,10,0", ((0.0, 0.9), (0.9, 1.0), None)),
        ("80,10,10", ((0.0, 0.8), (0.8, 0.9), (0.9, 1.0))),
        ("100", ((0.0, 1.0), None, None)),
        ("80/10/10", ((0.0, 0.8), (0.8, 0.9), (0.9, 1.0))),
        ("0, 1", (None, (0.0, 1.0), None)),
    ],
)
def test_split_gives_the_bookends_of_megatron(text, bookends):
    for got, want in zip(parse_split(text), bookends, strict=True):
        assert got == pytest.approx(want) if want is not None else got is None


@settings(max_examples=50)
@given(parts=st.lists(st.integers(0, 1000), min_size=3, max_size=3).filter(any), num_sequences=st.integers(0, 10**9))
def test_split_covers_every_sequence_once(parts, num_sequences):
    ranges = [
        sequence_range(part, num_sequences) for part in parse_split(",".join(map(str, parts))) if part is not None
    ]
    assert ranges[0][0] == 0
    assert ranges[-1][1] == num_sequences
    assert all(a[1] == b[0] for a, b in itertools.pairwise(ranges))


@pytest.mark.parametrize("text", ["", "a,b,c", "1,2,3,4", "-1,2,3", "0,0,0", "nan,1,1", "inf,1,1"])
def test_bad_split_is_refused(text):
    with pytest.raises(ConfigError, match=f"--split {re.escape(text)}: expected"):
        parse_split(text)


@pytest.mark.parametrize(
    ("words", "blend"),
    [
        (["a"], Blend(("a",), None)),
        (["a", "b"], Blend(("a", "b"), None)),
        (["a", "b", "c"], Blend(("a", "b", "c"), None)),
        (["1", "a"], Blend(("a",), (1.0,))),
        (["0.3", "a", "0.7", "b"], Blend(("a", "b"), (0.3, 0.7))),
    ],
    ids=["one", "two", "three", "one-weighted", "two-weighted"],
)
def test_blend_is_read_as_megatron_reads_it(words, blend):
    assert parse_blend(words) == blend


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "at least one file prefix"),
        (["0.3", "a", "b", "c"], "some files have a weight and some have none"),
        (["0.3", "a", "0.7"], "a weight without its prefix"),
        (["0", "a", "0", "b"], "not all zero"),
        (["-1", "a", "2", "b"], "non-negative"),
    ],
    ids=["none", "some", "odd", "zero", "negative"],
)
def test_bad_blend_is_refused(words, message):
    with pytest.raises(ConfigError, match=message):
        parse_blend(words, "--train-data-path")
