"""The page of published runs is what the plan and the dry run say, and its models are those that were published."""

from __future__ import annotations

import time

import pytest

from megapipe.config.features import RECIPES
from tools.write_recipes_page import (
    COUNTED,
    PAGE,
    PLANNED,
    RealRun,
    counted_cells,
    fullest_rank,
    page,
    planned_cells,
    real_runs,
    rows_of_page,
)

SECONDS_TO_PLAN = 60.0  # at most, on a busy machine
SECONDS_TO_COUNT = 60.0  # of the recipes that the test counts, as on the page
RUNS = [pytest.param(run, id=run.name) for run in real_runs()]
COMMAND = "run python tools/write_recipes_page.py"


def test_every_recipe_has_its_real_size_and_the_page_its_flags() -> None:
    runs = real_runs()
    assert [run.name for run in runs] == [recipe.name for recipe in RECIPES if "linear attention" not in recipe.lacks]
    rows = [rows_of_page()[run.name] for run in runs]
    assert PAGE.read_text(encoding="utf-8") == page(runs, rows), COMMAND
    for run, row in zip(runs, rows, strict=True):
        assert abs(float(row[COUNTED][1].removesuffix(" %"))) <= 3.0, f"{run.name}: the plan is off by more than 3 %"


@pytest.mark.parametrize("run", RUNS)
def test_a_recipe_is_planned_as_on_the_page(run: RealRun) -> None:
    started = time.perf_counter()
    plan = run.plan()
    rank, memory = fullest_rank(plan)
    assert time.perf_counter() - started < SECONDS_TO_PLAN
    assert planned_cells(run, plan, rank, memory) == rows_of_page()[run.name][PLANNED], COMMAND
    total, *active = run.published
    assert sum(spec.num_elements for spec in plan.specs) / 1e9 == pytest.approx(total, rel=0.02)
    # some sources leave out the embedding and the output layer
    assert not active or plan.active_parameters / 1e9 == pytest.approx(active[0], rel=0.07)


@pytest.mark.parametrize("run", [run for run in RUNS if float(rows_of_page()[run.id][-1]) <= SECONDS_TO_COUNT])
def test_a_recipe_is_counted_as_on_the_page(run: RealRun) -> None:
    plan = run.plan()
    found = counted_cells(plan, *fullest_rank(plan))
    assert found == rows_of_page()[run.name][COUNTED], COMMAND
