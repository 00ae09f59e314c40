"""The tables of docs/accuracy.md are those that tools/accuracy.py makes."""

from __future__ import annotations

import pytest

from tests.extras.search.published import sweeps
from tools.accuracy import PAGE, error_lines, main, source_lines, sweep_line, tables

# few rows, cheap to plan; the others are compared with --all
QUICK = ("fms-fsdp", "primus", "deepseek")
QUICK_SWEEPS = ("bigscience: 14400 x 77 on 352 by microbatch", "primus: Llama-2 7B on 8 MI300X by schedule")


def text(line: tuple[str, ...]) -> str:
    return f"| {' | '.join(line)} |"


@pytest.mark.parametrize("source", QUICK)
def test_the_page_states_the_errors_of_a_source(source: str) -> None:
    lines = [line for line in error_lines([source]) if line[0] == source]
    assert lines
    assert all(text(line) in PAGE.read_text() for line in lines)


@pytest.mark.parametrize("name", QUICK_SWEEPS)
def test_the_page_states_the_choice_of_a_sweep(name: str) -> None:
    assert text(sweep_line(name, sweeps()[name])) in PAGE.read_text()


def test_the_page_names_every_source() -> None:
    assert all(text(line) in PAGE.read_text() for line in source_lines())


def test_the_command_prints_each_row_of_a_source(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--rows", "fms-fsdp"])
    lines = capsys.readouterr().out.splitlines()
    assert sum(line.startswith("fms-fsdp ") for line in lines) == 8
    assert any("errors" not in line and "fms-fsdp" in line and "dense" in line for line in lines)


@pytest.mark.slow
def test_the_page_has_the_tables_of_the_tool() -> None:
    page = PAGE.read_text()
    for name, table in tables().items():
        assert f"<!-- {name} -->\n{table}\n<!-- end -->" in page
