"""The global batch size during a run, with and without ramp-up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megapipe.config.training import batch_size_steps
from megapipe.errors import ConfigError
from megapipe.plan.batch import batch_schedule


@st.composite
def ramps(draw: st.DrawFn) -> tuple[int, int, int, tuple[int, int, int] | None]:
    micro, dp, steps = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(0, 5))
    unit = micro * dp
    start, increment = unit * draw(st.integers(1, 4)), unit * draw(st.integers(1, 3))
    ramp = (start, increment, draw(st.integers(0, 500))) if steps else None
    return start + steps * increment, micro, dp, ramp


@given(ramps(), st.integers(0, 60))
def test_samples_and_steps_are_inverse_and_agree_with_a_loop(
    case: tuple[int, int, int, tuple[int, int, int] | None], num_steps: int
) -> None:
    schedule = batch_schedule(*case)
    consumed, sizes = 0, []
    for _ in range(num_steps):
        sizes.append(schedule.size_at(consumed))
        consumed += sizes[-1]
    assert sizes == sorted(sizes)
    assert set(sizes) <= set(schedule.sizes)
    assert schedule.samples_after(num_steps) == consumed
    assert schedule.steps_for(consumed) == num_steps
    if consumed:
        assert schedule.steps_for(consumed - 1) == num_steps - 1


def test_the_ramp_of_megatron() -> None:
    schedule = batch_schedule(32, 2, 2, (8, 8, 96))  # three increments of 32 samples each
    assert [schedule.size_at(n) for n in (0, 31, 32, 63, 64, 95, 96, 97)] == [8, 8, 16, 16, 24, 24, 32, 32]


MEGATRON = json.loads((Path(__file__).parent / "megatron_batch_steps.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", MEGATRON["accepted"], ids=lambda case: case["schedule"])
def test_the_steps_of_a_schedule_are_those_of_megatron(case: dict[str, Any]) -> None:
    steps, unit = batch_size_steps([case["schedule"]], case["seq_length"]), case["samples_per_microbatch"]
    assert steps == batch_size_steps(case["schedule"].split(), case["seq_length"]) == tuple(map(tuple, case["steps"]))
    schedule = batch_schedule(case["last"], 1, unit, None, 1, steps)
    for consumed, size, count in case["sizes_at"]:
        assert (schedule.size_at(consumed), schedule.num_microbatches_at(consumed)) == (size, count)
    consumed = 0
    for step, size in enumerate(case["first_steps"]):
        assert (schedule.size_at(consumed), schedule.samples_after(step)) == (size, consumed)
        consumed += size
        assert (schedule.steps_for(consumed), schedule.steps_for(consumed - 1)) == (step + 1, step)


@pytest.mark.parametrize("text", MEGATRON["refused"])
def test_what_megatron_refuses_of_a_schedule_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--step-batch-size-schedule"):
        batch_size_steps([text], 64)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            (10, 2, 2, None),
            r"--global-batch-size 10 is not a multiple of .* = 4; use 8 or 12, or another .*, or dp 1 or 5 ranks$",
        ),
        (
            (24, 2, 8, None, 4),
            r"size 2 x data-parallel size 8 = 16; .*, or dp 1, 2, 3, 4, 6 or 12 = 4, 8, 12, 16, 24 or 48 ranks$",
        ),
        ((24, 2, 3, (8, 8, 10), 4), r"reaches 8 is not a multiple of .* = 6; .*, or dp 1, 2 or 4 = 4, 8 or 16 ranks$"),
        ((16, 2, 2, (6, 2, 10)), r"--rampup-batch-size 6 2 reaches 6"),
        ((16, 2, 2, (4, 8, 10)), r"never reaches --global-batch-size 16: the increment must divide 12"),
        ((16, 2, 2, (20, 4, 10)), r"starts at 20, above --global-batch-size 16"),
        ((16, 2, 2, None, 1, ((0, 6), (9, 16))), r"--step-batch-size-schedule reaches 6"),
    ],
    ids=[
        "indivisible",
        "indivisible_on_this_many_ranks",
        "only_dp_that_fit_the_whole_ramp",
        "indivisible_on_the_way",
        "misses_the_end",
        "starts_above",
        "indivisible_step",
    ],
)
def test_a_batch_that_cannot_be_cut_is_refused(arguments: tuple, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        batch_schedule(*arguments)


def test_a_batch_of_more_microbatches_than_can_be_scheduled_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--global-batch-size 1000000000000 "):
        batch_schedule(10**12, 1, 1, None)
    with pytest.raises(ConfigError, match="in 10000000 sizes; at most 100000"):
        batch_schedule(10**7, 1, 1000, (1, 1, 9 * 10**18))


def test_a_long_ramp_is_counted_without_a_loop_over_its_steps() -> None:
    schedule = batch_schedule(8, 1, 1, (1, 1, 7 * 10**15))
    assert schedule.samples_after(10**15) == 10**15  # the first size lasts 1/7 of the ramp
    assert schedule.steps_for(10**15 + 20) == 10**15 + 10
