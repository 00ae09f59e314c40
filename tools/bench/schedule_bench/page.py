"""Tables of results, their bars, and their place in a Markdown page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench_processes import machine_text
from bench_table import Quartiles, as_markdown, with_text

from schedule_bench.cases import AnyCase, Case, RealCase
from schedule_bench.figures import Figures
from schedule_bench.run import Result

WORSE_THAN_TORCH = 0.005  # of the makespan, at four ranks
TO_FLOOR = 1.25
ZERO_COST_TO_FLOOR = 1.3
REAL_TO_SIMULATED, REAL_BEST = 0.97, 1.83


def part_of(case: AnyCase) -> str:
    """Return the table that a case belongs to."""
    if isinstance(case, RealCase):
        return "real"
    if case.replays:
        return "replays"
    return f"p{case.ranks}-m{case.microbatches}" if case.seconds else "zero"


def tables(results: Sequence[Result]) -> dict[str, str]:
    """Return the Markdown tables by part."""
    by_part: dict[str, list[Result]] = {}
    for result in results:
        by_part.setdefault(part_of(result.case), []).append(result)
    return {
        part: as_markdown([HEADS[_kind(part)], *(ROWS[_kind(part)](result) for result in rows)])
        for part, rows in by_part.items()
    }


def line_of(result: Result) -> str:
    """Return one result as a line."""
    return f"{result.case}: " + " | ".join(ROWS[_kind(part_of(result.case))](result)[1:])


def _kind(part: str) -> str:
    return part if part in ("zero", "real") else "emulated"


def _emulated_row(result: Result) -> list[str]:
    assert isinstance(result.case, Case)
    found = result.figures
    ours, torch, floor = found["megapipe"], found.get("torch"), found["floor"]
    return [
        result.case.title,
        f"{ours.measured_seconds * 1e3 / result.case.steps:.1f}",
        "" if torch is None else f"{torch.measured_seconds * 1e3:.1f}",
        f"**{ours.loss:.2%}**",
        "" if torch is None else f"{torch.loss:.2%}",
        f"{floor.loss:.2%}",
        f"{ours.loss / floor.loss:.2f}",
    ]


def _zero_row(result: Result) -> list[str]:
    found = [result.figures.get(name) for name in ("megapipe", "torch", "floor")]
    walls = ["" if f is None else f"{f.seconds_an_action * 1e6:.0f}" for f in found]
    return [result.case.schedule, *walls, f"**{_times_floor(result):.2f}**"]


def _times_floor(result: Result) -> float:
    ours, floor = result.figures["megapipe"], result.figures["floor"]
    return ours.seconds_an_action / floor.seconds_an_action


def _real_row(result: Result) -> list[str]:
    alone, ours, torch = (result.figures.get(name) for name in ("alone", "megapipe", "torch"))
    assert alone is not None and ours is not None
    return [
        result.case.schedule,
        f"{alone.measured_seconds * 1e3:.0f}",
        f"{ours.measured_seconds * 1e3:.0f}",
        f"**{_speed(alone, ours):.3f}**",
        "" if torch is None else f"{_speed(alone, torch):.3f}",
        f"{_to_simulated(ours):.3f}",
    ]


def _speed(alone: Figures, other: Figures) -> float:
    """Return the median of the rounds' ratios."""
    pairs = zip(alone.steps, other.steps, strict=True)
    return Quartiles.of([a.measured_seconds / b.measured_seconds for a, b in pairs]).median


def _to_simulated(ours: Figures) -> float:
    """Return the ratio of simulated to measured step."""
    return 1 / (1 + ours.loss)


HEADS = {
    "emulated": ("schedule", "step ms", "torch's step ms", "loss", "torch's loss", "floor's loss", "to the floor"),
    "zero": ("schedule", "us an action", "torch", "floor", "to the floor"),
    "real": ("schedule", "one process ms", "step ms", "to one process", "torch to one process", "simulated / measured"),
}
ROWS = {"emulated": _emulated_row, "zero": _zero_row, "real": _real_row}


