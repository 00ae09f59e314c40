"""Run cases: start the ranks, give them orders, compute figures from their records."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
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


class CaseRanks:
    """Processes that run cases for one number of ranks. real_time: under SCHED_FIFO, if that is permitted."""

    def __init__(self, count: int, real_time: bool) -> None:
        self.processes = Ranks(f"{count} ranks", count, serve, real_time)
        self.real_time = all(self.processes.answers(TIMEOUT_SECONDS))

    def run(self, case: AnyCase, steps: int, receive_depth: int) -> Result:
        self.processes.name = str(case)
        found: list[RankCase] = self.processes.order(Order(case, steps, receive_depth), TIMEOUT_SECONDS)
        figures = {}
        for name in case.contenders:
            schedule, by_step = found[0].schedules[name], zip(*(rank.steps[name] for rank in found), strict=True)
            steps_of = tuple(StepFigures.of(ranks, schedule) for ranks in by_step)
            figures[name] = Figures(steps_of, max(count_actions(schedule)))
        return Result(case, figures, self.real_time)


def run_cases(
    cases: Iterable[AnyCase], steps: int, receive_depth: int, real_time: bool, report: Callable[[Result], None]
) -> list[Result]:
    """Run all cases in order, successive ones of one size on the same processes; `report` gets each result as it comes.

    Only emulated stages run under SCHED_FIFO: busy ranks would be throttled.
    """
    results: list[Result] = []
    ranks: CaseRanks | None = None
    key: tuple[int, bool] | None = None
    try:
        for case in cases:
            wanted = case.ranks, real_time and isinstance(case, Case)
            if wanted != key or ranks is None:
                if ranks is not None:
                    ranks.processes.close(None)
                ranks, key = CaseRanks(*wanted), wanted
            results.append(ranks.run(case, steps, receive_depth))
            report(results[-1])
        if ranks is not None:
            ranks.processes.close(None)
    except BaseException:
        if ranks is not None:
            ranks.processes.kill()
        raise
    return results
