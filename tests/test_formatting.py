"""Formatting of sizes, times, counts and tables for people."""

from __future__ import annotations

import pytest

from megapipe.formatting import (
    bytes_text,
    count_text,
    duration_text,
    milliseconds,
    one_of,
    ranges_text,
    seconds_text,
    text_table,
)


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "0.98 KiB"), (1024, "1.00 KiB"), (10.05 * 1024, "10.1 KiB"),
     (999.6 * 1024, "0.98 MiB"),
     (80 * 2**30, "80.0 GiB"), (141.2 * 2**30, "141 GiB"), (5 * 2**60, "5120 PiB")],
)  # fmt: skip
def test_bytes_have_three_digits(size: float, text: str) -> None:
    assert bytes_text(size) == text


def test_times_are_given_in_the_unit_that_fits() -> None:
    assert [milliseconds(s) for s in (1.2345, 0.01234, 0.001234, 1e-5)] == [
        "1,234 ms",
        "12.3 ms",
        "1.23 ms",
        "0.010 ms",
    ]
    assert [seconds_text(s) for s in (3.5e-4, 0.0123, 2.345)] == ["350 us", "12.3 ms", "2.35 s"]
    assert [duration_text(s) for s in (0.26, 14, 303, 7800, 4 * 86400 + 3600)] == [
        "0.3 s",
        "14 s",
        "5 min 3 s",
        "2 h 10 min",
        "4 d 1 h",
    ]


def test_counts_and_lists_of_words() -> None:
    assert [count_text(1, "rank"), count_text(2048, "rank"), count_text(3, "microbatch")] == [
        "1 rank",
        "2,048 ranks",
        "3 microbatches",
    ]
    assert [one_of("a"), one_of("ab"), one_of("abc")] == ["a", "a or b", "a, b or c"]


def test_columns_of_a_table_are_aligned() -> None:
    rows = [("name", "bytes", "note"), ("a", "1", "x"), ("abcde", "1234567", "")]
    assert list(text_table(rows, left=(0, -1), indent=1)) == [
        " name     bytes  note",
        " a            1  x",
        " abcde  1234567",
    ]


def test_runs_of_numbers_are_shown_as_ranges() -> None:
    assert ranges_text([0, 2, 3, 4, 9, 10]) == "0, 2 to 4, 9 to 10"
