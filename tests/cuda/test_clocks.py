"""Times of a GPU from events in its streams: on the host's clock, without a synchronization, in profiles and for
stragglers."""

from __future__ import annotations

from pathlib import Path
from time import perf_counter_ns

import pytest
import torch

from megapipe.extras.calibrate.rates import Stopwatch
from megapipe.extras.report.profile import profiles_in, read_profile
from megapipe.gpu.device_clock import EventClock
from tests.cuda.test_training import CARD, SHARED, WORDS
from tests.launch.scripts import launch
from tests.train.jobs import job

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

CYCLES = 200_000_000  # of torch.cuda._sleep: some tenth of a second


@pytest.mark.timing
def test_a_mark_is_on_the_hosts_clock_and_costs_no_wait() -> None:
    clock = EventClock(torch.device(CARD))
    torch.cuda._sleep(1000)
    torch.cuda.synchronize()
    clock.begin()
    idle, mark = perf_counter_ns(), clock.mark()
    torch.cuda._sleep(CYCLES)
    after = clock.mark()
    launched = perf_counter_ns()
    torch.cuda.synchronize()
    done = perf_counter_ns()
    clock.end()
    assert launched - idle < 10_000_000 < done - launched, "the sleep was too short to measure, or a mark waited for it"
    assert clock.error_ns < 1_000_000
    assert idle - clock.error_ns <= clock.time_of(mark) <= launched + clock.error_ns
    assert launched < clock.time_of(after) <= done + clock.error_ns
    converted = (clock.time_of(after) - clock.time_of(mark)) / 1e9  # each reading of the clocks has its error
    assert clock.seconds(mark, after) == pytest.approx(converted, abs=2e-9 * clock.error_ns + 1e-5)


@pytest.mark.timing
def test_a_stopwatch_measures_a_kernel_and_not_its_launch() -> None:
    a = torch.randn(4096, 4096, device=CARD)
    watch = Stopwatch(torch.device(CARD))
    one, four = (watch.seconds(lambda calls=calls: [torch.mm(a, a) for _ in range(calls)], 0.5) for calls in (1, 4))
    assert four / one == pytest.approx(4, rel=0.2)


@pytest.mark.parametrize("schedule", ["1f1b", "dualpipe-v"])
def test_ranks_that_share_a_gpu_are_profiled_by_events(schedule: str, tmp_path: Path) -> None:
    grid = f"--pipeline-model-parallel-size 2 --pipeline-schedule {schedule} --untie-embeddings-and-output-weights"
    profile = "--profile-pipeline --profile-step-start 1 --profile-step-end 3"
    words = [*WORDS, *SHARED.split(), *grid.split(), *profile.split(), "--train-iters", "4"]
    with launch(tmp_path, 2, *words, "--metrics-file", str(tmp_path / "m.jsonl")) as command:
        ended = command.ended()
    assert ended.code == 0, ended.error
    found = read_profile(profiles_in(tmp_path)[0])
    assert all(note.error_ns > 0 for note in found.clocks), "times of the GPU are on the host's clock within a bound"
    for step in found.pipelines[0].steps:
        for row in step.rows:
            assert all(end >= start for start, end in zip(row.starts_ns, row.ends_ns, strict=True))


def test_the_last_step_before_a_line_is_logged_on_a_gpu(tmp_path: Path) -> None:
    words = [
        *WORDS,
        *SHARED.split(),
        "--train-iters",
        "6",
        "--log-interval",
        "6",
        "--log-straggler",
        "--global-batch-size",
        "8",
    ]
    with launch(tmp_path, 2, *words, "--save", str(tmp_path / "run")) as command:
        ended = command.ended()
    assert ended.code == 0, ended.error
    assert "stragglers, the step before step 6: longest rank" in ended.out


def test_one_rank_on_a_gpu_is_profiled(tmp_path: Path) -> None:
    flags = (
        f"--device {CARD} --train-iters 3 --profile-pipeline --profile-step-start 1 --metrics-file {tmp_path}/m.jsonl"
    )
    code, said = job(flags)
    assert code == 0, said
    assert "on which times of GPUs are at most" in said
