"""Run cases: start the ranks, give them orders, compute figures from their records."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

from bench_processes import Ranks

from schedule_bench.cases import AnyCase, Case
from schedule_bench.figures import Figures, StepFigures, count_actions
from schedule_bench.rank import Order, RankCase, serve

TIMEOUT_SECONDS = 240.0


@dataclass(frozen=True)
class Result:
    """The result of a case by contender. real_time: True if it ran under SCHED_FIFO."""

    case: AnyCase
    figures: dict[str, Figures]
    real_time: bool

    def as_json(self) -> dict[str, Any]:
        return {
            "case": asdict(self.case),
            "real_time": self.real_time,
            "contenders": {name: asdict(f) for name, f in self.figures.items()},
        }


def run_cases(cases: Iterable[AnyCase], steps: int, real_time: bool, report: Callable[[Result], None]) -> list[Result]:
    """Run all cases in order, successive ones of one size on the same processes; `report` gets each result as it comes.

    real_time: under SCHED_FIFO, if that is permitted; only emulated stages, since busy ranks would be throttled.
    """
    results: list[Result] = []
    for (count, wanted), group in groupby(cases, lambda case: (case.ranks, real_time and isinstance(case, Case))):
        with Ranks(f"{count} ranks", count, serve, wanted) as ranks:
            is_real_time = all(ranks.answers(TIMEOUT_SECONDS))
            for case in group:
                ranks.name = str(case)
                found: list[RankCase] = ranks.order(Order(case, steps), TIMEOUT_SECONDS)
                results.append(Result(case, figures_of(case, found), is_real_time))
                report(results[-1])
    return results


def figures_of(case: AnyCase, found: Sequence[RankCase]) -> dict[str, Figures]:
    """Return the figures of each contender from the records of all ranks."""
    figures = {}
    for name in case.contenders:
        schedule, by_step = found[0].schedules[name], zip(*(rank.steps[name] for rank in found), strict=True)
        replays = isinstance(case, Case) and bool(case.replays)
        steps = tuple(StepFigures.of(ranks, schedule, replays) for ranks in by_step)
        figures[name] = Figures(steps, max(count_actions(schedule)))
    return figures