def bars(results: Sequence[Result]) -> list[tuple[str, bool]]:
    """Return the bars with the rows that miss them, and True if all are met."""
    said: list[tuple[str, bool]] = []
    emulated = [r for r in results if isinstance(r.case, Case) and r.case.seconds]
    for ranks in sorted({r.case.ranks for r in emulated}):
        rows = [r for r in emulated if r.case.ranks == ranks and "torch" in r.figures]
        rule = f"p {ranks}: never more than {_allowed(ranks):.1%} worse than torch"
        said += _verdict(rule, rows, lambda r: _loss(r, "megapipe") - _loss(r, "torch") <= _allowed(r.case.ranks))
    rows = [r for r in emulated if r.case.ranks == 4]
    in_torch = [r for r in rows if "torch" in r.figures]
    if in_torch:
        better = sum(_loss(r, "megapipe") < _loss(r, "torch") for r in in_torch)
        said.append((f"p 4: better than torch in {better} of {len(in_torch)} rows", 2 * better > len(in_torch)))
    rule = f"p 4: at most {TO_FLOOR} times the floor's loss"
    said += _verdict(rule, rows, lambda r: _loss(r, "megapipe") <= TO_FLOOR * _loss(r, "floor"))
    zero = [r for r in results if isinstance(r.case, Case) and not r.case.seconds]
    rule = f"p 2, stages that cost nothing: at most {ZERO_COST_TO_FLOOR} times the floor"
    said += _verdict(rule, zero, lambda r: _times_floor(r) <= ZERO_COST_TO_FLOOR)
    real = [r for r in results if isinstance(r.case, RealCase)]
    rule = f"real computation: 1f1b at {REAL_TO_SIMULATED} of its simulation"
    first = [r for r in real if r.case.schedule == "1f1b"]
    said += _verdict(rule, first, lambda r: _to_simulated(r.figures["megapipe"]) >= REAL_TO_SIMULATED)
    if real:
        best = max(_speed(r.figures["alone"], r.figures["megapipe"]) for r in real)
        rule = f"real computation: the best schedule at {best:.3f} times one process ({REAL_BEST} required)"
        said.append((rule, best >= REAL_BEST))
    return said


def _allowed(ranks: int) -> float:
    """Return by how much of the makespan a schedule may be worse than torch's."""
    return WORSE_THAN_TORCH if ranks <= 4 else 0.0


def _loss(result: Result, name: str) -> float:
    return result.figures[name].loss


def _verdict(rule: str, rows: Sequence[Result], is_met: Callable[[Result], bool]) -> list[tuple[str, bool]]:
    missed = [str(row.case) for row in rows if not is_met(row)]
    return [(f"{rule}: {'missed by ' + ', '.join(missed) if missed else 'met'}", not missed)] if rows else []


def as_json(results: Sequence[Result]) -> dict[str, Any]:
    """Return milliseconds of every contender, the bars, a line for each case, and the numbers of every step."""
    figures = {}
    for result in results:
        for name, found in result.figures.items():
            figures[f"{result.case}.{name}"] = 1e3 * found.measured_seconds
            figures[f"{result.case}.{name}.simulated"] = 1e3 * found.replay_seconds
    return {
        "figures": figures,
        "bars": [{"name": said, "value": float(met), "bar": 1.0, "met": met} for said, met in bars(results)],
        "sentences": [line_of(result) for result in results],
        "cases": [result.as_json() for result in results],
    }


def machine(results: Sequence[Result], steps: int) -> str:
    """Return the machine on which the figures were measured, and how."""
    import torch

    emulated = [result for result in results if isinstance(result.case, Case)]
    is_real_time = bool(emulated) and all(result.real_time for result in emulated)
    policy = "SCHED_FIFO" if is_real_time else "the default scheduling policy"
    return (
        f"{machine_text()}; torch {torch.__version__}; one thread a rank; emulated devices under {policy}; lower "
        f"quartile of {steps} steps of each contender in turn."
    )


def insert(page: Path, found: dict[str, str], on: str) -> None:
    """Replace the text between `<!-- PART -->` and `<!-- /PART -->`; other parts stay. Raises BenchError."""
    text = page.read_text()
    for part, table in found.items():
        text = with_text(text, part, f"\n\n{on}\n\n{table}\n\n")
    page.write_text(text)
