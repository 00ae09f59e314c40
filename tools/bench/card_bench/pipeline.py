"""Pipeline schedules of 8 ranks with a core each, beside torch.distributed.pipelining and a bare gloo loop."""

from __future__ import annotations

from schedule_bench.cases import Case, RealCase
from schedule_bench.page import bars, line_of
from schedule_bench.run import Result, run_cases

from card_bench.report import Report
from megapipe.extras.doctor.host import resources
from megapipe.schedule.lower import default_receive_depth

RANKS, MICROBATCHES = 8, 16
SCHEDULES = {"1f1b": 1, "zb-h1": 1, "interleaved": 2}  # chunks a rank
REAL = {"1f1b": 1, "interleaved": 2}
STEPS = 3


def pipeline_8(report: Report) -> None:
    """Emulated stages and real computation, on CPUs whatever the device is."""
    cores = resources().cores
    ranks = RANKS if cores >= RANKS else 2
    if ranks < RANKS:
        report.say(f"{cores} cores: a tiny pipeline of 2 ranks runs instead; {RANKS} need {RANKS} cores")
        cases: list[Case | RealCase] = [
            Case("1f1b", 2, 3, 1, 0.002, 1024),
            RealCase("1f1b", microbatches=2, layers=2, hidden=16, heads=2, seq=8, vocab=16),
        ]
    else:
        cases = [Case(name, RANKS, MICROBATCHES, chunks) for name, chunks in SCHEDULES.items()]
        cases += [RealCase(name, RANKS, MICROBATCHES, chunks, layers=2 * RANKS) for name, chunks in REAL.items()]
    found: list[Result] = []

    def add(result: Result) -> None:
        found.append(result)
        kind = "real" if isinstance(result.case, RealCase) else "emulated"
        prefix = f"{kind}.{result.case.schedule} p {result.case.ranks}"
        for name, figures in result.figures.items():
            simulated = figures.replay_seconds
            report.figure(f"{prefix}.{name}", 1e3 * figures.measured_seconds, "ms", 1e3 * simulated or None)
        report.say(line_of(result))
        report.save()

    # no SCHED_FIFO: each rank has a core, or the figures mean nothing
    run_cases(cases, STEPS if ranks == RANKS else 2, default_receive_depth(may_use_gpu=False), False, add)
    for sentence, is_met in bars(found) if ranks == RANKS else []:
        report.bar(sentence, float(is_met), 1.0)
