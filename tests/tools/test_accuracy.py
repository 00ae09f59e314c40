"""The tables of docs/time_model.md are those that tools/accuracy.py makes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megapipe.extras.search.spread import SPREAD
from tests.extras.search.published import sweeps
from tools.accuracy import PAGE, choice_line, choice_lines, error_lines, main, spread, sweep_line, tables

# few rows, cheap to plan; the others are compared with --all
QUICK = ("fms-fsdp", "primus", "deepseek")
QUICK_SWEEPS = ("primus: Llama-2 7B on 8 MI300X by schedule",)  # all of that source


def text(line: tuple[str, ...]) -> str:
    return f"| {' | '.join(line)} |"


@pytest.mark.parametrize("source", QUICK)
def test_the_page_states_the_errors_of_a_source(source: str) -> None:
    lines = [line for line in error_lines([source]) if line[0] == source]
    assert lines
    assert all(text(line) in PAGE.read_text() for line in lines)


def test_the_page_states_the_choices_of_a_source() -> None:
    found = [sweep_line(name, sweeps()[name]) for name in QUICK_SWEEPS]
    assert text(choice_line("primus", found)) in PAGE.read_text()


def test_the_choices_of_a_source_are_those_of_its_sweeps() -> None:
    lines = [
        ("a: 1", "4", "+0.0%", "yes", "1.000", "90%"),
        ("a: 2", "6", "+12.5%", "no", "1.010", "-"),
        ("b: 3", "5", "+4.9%", "yes", "1.000", "100%"),
    ]
    assert choice_lines(lines) == [
        ("a", "2", "10", "1 of 2", "+12.5%", "90%"),
        ("b", "1", "5", "1 of 1", "+4.9%", "100%"),
        ("all 2", "3", "15", "2 of 3", "+12.5%", "90% to 100%"),
    ]


def test_the_command_prints_each_row_of_a_source(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--rows", "fms-fsdp"])
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("fms-fsdp ") for line in lines) == 8
    assert any("errors" not in line and "fms-fsdp" in line and "dense" in line for line in lines)


def test_the_page_has_the_tables_of_the_tool() -> None:
    page = PAGE.read_text()
    for name, table in tables().items():
        assert f"<!-- {name} -->\n{table}<!-- end -->" in page


@dataclass(frozen=True)
class Timed:
    """A row of a sweep with what `spread` reads."""

    settings: dict[str, Any]
    ratio: float
    why_outside: str | None = None
    why_refused: str | None = None


@given(st.floats(0.2, 5.0), st.floats(0.5, 2.0), st.integers(5, 8))
def test_the_common_error_of_a_sweep_cancels_in_the_spread(common: float, extra: float, count: int) -> None:
    """Half of the rows have tp 2, and an error of their own."""
    rows = [Timed({"tp": 1 + number % 2, "micro": 1}, common * extra ** (number % 2)) for number in range(2 * count)]
    found = spread({"a": rows, "b": [Timed({"tp": 1, "pp": 2}, 1.0)] * 9})  # type: ignore[arg-type]
    assert found == {"tp": (pytest.approx(abs(math.log(extra)), abs=1e-9), count * count)}


def test_the_search_prints_the_spread_of_the_published_sweeps() -> None:
    found = spread(sweeps())
    assert {kind: count for kind, (_, count) in found.items()} == {kind: count for kind, (_, count) in SPREAD.items()}
    assert all(error == pytest.approx(SPREAD[kind][0], abs=0.0006) for kind, (error, _) in found.items())
