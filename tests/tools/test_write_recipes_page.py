"""The page of published runs is what the plan and the dry run say, and its models are those that were published."""

from __future__ import annotations

import time

import pytest

from tests.features import RECIPES
from tools.write_recipes_page import (
    CONFIGS,
    DIFFERENCE,
    PAGE,
    PLANNED,
    RealRun,
    difference_cell,
    fullest_rank,
    main,
    page,
    planned_cells,
    real_runs,
    rows_of_page,
    shipped_rows,
    short_source,
)

SECONDS_TO_PLAN = 60.0  # at most, on a busy machine
SLOW_TO_COUNT = ("DeepSeek-V3",)  # more than a minute
RUNS = [pytest.param(run, id=run.name) for run in real_runs()]
COMMAND = "run python tools/write_recipes_page.py"


def test_every_recipe_has_its_real_size_and_the_page_its_flags() -> None:
    runs = real_runs()
    assert [run.name for run in runs] == [recipe.name for recipe in RECIPES if "linear attention" not in recipe.lacks]
    rows = [rows_of_page()[run.name] for run in runs]
    assert PAGE.read_text(encoding="utf-8") == page(runs, rows, shipped_rows()), f"{COMMAND} configs"
    for run, row in zip(runs, rows, strict=True):
        assert row[-1] == short_source(run), COMMAND
        assert abs(float(row[DIFFERENCE].removesuffix(" %"))) <= 3.0, f"{run.name}: the plan is off by more than 3 %"


def test_every_shipped_configuration_has_a_row_that_fits_its_gpu() -> None:
    rows = {row[0]: row for row in shipped_rows()}
    assert sorted(rows) == sorted(path.stem for path in CONFIGS.glob("*.yaml"))
    for name, (_, _, gpus, _, memory, seconds, rate) in rows.items():
        count, kind = gpus.split()
        assert kind in ("h100", "h800", "a100-80", "cpu") and 0 < float(memory) < 76, name
        tokens = float(rate.replace(",", "") or 0) * int(count.replace(",", "")) * float(seconds or 0)
        assert (tokens > 1e4) == (kind != "cpu"), name


def test_an_unknown_recipe_is_refused() -> None:
    with pytest.raises(SystemExit, match="error: 'GPT-OS' is no recipe"):
        main(["GPT-OS"])


@pytest.mark.parametrize("run", RUNS)
def test_a_recipe_is_planned_as_on_the_page(run: RealRun) -> None:
    started = time.perf_counter()
    plan = run.plan()
    _, memory = fullest_rank(plan)
    assert time.perf_counter() - started < SECONDS_TO_PLAN
    assert planned_cells(run, plan, memory) == rows_of_page()[run.name][PLANNED], COMMAND
    total, *active = run.published
    assert sum(spec.num_elements for spec in plan.specs) / 1e9 == pytest.approx(total, rel=0.02)
    # some sources leave out the embedding and the output layer
    assert not active or plan.active_parameters / 1e9 == pytest.approx(active[0], rel=0.07)


@pytest.mark.parametrize("run", [run for run in RUNS if run.id not in SLOW_TO_COUNT])
def test_a_recipe_is_counted_as_on_the_page(run: RealRun) -> None:
    plan = run.plan()
    assert difference_cell(plan, *fullest_rank(plan)) == rows_of_page()[run.name][DIFFERENCE], COMMAND
